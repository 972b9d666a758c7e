-- Keep a dead letter. ARGV: packed letter, most letters. Keys: dead_letters
call('LPUSH', K.dead_letters, ARGV[1])
call('LTRIM', K.dead_letters, 0, ARGV[2] - 1)
return 1
