-- Fix a turn's prompt unless it is. ARGV: turn, epoch, nonce, packed ids, parent, root, template time
-- Keys: turn. Returns {'ok', {packed ids, parent, root, template time}} or a refusal
local turn, refusal = load_fenced(ARGV[1], ARGV[2], ARGV[3])
if not turn then return refusal end
if turn.frozen ~= '1' then
  set(turn, 'frozen', '1', 'prompt_ids', ARGV[4], 'parent', ARGV[5], 'root', ARGV[6], 'template_time', ARGV[7])
end
return {'ok', call('HMGET', K.turn .. turn.id, 'prompt_ids', 'parent', 'root', 'template_time')}
