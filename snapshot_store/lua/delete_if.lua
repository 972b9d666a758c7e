-- Deletes a page record if its check field is still the one that a reader saw. Pages server.
-- KEYS[1] kvalet:<tenant>:page:<digest hex>    ARGV[1] check field as read    ARGV[2], ARGV[3] its first and last offset
-- Returns 1 if the record was deleted, else 0.
if redis.call('EXISTS', KEYS[1]) == 1 and redis.call('GETRANGE', KEYS[1], ARGV[2], ARGV[3]) == ARGV[1] then
  return redis.call('DEL', KEYS[1])
end
return 0
