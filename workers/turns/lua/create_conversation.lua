-- Create a conversation unless it exists. ARGV: id, tenant, metadata, packed messages or '', life (s)
-- Keys: conversation. Returns the view, or nil when the id is another tenant's or was deleted
local key = K.conversation .. ARGV[1]
if call('EXISTS', key) == 0 then
  call('HSET', key, 'tenant', ARGV[2], 'created_ms', int(now_ms()), 'metadata', ARGV[3])
  if ARGV[4] ~= '' then call('HSET', key, 'pending', ARGV[4]) end
  call('EXPIRE', key, ARGV[5])
end
return conversation_view(ARGV[1], ARGV[2])
