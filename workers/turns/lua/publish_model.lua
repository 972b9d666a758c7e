-- Publish a model and its bundle. ARGV: name, packed record, digest, bundle, life (s). Keys: models, bundle
call('HSET', K.models, ARGV[1], ARGV[2])
call('SET', K.bundle .. ARGV[3], ARGV[4], 'EX', ARGV[5])
return 1
