-- Cancel a tenant's turn. ARGV: turn, tenant. Keys: turn, stream, queues, control. Returns {kind, state, messages}
local turn = load_visible(ARGV[1], ARGV[2])
if not turn then return {'not_found', '', {}} end
if not OPEN[turn.state] then return {'ended', turn.state, {}} end
local sends = {}
if stop(turn, now_ms(), 'cancelled', sends) then return {'ended', turn.state, sends} end
return {'requested', '', sends}
