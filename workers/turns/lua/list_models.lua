-- Published models. Keys: models. Returns packed records
return call('HVALS', K.models)
