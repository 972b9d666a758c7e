-- End the leases of a dead worker process. ARGV: worker, boot id or '' (only that process), boot id or '' (all but it)
-- Keys: turn, queued/forced, leased, worker_leases, due. Returns messages to send
local now, sends = now_ms(), {}
for _, id in ipairs(call('SMEMBERS', K.worker_leases .. ARGV[1])) do
  local turn = load(id)
  if not turn or turn.nonce == '' or turn.lease_worker ~= ARGV[1] then
    call('SREM', K.worker_leases .. ARGV[1], id)
  elseif (ARGV[2] == '' or turn.lease_boot == ARGV[2]) and (ARGV[3] == '' or turn.lease_boot ~= ARGV[3]) then
    lose_lease(turn, now, sends)
  end
end
return sends
