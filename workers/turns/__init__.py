"""Turn records: what was accepted, who may run it, what it said. Transitions are the Lua scripts beside this file."""
