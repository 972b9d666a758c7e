-- Delete a conversation. ARGV: id, tenant. Keys: conversation. Returns 1 when it was there
local key = K.conversation .. ARGV[1]
local known = call('HMGET', key, 'tenant', 'deleted')
if known[1] ~= ARGV[2] then return 0 end
-- The mark outlives the content, so that a turn still open cannot bring the conversation back.
call('HDEL', key, 'metadata', 'pending', 'head', 'root', 'template_time')
call('HSET', key, 'deleted', '1')
return known[2] ~= '1' and 1 or 0
