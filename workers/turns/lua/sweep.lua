-- What no message, worker or client can lose. ARGV: most messages to return
-- Keys: leased, deadlines, due, turn, queues. Returns messages to send
local now, limit, sends = now_ms(), tonumber(ARGV[1]), {}
lose_expired_leases(now, limit, sends)
for _, id in ipairs(call('ZRANGEBYSCORE', K.deadlines, '-inf', now, 'LIMIT', 0, limit)) do
  local turn = load(id)
  call('ZREM', K.deadlines, id)
  if turn and OPEN[turn.state] then stop(turn, now, 'expired', sends) end
end
for _, id in ipairs(call('ZRANGEBYSCORE', K.due, '-inf', now, 'LIMIT', 0, limit)) do
  local turn = load(id)
  if turn and OPEN[turn.state] and turn.nonce == '' then
    -- Only the first message goes to the hottest worker; a repeat goes to whoever is there.
    sends[#sends + 1] = {id, turn.model, turn.worker}
    local delay = tonumber(turn.delay_ms)
    call('ZADD', K.due, now + delay, id)
    set(turn, 'delay_ms', math.min(2 * delay, LONGEST_RESEND_MS))
  else
    call('ZREM', K.due, id)
  end
end
return sends
