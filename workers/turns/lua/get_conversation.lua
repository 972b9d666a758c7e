-- Read a conversation. ARGV: id, tenant. Keys: conversation, branch, conversation_turns. Returns the view or nil
return conversation_view(ARGV[1], ARGV[2])
