"""KV layout, formats, pages, mirror, append path, model and backends. Knows neither Redis nor Celery."""
