-- Writes a snapshot index entry unless a writer with a later epoch was here. Control server.
-- KEYS[1] kvalet:<tenant>:snapshot:<branch>, a hash: epoch, entry (msgpack), numerics:<hex> = cells parked under it
-- ARGV: epoch, entry, numerics digest hex, cells, time to live in seconds
-- Returns 1 if it was written, 0 if the writer is stale.
local held = redis.call('HGET', KEYS[1], 'epoch')
if held and tonumber(held) > tonumber(ARGV[1]) then
  return 0
end
redis.call('HSET', KEYS[1], 'epoch', ARGV[1], 'entry', ARGV[2], 'numerics:' .. ARGV[3], ARGV[4])
redis.call('EXPIRE', KEYS[1], ARGV[5])
return 1
