"""From a transcript and a request to token ids, and from token ids to text. No NumPy, no CUDA."""
