-- Append one entry of events; only the next number, or an identical repeat. ARGV: turn, epoch, nonce, first number,
-- count, packed events. Keys: turn, stream. Returns {'ok', {next number, state to stop in or ''}} or a refusal
local turn, refusal = load_fenced(ARGV[1], ARGV[2], ARGV[3])
if not turn then return refusal end
local first, count = tonumber(ARGV[4]), tonumber(ARGV[5])
local entry_id = int(first + count) .. '-0'
if ARGV[4] == turn.next then
  call('XADD', K.stream .. turn.id, entry_id, 'n', ARGV[4], 'e', ARGV[6])
  set(turn, 'next', int(first + count))
else
  local stored = call('XRANGE', K.stream .. turn.id, entry_id, entry_id)[1]
  if not stored or stored[2][2] ~= ARGV[4] or stored[2][4] ~= ARGV[6] then
    return {'conflict', {ARGV[4], turn.next}}
  end
end
return {'ok', {turn.next, turn.cancel}}
