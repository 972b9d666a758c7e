-- Distrust a worker process. ARGV: boot, reason. Keys: quarantine
call('HSETNX', K.quarantine, ARGV[1], int(now_ms()) .. ' ' .. ARGV[2])
return 1
