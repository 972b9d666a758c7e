-- What no message, worker or client can lose. ARGV: most messages to return, wait for a worker that is named (ms)
-- Keys: leased, deadlines, due, turn, queued/forced, tenants, workers, worker, model_queue, worker_queue
-- Returns messages to send
local now, limit, worker_wait_ms, sends = now_ms(), tonumber(ARGV[1]), tonumber(ARGV[2]), {}
lose_expired_leases(now, limit, sends)
for _, id in ipairs(call('ZRANGEBYSCORE', K.deadlines, '-inf', now, 'LIMIT', 0, limit)) do
  local turn = load(id)
  call('ZREM', K.deadlines, id)
  if turn and OPEN[turn.state] then stop(turn, now, 'expired', sends) end
end

local idle_slots = {}
for _, worker in ipairs(call('SMEMBERS', K.workers)) do
  local seen = call('HMGET', K.worker .. worker, 'model', 'free', 'draining')
  if seen[1] and seen[3] ~= '1' then
    local free = math.max(0, tonumber(seen[2]))
    idle_slots['model ' .. seen[1]] = (idle_slots['model ' .. seen[1]] or 0) + free
    idle_slots['worker ' .. worker] = free
  end
end

-- A turn that waits beside an idle slot has lost its message, with a process that took and acknowledged it.
local function is_overlooked(turn)
  local where = turn.worker ~= '' and 'worker ' .. turn.worker or 'model ' .. turn.model
  if (idle_slots[where] or 0) <= 0 or now - tonumber(turn.sent_ms) < IDLE_RESEND_MS then return false end
  idle_slots[where] = idle_slots[where] - 1
  return true
end

-- A message brings any turn of its queue, so a queue with a message for each has lost none; without workers it would
-- grow for ever. A worker's own queue is also used for turns that others may take: hence the slack.
local room = {}
local function has_room(turn)
  local queue, wanted = K.worker_queue .. turn.worker, 0
  if turn.worker == '' then queue = K.model_queue .. turn.model end
  if room[queue] == nil then
    if turn.worker ~= '' then
      wanted = 2 * call('ZCARD', K.forced .. turn.worker) + 8
    else
      for _, tenant in ipairs(call('ZRANGE', K.tenants .. turn.model, 0, -1)) do
        wanted = wanted + call('ZCARD', K.queued .. turn.model .. ':' .. tenant)
      end
    end
    room[queue] = wanted - call('LLEN', queue)
  end
  room[queue] = room[queue] - 1
  return room[queue] >= 0
end

-- A turn waits for the worker that it names while that may be starting again, not for ever.
local function is_deserted(turn)
  if turn.worker == '' or is_serving(turn.worker, turn.model) then
    if turn.alone_ms ~= '' then set(turn, 'alone_ms', '') end
    return false
  end
  if turn.alone_ms == '' then set(turn, 'alone_ms', int(now)) end
  return now - tonumber(turn.alone_ms) >= worker_wait_ms
end

local due = call('ZRANGE', K.due, 0, limit - 1, 'WITHSCORES')
for i = 1, #due, 2 do
  local id, is_due = due[i], tonumber(due[i + 1]) <= now
  local turn = load(id)
  if not turn or not OPEN[turn.state] or turn.nonce ~= '' then
    call('ZREM', K.due, id)
  elseif is_deserted(turn) then
    finish(turn, now, 'failed', ENDINGS.worker_gone, 1, sends)
  elseif is_due or is_overlooked(turn) then
    -- Only the first message goes to the hottest worker; a repeat goes to whoever is there.
    if has_room(turn) then sends[#sends + 1] = {id, turn.model, turn.worker} end
    local delay = tonumber(turn.delay_ms)
    call('ZADD', K.due, now + delay, id)
    set(turn, 'delay_ms', is_due and math.min(2 * delay, LONGEST_RESEND_MS) or delay, 'sent_ms', int(now))
  end
end
return sends
