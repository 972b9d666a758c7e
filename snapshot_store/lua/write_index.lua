-- Writes a snapshot index entry unless that of a later commit is there. Control server.
-- KEYS[1] kvalet:<tenant>:snapshot:<branch>, a hash: committed (microseconds), entry (msgpack),
--         numerics:<hex> = cells parked under it
-- ARGV: committed, entry, numerics digest hex, cells, time to live in seconds
-- Returns 1 if it was written, 0 if the branch has gone on meanwhile.
local held = redis.call('HGET', KEYS[1], 'committed')
if held and tonumber(held) > tonumber(ARGV[1]) then
  return 0
end
redis.call('HSET', KEYS[1], 'committed', ARGV[1], 'entry', ARGV[2], 'numerics:' .. ARGV[3], ARGV[4])
redis.call('EXPIRE', KEYS[1], ARGV[5])
return 1
