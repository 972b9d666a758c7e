-- A tokenizer bundle. ARGV: digest. Keys: bundle
return call('GET', K.bundle .. ARGV[1])
