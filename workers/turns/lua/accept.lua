-- Accept a turn: its record, its idempotency key and its place in its branch, or a refusal that writes nothing.
-- Keys: turn, branch, waiting, conversation, queued/forced, tenants, open, open_by_tenant, due, deadlines, worker,
--       idempotency, the parent's transcript
--       model_queue, worker_queue
-- ARGV[21], [22]: the turn's queue message before and after the JSON text of its queue's name, or both ''
-- Returns {kind, turn id, messages to send, retry after (s)}
local id, tenant, model, request, parent_id, conversation_id = unpack(ARGV, 1, 6)
local created_s, deadline_ms, priority, worker, store, scope, idempotency, body = unpack(ARGV, 7, 14)
local max_model, max_tenant, memory_fraction = tonumber(ARGV[15]), tonumber(ARGV[16]), tonumber(ARGV[17])
local idempotency_ttl_s, stream_ttl_s, retention_s = ARGV[18], ARGV[19], ARGV[20]
local message_head, message_tail = ARGV[21], ARGV[22]
local now = now_ms()

local function refuse(kind, retry_after_s) return {kind, '', {}, retry_after_s or 0} end

local function retry_after_s()
  local average = tonumber(call('HGET', K.service_ms, model) or 1000)
  return math.max(1, math.min(60, math.ceil(average / 1000)))
end

local earlier = load(id)
if earlier then
  if earlier.tenant ~= tenant then return refuse('key_conflict') end
  return {'accepted', id, earlier.sends ~= '' and cmsgpack.unpack(earlier.sends) or {}, 0}
end

if idempotency ~= '' then
  local known = call('HMGET', idempotency, 'body', 'turn')
  if known[1] then
    if known[1] ~= body then return refuse('key_conflict') end
    return {'existing', known[2], {}, 0}
  end
end

if worker ~= '' and not is_serving(worker, model) then return refuse('worker_not_found') end
if tonumber(call('HGET', K.open, model) or 0) >= max_model
  or tonumber(call('HGET', K.open_by_tenant .. model, tenant) or 0) >= max_tenant then
  return refuse('queue_full', retry_after_s())
end
local memory = call('INFO', 'memory')
local limit = tonumber(memory:match('\nmaxmemory:(%d+)'))
if limit > 0 and tonumber(memory:match('\nused_memory:(%d+)')) > limit * memory_fraction then
  return refuse('memory_full', 5)
end

local conversation = K.conversation .. conversation_id
local parent
if conversation_id ~= '' then
  local known = call('HMGET', conversation, 'tenant', 'deleted')
  if known[1] ~= tenant or known[2] == '1' then return refuse('conversation_not_found') end
elseif parent_id ~= '' then
  parent = load_visible(parent_id, tenant)
  if not parent then return refuse('parent_not_found') end
  if COMMITTED[parent.state] then
    if call('EXISTS', transcript_key(tenant, parent_id)) == 0 then return refuse('parent_not_found') end
  elseif not OPEN[parent.state] then
    return refuse('parent_failed')
  end
end

local turn = {id = id, worker = worker, model = model, tenant = tenant, priority = priority, deadline_ms = deadline_ms,
  ready_ms = int(now), hot = ''}
local branch = conversation_id ~= '' and conversation_id or id
set(turn, 'tenant', tenant, 'model', model, 'branch', branch, 'request', request, 'scope', scope, 'store', store,
  'priority', priority, 'ready_ms', int(now), 'created_s', created_s, 'deadline_ms', deadline_ms, 'worker', worker,
  'conversation', conversation_id, 'by_id', parent and '1' or '', 'idempotency', idempotency,
  'stream_ttl_s', stream_ttl_s, 'retention_s', retention_s, 'state', 'queued', 'epoch', '0', 'crashes', '0',
  'solo_crashes', '0', 'next', '0', 'parent', parent_id, 'root', id, 'template_time', created_s)
if idempotency ~= '' then
  call('HSET', idempotency, 'body', body, 'turn', id)
  call('EXPIRE', idempotency, idempotency_ttl_s)
end
if deadline_ms ~= '0' then call('ZADD', K.deadlines, deadline_ms, id) end
call('HINCRBY', K.open, model, 1)
call('HINCRBY', K.open_by_tenant .. model, tenant, 1)
-- A tenant that comes back starts level with the one served least, so that it can't collect a claim while away.
local least = call('ZRANGE', K.tenants .. model, 0, 0, 'WITHSCORES')
call('ZADD', K.tenants .. model, 'NX', least[2] or 0, tenant)

local sends = {}
call('RPUSH', K.branch .. branch, id)
if conversation_id ~= '' then
  local kept = call('HMGET', conversation, 'pending', 'worker')
  if kept[1] then
    set(turn, 'pending', kept[1])
    call('HDEL', conversation, 'pending')
  end
  if kept[2] then set(turn, 'hot', kept[2]) end
end
if parent then
  call('HINCRBY', K.turn .. parent_id, 'children', 1)
  if COMMITTED[parent.state] then inherit(turn, parent) else call('RPUSH', K.waiting .. parent_id, id) end
end
if (not parent or COMMITTED[parent.state]) and call('LINDEX', K.branch .. branch, 0) == id then
  enqueue(turn, now, sends)
end
if message_head ~= '' and sends[1] then
  local queue = sends[1][3] ~= '' and K.worker_queue .. sends[1][3] or K.model_queue .. model
  call('LPUSH', queue, message_head .. cjson.encode(queue) .. message_tail)
  sends = {}
end
set(turn, 'sends', cmsgpack.pack(sends))
return {'accepted', id, sends, 0}
