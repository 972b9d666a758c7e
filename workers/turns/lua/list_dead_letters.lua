-- Dead letters, newest first. Keys: dead_letters
return call('LRANGE', K.dead_letters, 0, -1)
