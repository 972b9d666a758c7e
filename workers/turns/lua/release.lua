-- Give a turn back: claimable at once, no crash counted. ARGV: turn, epoch, nonce
-- Keys: turn, queued/forced, leased, worker_leases, due. Returns {'ok', messages to send} or a refusal
local turn, refusal = load_fenced(ARGV[1], ARGV[2], ARGV[3])
if not turn then
  local ended = load(ARGV[1])
  if ended and ended.release_epoch == ARGV[2] and ended.release_nonce == ARGV[3] then
    return {'ok', cmsgpack.unpack(ended.sends)}
  end
  return refusal
end
local now, sends = now_ms(), {}
end_lease(turn)
set(turn, 'hot', '', 'release_epoch', ARGV[2], 'release_nonce', ARGV[3])
if turn.cancel ~= '' then
  finish(turn, now, turn.cancel, ENDINGS[turn.cancel], 1, sends)
else
  enqueue(turn, now, sends)
end
set(turn, 'sends', cmsgpack.pack(sends))
return {'ok', sends}
