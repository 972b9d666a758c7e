-- The tenant's salt, kept at the first call. A full control server must not end turns that it has accepted.
-- KEYS[1] kvalet:<tenant>:salt. ARGV: the salt to keep if there is none
-- Returns the salt.
redis.call('SET', KEYS[1], ARGV[1], 'NX')
return redis.call('GET', KEYS[1])
