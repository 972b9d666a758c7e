-- Replace metadata or add messages. ARGV: id, tenant, 'metadata' or 'messages', packed value, change id
-- Keys: conversation. Returns the view or nil
local key = K.conversation .. ARGV[1]
if not conversation_view(ARGV[1], ARGV[2]) then return nil end
if ARGV[3] == 'metadata' then
  call('HSET', key, 'metadata', ARGV[4])
elseif call('HGET', key, 'change') ~= ARGV[5] then
  call('HSET', key, 'pending', (call('HGET', key, 'pending') or '') .. ARGV[4], 'change', ARGV[5])
end
return conversation_view(ARGV[1], ARGV[2])
