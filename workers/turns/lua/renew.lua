-- Extend leases. ARGV: turn, epoch, nonce, ... Keys: turn, leased
-- Returns {kept turns, lost turns, [turn, state, ...] that should stop}
local now = now_ms()
local kept, lost, stops = {}, {}, {}
for i = 1, #ARGV, 3 do
  local turn = load_fenced(ARGV[i], ARGV[i + 1], ARGV[i + 2])
  if turn then
    local lease_until = int(now + tonumber(turn.lease_ms))
    set(turn, 'lease_until', lease_until)
    call('ZADD', K.leased, lease_until, turn.id)
    kept[#kept + 1] = turn.id
    if turn.cancel ~= '' then
      stops[#stops + 1] = turn.id
      stops[#stops + 1] = turn.cancel
    end
  else
    lost[#lost + 1] = ARGV[i]
  end
end
return {kept, lost, stops}
