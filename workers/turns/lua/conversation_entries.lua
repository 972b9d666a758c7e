-- Transcript entries of a conversation. ARGV: id, tenant, start, stop
-- Keys: conversation, conversation_turns, transcripts. Returns nil or the entries (nil where one has expired)
if not conversation_view(ARGV[1], ARGV[2]) then return nil end
local entries = {}
for _, id in ipairs(call('LRANGE', K.conversation_turns .. ARGV[1], ARGV[3], ARGV[4])) do
  entries[#entries + 1] = call('GET', transcript_key(ARGV[2], id))
end
return entries
