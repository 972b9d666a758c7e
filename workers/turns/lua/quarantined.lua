-- Boot ids of quarantined worker processes. Keys: quarantine
return call('HKEYS', K.quarantine)
