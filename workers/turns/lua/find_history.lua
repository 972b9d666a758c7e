-- The longest known history. KEYS: history keys, shortest first. ARGV: tenant
-- Returns nil, or {index into KEYS from 0, turn}
for i = #KEYS, 1, -1 do
  local id = call('GET', KEYS[i])
  if id and call('EXISTS', transcript_key(ARGV[1], id)) == 1 then return {i - 1, id} end
end
return nil
