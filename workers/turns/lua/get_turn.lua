-- A tenant's visible turn. ARGV: turn, tenant. Keys: turn, stream, transcript
-- Returns nil, or {record fields, stream entries (of a turn without transcript), transcript or nil, last entry or nil}
local turn = load_visible(ARGV[1], ARGV[2])
if not turn then return nil end
local names = {'request', 'state', 'started_ms', 'ended_ms', 'lease_worker', 'epoch', 'crashes', 'parent', 'next'}
local values, flat = call('HMGET', K.turn .. turn.id, unpack(names)), {}
for i, name in ipairs(names) do
  flat[#flat + 1] = name
  flat[#flat + 1] = values[i] or ''
end
local transcript = COMMITTED[turn.state] and call('GET', transcript_key(turn.tenant, turn.id)) or false
local entries = transcript and {} or call('XRANGE', K.stream .. turn.id, '-', '+')
return {flat, entries, transcript, call('HGET', K.turn .. turn.id, 'terminal')}
