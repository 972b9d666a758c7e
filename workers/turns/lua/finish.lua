-- End a turn by its lease holder; with a transcript entry it is committed and the head moves.
-- ARGV: turn, epoch, nonce, first number, count, packed events, state, served tokens,
--       transcript entry or '', parent, root, template time, history key or ''
-- KEYS: transcript of this turn, transcripts of its ancestors (only with an entry)
-- Keys: turn, stream, branch, waiting, conversation, conversation_turns, queues, counters
-- Returns {'ok', messages to send} or a refusal
local state, entry = ARGV[7], ARGV[9]
local turn, refusal = load_fenced(ARGV[1], ARGV[2], ARGV[3])
if not turn then
  local ended = load(ARGV[1])
  if ended and ended.end_epoch == ARGV[2] and ended.end_nonce == ARGV[3] and ended.state == state then
    return {'ok', cmsgpack.unpack(ended.sends)}
  end
  return refusal
end
if ARGV[4] ~= turn.next then return {'conflict', {ARGV[4], turn.next}} end

local now, sends = now_ms(), {}
if COMMITTED[state] then
  local conversation = K.conversation .. turn.conversation
  local known = turn.conversation ~= '' and call('HMGET', conversation, 'tenant', 'head', 'deleted') or {}
  local has_head = known[1] and known[3] ~= '1'
  if has_head and (known[2] or '') ~= ARGV[10] then return {'parent_moved', {}} end
  if turn.by_id == '1' and turn.parent ~= ARGV[10] then return {'parent_moved', {}} end

  local is_kept = turn.store == '1' or turn.conversation ~= ''
  local life = is_kept and turn.retention_s or turn.stream_ttl_s
  call('SET', KEYS[1], entry, 'EX', life)
  for i = 2, #KEYS do call('EXPIRE', KEYS[i], life, 'GT') end
  set(turn, 'parent', ARGV[10], 'root', ARGV[11], 'template_time', ARGV[12])
  if ARGV[13] ~= '' then call('SET', ARGV[13], turn.id, 'EX', life) end
  if has_head then
    call('HSET', conversation, 'head', turn.id, 'root', turn.root, 'template_time', turn.template_time,
      'scope', turn.scope, 'worker', turn.lease_worker)
    call('RPUSH', K.conversation_turns .. turn.conversation, turn.id)
    call('EXPIRE', conversation, turn.retention_s, 'GT')
    call('EXPIRE', K.conversation_turns .. turn.conversation, turn.retention_s)
  end
end
if tonumber(ARGV[8]) > 0 and call('ZSCORE', K.tenants .. turn.model, turn.tenant) then
  call('ZINCRBY', K.tenants .. turn.model, ARGV[8], turn.tenant)
end
set(turn, 'end_epoch', ARGV[2], 'end_nonce', ARGV[3])
finish(turn, now, state, ARGV[6], tonumber(ARGV[5]), sends)
call('HSET', K.turn .. turn.id, 'sends', cmsgpack.pack(sends))
return {'ok', sends}
