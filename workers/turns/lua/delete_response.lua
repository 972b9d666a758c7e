-- Hide a tenant's turn, cancel it when open, and delete it once nothing continues it.
-- ARGV: turn, tenant. Keys: turn, stream, queues, control, transcripts
-- Returns {kind, state, messages to send}
local turn = load_visible(ARGV[1], ARGV[2])
if not turn then return {'not_found', '', {}} end
local sends = {}
set(turn, 'hidden', '1')
if OPEN[turn.state] and not stop(turn, now_ms(), 'cancelled', sends) then return {'requested', '', sends} end
local state = turn.state
purge(turn)
return {'ended', state, sends}
