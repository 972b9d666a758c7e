-- Forget workers without heartbeat. Keys: workers, worker. Returns their ids
local dead = {}
for _, worker in ipairs(call('SMEMBERS', K.workers)) do
  if call('EXISTS', K.worker .. worker) == 0 then
    call('SREM', K.workers, worker)
    dead[#dead + 1] = worker
  end
end
return dead
