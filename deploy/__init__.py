"""The `kvalet` command and the local all-in-one supervisor."""
