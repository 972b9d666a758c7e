"""HTTP edge: OpenAI-compatible and asynchronous API. No CUDA, no numpy."""
