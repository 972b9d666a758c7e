-- Live workers. Keys: workers, worker. Returns {{packed record, free, seen (ms)}, ...}
local found = {}
for _, worker in ipairs(call('SMEMBERS', K.workers)) do
  local values = call('HMGET', K.worker .. worker, 'record', 'free', 'seen_ms')
  if values[1] then found[#found + 1] = values end
end
return found
