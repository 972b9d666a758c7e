-- Remove a worker that stops. ARGV: worker, boot. Keys: worker (the sweeper finds the id in `workers` and cleans up)
if call('HGET', K.worker .. ARGV[1], 'boot') == ARGV[2] then call('DEL', K.worker .. ARGV[1]) end
return 1
