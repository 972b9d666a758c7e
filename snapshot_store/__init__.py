"""Fingerprints, prefix chain, page records, wire client and inspection of parked pages. No CUDA, no Celery."""
