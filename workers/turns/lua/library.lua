-- Shared part of every script: the record, its queues and its ends. `K` (key names) and `ENDINGS` (packed terminal
-- events) stand in front of it. Time is the server's.
--
-- Fields of a record (K.turn .. id); absent and '' are the same
--   tenant model branch request scope store priority ready_ms created_s deadline_ms worker (forced) conversation
--   by_id ('1': names its parent)  idempotency  stream_ttl_s retention_s
--   state  started_ms ended_ms  cancel (state in which the turn should end)  hidden  children (turns that name it)
--   runnable ('1': first of its branch, parent committed)  hot (worker that may hold its cells)  delay_ms (next resend)
--   sent_ms (last message)  alone_ms (since when the worker that it names is not there)
--   epoch nonce lease_worker lease_boot lease_until lease_ms lease_solo claimed_ms  crashes solo_crashes
--   parent root template_time  frozen prompt_ids  pending (msgpack arrays of messages, one after another)
--   runs ('first event number:numerics id' of each claim by other numerics than the one before, blanks between)
--   next (number of the next event)  terminal (packed last entry)  sends (messages that the end or release asked for)
--   end_epoch end_nonce  release_epoch release_nonce
local call = redis.call

local RESEND_MS, LONGEST_RESEND_MS, AFFINITY_RESEND_MS, IDLE_RESEND_MS = 10000, 60000, 1000, 2000
local PRIORITY_MS, DEADLINE_SLACK_MS = 60000, 60000
local SOLO_AFTER_CRASHES, MAX_SOLO_CRASHES = 2, 3
local COMMITTED = {completed = true, incomplete = true}
local OPEN = {queued = true, in_progress = true}

local META = {
  'tenant', 'model', 'branch', 'scope', 'store', 'priority', 'ready_ms', 'created_s', 'deadline_ms', 'worker',
  'conversation', 'by_id', 'idempotency', 'stream_ttl_s', 'retention_s', 'state', 'started_ms', 'cancel', 'hidden',
  'children', 'runnable', 'hot', 'delay_ms', 'sent_ms', 'alone_ms', 'epoch', 'nonce', 'lease_worker', 'lease_boot', 'lease_until', 'lease_ms',
  'lease_solo', 'claimed_ms', 'crashes', 'solo_crashes', 'parent', 'root', 'template_time', 'frozen', 'pending', 'next',
  'runs', 'sends', 'end_epoch', 'end_nonce', 'release_epoch', 'release_nonce',
}

-- Lua prints large numbers with an exponent; keys and fields need all digits.
local function int(number) return string.format('%.0f', number) end

local function now_ms()
  local time = call('TIME')
  return time[1] * 1000 + math.floor(time[2] / 1000)
end

-- The record without its large fields, or nil.
local function load(id)
  local values = call('HMGET', K.turn .. id, unpack(META))
  if not values[1] then return nil end
  local turn = {id = id}
  for i, name in ipairs(META) do turn[name] = values[i] or '' end
  return turn
end

local function set(turn, ...)
  local pairs_list = {...}
  for i = 1, #pairs_list, 2 do turn[pairs_list[i]] = pairs_list[i + 1] end
  call('HSET', K.turn .. turn.id, ...)
end

-- The record of a tenant's visible turn, or nil.
local function load_visible(id, tenant)
  local turn = load(id)
  if not turn or turn.tenant ~= tenant or turn.hidden == '1' then return nil end
  return turn
end

-- The record if this lease is its lease; else nil and the refusal.
local function load_fenced(id, epoch, nonce)
  local turn = load(id)
  if not turn then return nil, {'stale', {}} end
  if not OPEN[turn.state] then return nil, {'ended', {turn.state}} end
  if turn.nonce == '' or turn.nonce ~= nonce or turn.epoch ~= epoch then return nil, {'stale', {}} end
  return turn
end

local function queue_key(turn)
  if turn.worker ~= '' then return K.forced .. turn.worker end
  return K.queued .. turn.model .. ':' .. turn.tenant
end

-- Order within a queue: age, moved forward by a minute per priority level and by a near deadline.
local function rank(turn)
  local value = tonumber(turn.ready_ms) - tonumber(turn.priority) * PRIORITY_MS
  if turn.deadline_ms ~= '0' then value = math.min(value, tonumber(turn.deadline_ms) - DEADLINE_SLACK_MS) end
  return value
end

-- Whether a worker is there that a turn of this model may name.
local function is_serving(worker, model) return call('HGET', K.worker .. worker, 'model') == model end

local function has_free_slot(worker)
  local seen = call('HMGET', K.worker .. worker, 'free', 'draining')
  return seen[1] and tonumber(seen[1]) > 0 and seen[2] ~= '1'
end

-- Whose own queue gets the message: '' is the model's queue.
local function route(turn)
  if turn.worker ~= '' then return turn.worker end
  if turn.hot ~= '' and has_free_slot(turn.hot) then return turn.hot end
  return ''
end

-- Make a turn claimable and ask for its message.
local function enqueue(turn, now, sends)
  set(turn, 'runnable', '1', 'delay_ms', RESEND_MS, 'sent_ms', int(now))
  call('ZADD', queue_key(turn), rank(turn), turn.id)
  local worker = route(turn)
  local wait = RESEND_MS
  if worker ~= '' and worker ~= turn.worker then wait = AFFINITY_RESEND_MS end
  call('ZADD', K.due, now + wait, turn.id)
  sends[#sends + 1] = {turn.id, turn.model, worker}
end

local function dequeue(turn)
  call('ZREM', queue_key(turn), turn.id)
  call('ZREM', K.due, turn.id)
end

local function change_free_slots(worker, change)
  if call('EXISTS', K.worker .. worker) == 1 then call('HINCRBY', K.worker .. worker, 'free', change) end
end

local function end_lease(turn)
  call('ZREM', K.leased, turn.id)
  call('SREM', K.worker_leases .. turn.lease_worker, turn.id)
  change_free_slots(turn.lease_worker, 1)
  set(turn, 'nonce', '', 'lease_until', '0')
end

-- A follow-up takes root, time, scope and the place of the cells from its parent.
local function inherit(turn, parent)
  set(turn, 'root', parent.root, 'template_time', parent.template_time, 'scope', parent.scope,
    'hot', parent.lease_worker)
end

local function count_closed(turn)
  call('HINCRBY', K.open, turn.model, -1)
  if call('HINCRBY', K.open_by_tenant .. turn.model, turn.tenant, -1) <= 0 then
    call('HDEL', K.open_by_tenant .. turn.model, turn.tenant)
    call('ZREM', K.tenants .. turn.model, turn.tenant)
  end
end

local function note_run_time(turn, now)
  if turn.claimed_ms == '' then return end
  local average = tonumber(call('HGET', K.service_ms, turn.model) or now - tonumber(turn.claimed_ms))
  call('HSET', K.service_ms, turn.model, int(average * 0.9 + (now - tonumber(turn.claimed_ms)) * 0.1))
end

-- Key of snapshot_store.keys.
local function transcript_key(tenant, id) return K.tenant .. tenant .. K.transcript .. id end

-- One turn less continues this one: its parent, or nil.
local function leave_parent(turn)
  if turn.by_id ~= '1' then return nil end
  local parent = load(turn.parent)
  if parent then parent.children = call('HINCRBY', K.turn .. parent.id, 'children', -1) end
  return parent
end

-- Delete a hidden turn that nothing continues, then its parent if that was only waiting for it.
local function purge(turn)
  while turn and turn.hidden == '1' and not OPEN[turn.state] and turn.conversation == ''
    and tonumber(turn.children ~= '' and turn.children or 0) <= 0 do
    call('DEL', K.turn .. turn.id, K.stream .. turn.id, transcript_key(turn.tenant, turn.id))
    turn = leave_parent(turn)
  end
end

local function advance_branch(turn, now, sends)
  local branch = K.branch .. turn.branch
  call('LREM', branch, 1, turn.id)
  local first = call('LINDEX', branch, 0)
  if not first then return end
  local next_turn = load(first)
  if next_turn and next_turn.runnable ~= '1' then
    if COMMITTED[turn.state] then set(next_turn, 'hot', turn.lease_worker) end
    enqueue(next_turn, now, sends)
  end
end

local function give_back_pending(turn)
  local conversation = K.conversation .. turn.conversation
  if turn.pending == '' or call('EXISTS', conversation) == 0 then return end
  call('HSET', conversation, 'pending', turn.pending .. (call('HGET', conversation, 'pending') or ''))
end

-- The one terminal transition: event, record, counters, the branch's next turn, turns that wait for this one.
local finish
finish = function(turn, now, state, packed, count, sends)
  local first = tonumber(turn.next)
  call('XADD', K.stream .. turn.id, int(first + count) .. '-0', 'n', int(first), 'e', packed)
  if turn.nonce ~= '' then
    note_run_time(turn, now)
    end_lease(turn)
  end
  dequeue(turn)
  call('ZREM', K.deadlines, turn.id)
  count_closed(turn)
  set(turn, 'state', state, 'ended_ms', int(now), 'next', int(first + count), 'terminal', packed)
  call('HDEL', K.turn .. turn.id, 'prompt_ids')
  local life = (turn.store == '1' and turn.hidden ~= '1') and turn.retention_s or turn.stream_ttl_s
  call('EXPIRE', K.turn .. turn.id, life)
  call('EXPIRE', K.stream .. turn.id, turn.stream_ttl_s)
  if not COMMITTED[state] then
    if turn.idempotency ~= '' and call('HGET', turn.idempotency, 'turn') == turn.id then
      call('DEL', turn.idempotency)
    end
    purge(leave_parent(turn))
    set(turn, 'by_id', '')
    give_back_pending(turn)
  end
  advance_branch(turn, now, sends)
  for _, id in ipairs(call('LRANGE', K.waiting .. turn.id, 0, -1)) do
    local child = load(id)
    if child and OPEN[child.state] then
      if COMMITTED[state] then
        inherit(child, turn)
        enqueue(child, now, sends)
      else
        finish(child, now, 'failed', ENDINGS.parent_failed, 1, sends)
      end
    end
  end
  call('DEL', K.waiting .. turn.id)
end

-- A lease ended without release: count the crash, then make the turn claimable again or give it up.
local function lose_lease(turn, now, sends)
  end_lease(turn)
  local solo_crashes = tonumber(turn.solo_crashes) + (turn.lease_solo == '1' and 1 or 0)
  set(turn, 'crashes', tonumber(turn.crashes) + 1, 'solo_crashes', solo_crashes, 'hot', '')
  if turn.cancel ~= '' then
    finish(turn, now, turn.cancel, ENDINGS[turn.cancel], 1, sends)
  elseif solo_crashes >= MAX_SOLO_CRASHES then
    finish(turn, now, 'failed', ENDINGS.crashed, 1, sends)
  else
    enqueue(turn, now, sends)
  end
end

local function lose_expired_leases(now, limit, sends)
  for _, id in ipairs(call('ZRANGEBYSCORE', K.leased, '-inf', now, 'LIMIT', 0, limit)) do
    local turn = load(id)
    if turn and turn.nonce ~= '' then lose_lease(turn, now, sends) else call('ZREM', K.leased, id) end
  end
end

-- End an open turn as cancelled or expired: at once when nobody holds it, else by telling its worker.
local function stop(turn, now, state, sends)
  if turn.nonce ~= '' and tonumber(turn.lease_until) > now then
    if turn.cancel == '' then
      set(turn, 'cancel', state)
      local notes = K.control .. turn.lease_worker
      call('XADD', notes, 'MAXLEN', '~', 256, '*', 'turn', turn.id, 'stop', state)
      call('EXPIRE', notes, 3600)
    end
    return false
  end
  finish(turn, now, state, ENDINGS[state], 1, sends)
  return true
end

-- The view of a tenant's conversation, or nil.
local function conversation_view(id, tenant)
  local known = call('HMGET', K.conversation .. id, 'tenant', 'deleted')
  if known[1] ~= tenant or known[2] == '1' then return nil end
  local flat = call('HGETALL', K.conversation .. id)
  return {id, flat, call('LRANGE', K.branch .. id, 0, -1), call('LLEN', K.conversation_turns .. id)}
end
