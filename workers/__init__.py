"""Celery workers, turn records, the engine and the story of a turn."""
