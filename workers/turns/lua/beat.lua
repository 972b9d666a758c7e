-- Heartbeat of a worker. ARGV: worker, boot, model, slots, draining, life (ms), packed record
-- Keys: worker, workers, worker_leases
local key = K.worker .. ARGV[1]
-- Counted here, since a worker's own count may be older than a claim or an end that has just run.
local free = math.max(0, tonumber(ARGV[4]) - call('SCARD', K.worker_leases .. ARGV[1]))
call('HSET', key, 'boot', ARGV[2], 'model', ARGV[3], 'slots', ARGV[4], 'free', free, 'draining', ARGV[5],
  'record', ARGV[7], 'seen_ms', int(now_ms()))
call('PEXPIRE', key, ARGV[6])
call('SADD', K.workers, ARGV[1])
return 1
