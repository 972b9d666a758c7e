-- State of a tenant's visible turn. ARGV: turn, tenant. Keys: turn. Returns nil or the state
local turn = load_visible(ARGV[1], ARGV[2])
return turn and turn.state or nil
