-- Put a Celery message into its queue, also when control is out of memory: an accepted turn must get to a worker.
-- KEYS: the queue. ARGV: the message
call('LPUSH', KEYS[1], ARGV[1])
return 1
