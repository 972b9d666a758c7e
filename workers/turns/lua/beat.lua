-- Heartbeat of a worker. ARGV: worker, boot, model, slots, free, draining, life (ms), packed record
-- Keys: worker, workers
local key = K.worker .. ARGV[1]
call('HSET', key, 'boot', ARGV[2], 'model', ARGV[3], 'slots', ARGV[4], 'free', ARGV[5], 'draining', ARGV[6],
  'record', ARGV[8], 'seen_ms', int(now_ms()))
call('PEXPIRE', key, ARGV[7])
call('SADD', K.workers, ARGV[1])
return 1
