-- Take the lease of the named turn or of another runnable one that goes before it.
-- Keys: turn, stream, conversation, queued/forced, tenants, leased, worker_leases, due, claim, worker
-- Returns nil, or {record fields, stream entries}
local wanted, nonce, worker, boot = unpack(ARGV, 1, 4)
local lease_ms, affinity_wait_ms, numerics = tonumber(ARGV[5]), tonumber(ARGV[6]), ARGV[7]
local num_models = tonumber(ARGV[8])
local serves, hot_branches = {}, {}
for i = 9, 8 + num_models do serves[ARGV[i]] = true end
for i = 9 + num_models, #ARGV do hot_branches[ARGV[i]] = true end
local MAX_TENANTS, HEADS, STARVED_MS = 256, 4, 60000
local now = now_ms()

local function answer(turn)
  local names = {'request', 'branch', 'epoch', 'nonce', 'lease_worker', 'parent', 'root', 'template_time', 'scope',
    'crashes', 'lease_solo', 'prompt_ids', 'pending', 'next', 'runs'}
  local values, flat = call('HMGET', K.turn .. turn.id, unpack(names)), {}
  for i, name in ipairs(names) do
    flat[#flat + 1] = name
    flat[#flat + 1] = values[i] or ''
  end
  return {flat, call('XRANGE', K.stream .. turn.id, '-', '+')}
end

local repeated = call('GET', K.claim .. nonce)
if repeated then
  local turn = load(repeated)
  if turn and turn.nonce == nonce then return answer(turn) end
  return nil
end

local freed = {}
lose_expired_leases(now, 16, freed)
-- Nobody sends messages for a claim: the next sweep does.
for _, message in ipairs(freed) do call('ZADD', K.due, 'XX', now, message[1]) end

local free_cache = {}
local function is_free_elsewhere(other)
  if free_cache[other] == nil then free_cache[other] = has_free_slot(other) and true or false end
  return free_cache[other]
end

local candidates = {}
local function consider(id, served)
  local turn = load(id)
  if not turn or turn.nonce ~= '' or not OPEN[turn.state] or not serves[turn.model] then return end
  local waited = now - tonumber(turn.ready_ms)
  local is_hot = turn.hot == worker or hot_branches[turn.branch]
  candidates[#candidates + 1] = {
    turn = turn,
    is_deferred = not is_hot and turn.worker == '' and turn.hot ~= '' and waited < affinity_wait_ms
      and is_free_elsewhere(turn.hot),
    is_starved = waited > STARVED_MS,
    level = tonumber(turn.priority),
    served = served,
    rank = rank(turn) - (is_hot and affinity_wait_ms or 0),
  }
end

for _, id in ipairs(call('ZRANGE', K.forced .. worker, 0, HEADS - 1)) do
  local owner = call('HMGET', K.turn .. id, 'model', 'tenant')
  consider(id, tonumber(owner[1] and call('ZSCORE', K.tenants .. owner[1], owner[2]) or 0))
end
for model in pairs(serves) do
  local tenants = call('ZRANGE', K.tenants .. model, 0, MAX_TENANTS - 1, 'WITHSCORES')
  for i = 1, #tenants, 2 do
    for _, id in ipairs(call('ZRANGE', K.queued .. model .. ':' .. tenants[i], 0, HEADS - 1)) do
      consider(id, tonumber(tenants[i + 1]))
    end
  end
end

local function goes_before(a, b)
  if a.is_deferred ~= b.is_deferred then return b.is_deferred end
  if a.level ~= b.level then return a.level > b.level end
  if a.served ~= b.served then return a.served < b.served end
  if a.rank ~= b.rank then return a.rank < b.rank end
  return a.turn.id < b.turn.id
end

local highest, best = -math.huge, nil
for _, candidate in ipairs(candidates) do highest = math.max(highest, candidate.level) end
for _, candidate in ipairs(candidates) do
  if candidate.is_starved then candidate.level = highest end
end
for _, candidate in ipairs(candidates) do
  if not best or goes_before(candidate, best) then best = candidate end
end
if best and best.is_deferred and best.turn.id ~= wanted then
  call('ZADD', K.due, 'XX', 'LT', now + affinity_wait_ms, best.turn.id)
  best = nil
end

-- The message of a turn that not every worker may take has been used up: send it again soon.
local left_behind = (not best or best.turn.id ~= wanted) and load(wanted)
if left_behind and left_behind.runnable == '1' and left_behind.nonce == '' and OPEN[left_behind.state]
  and (left_behind.worker ~= '' or left_behind.hot ~= '') then
  call('ZADD', K.due, 'XX', 'LT', now + AFFINITY_RESEND_MS, wanted)
end
if not best then return nil end

local turn = best.turn
dequeue(turn)
local runs = turn.runs
if runs:match(':(%w*)$') ~= numerics then
  runs = (runs ~= '' and runs .. ' ' or '') .. int(tonumber(turn.next) or 0) .. ':' .. numerics
end
local started_ms = turn.started_ms ~= '' and turn.started_ms or int(now)
set(turn, 'epoch', int(tonumber(turn.epoch) + 1), 'nonce', nonce, 'lease_worker', worker, 'lease_boot', boot,
  'lease_until', int(now + lease_ms), 'lease_ms', int(lease_ms), 'claimed_ms', int(now), 'state', 'in_progress',
  'started_ms', started_ms, 'runs', runs, 'lease_solo', tonumber(turn.crashes) >= SOLO_AFTER_CRASHES and '1' or '')
call('ZADD', K.leased, int(now + lease_ms), turn.id)
call('SADD', K.worker_leases .. worker, turn.id)
call('SET', K.claim .. nonce, turn.id, 'PX', int(math.max(60000, 2 * lease_ms)))
change_free_slots(worker, -1)
if turn.conversation ~= '' and turn.frozen ~= '1' then
  local known = call('HMGET', K.conversation .. turn.conversation, 'head', 'root', 'template_time', 'scope')
  if known[1] then
    set(turn, 'parent', known[1], 'root', known[2], 'template_time', known[3], 'scope', known[4])
  end
end
return answer(turn)
