"""The engine thread: all sequences of a worker, batched into steps of one backend."""
