-- Demand and slots by model. Keys: open, leased, turn, workers, worker, service_ms
-- Returns {{model, open turns, in progress, slots, free, workers, average run time (ms)}, ...}
local found = {}
local function at(model)
  found[model] = found[model] or {open = 0, running = 0, slots = 0, free = 0, workers = 0}
  return found[model]
end
local open = call('HGETALL', K.open)
for i = 1, #open, 2 do at(open[i]).open = tonumber(open[i + 1]) end
for _, id in ipairs(call('ZRANGE', K.leased, 0, -1)) do
  local model = call('HGET', K.turn .. id, 'model')
  if model then at(model).running = at(model).running + 1 end
end
for _, worker in ipairs(call('SMEMBERS', K.workers)) do
  local seen = call('HMGET', K.worker .. worker, 'model', 'slots', 'free', 'draining')
  if seen[1] and seen[4] ~= '1' then
    local sum = at(seen[1])
    sum.slots, sum.free, sum.workers = sum.slots + seen[2], sum.free + math.max(0, seen[3]), sum.workers + 1
  end
end
local reply = {}
for model, sum in pairs(found) do
  local average = call('HGET', K.service_ms, model) or '0'
  reply[#reply + 1] = {model, sum.open, sum.running, sum.slots, sum.free, sum.workers, average}
end
return reply
