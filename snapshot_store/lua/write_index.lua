-- Writes a snapshot index entry unless that of a later commit is there. Control server.
-- KEYS[1] kvalet:<tenant>:snapshot:<branch>, a hash: committed (microseconds), entry (msgpack),
--         numerics:<hex> = cells parked under it
-- ARGV: committed, entry, time to live in seconds, numerics digest hex of the head turn, cells,
--       then the same pairs of other numerics that it reused pages of
-- Returns 1 if it was written, 0 if the branch has gone on meanwhile.
local key = KEYS[1]
local held = redis.call('HGET', key, 'committed')
if held and tonumber(held) > tonumber(ARGV[1]) then
  return 0
end
redis.call('HSET', key, 'committed', ARGV[1], 'entry', ARGV[2], 'numerics:' .. ARGV[4], ARGV[5])
for i = 6, #ARGV, 2 do
  -- Reusing some of them says nothing about what lies behind: that count never falls here.
  local known = redis.call('HGET', key, 'numerics:' .. ARGV[i])
  if not known or tonumber(known) < tonumber(ARGV[i + 1]) then
    redis.call('HSET', key, 'numerics:' .. ARGV[i], ARGV[i + 1])
  end
end
redis.call('EXPIRE', key, ARGV[3])
return 1
