"""What settings of every process have in common: URLs that can be used, refusals in plain words."""

from __future__ import annotations

from typing import Any, NamedTuple
from urllib.parse import urlsplit, urlunsplit

from pydantic import BaseModel, ValidationError
from redis.connection import parse_url

_SCHEMES = ("redis://", "rediss://", "unix://")


class Refusal(NamedTuple):
    """One value that settings refuse. name: of the field or its alias. value: without the password of a URL."""

    name: str
    value: object
    limit: str


def refusal_of(settings: type[BaseModel], error: ValidationError) -> Refusal:
    """The first refused value, in words that name the limit. settings: the class that refused."""
    first = error.errors()[0]
    name = str(first["loc"][0]) if first["loc"] else "settings"
    value = first["input"]
    return Refusal(name, masked(value) if isinstance(value, str) else value, _limit(settings, name, first))


def check_redis_url(url: str) -> str:
    """The URL of a server, if redis-py can read it. Raises ValueError."""
    if not url.startswith(_SCHEMES):
        raise ValueError(f"must begin with {', '.join(_SCHEMES)}")
    try:
        parse_url(url)
    except (ValueError, TypeError) as error:
        raise ValueError(f"is no URL of a server ({error})") from None
    return url


def masked(text: str) -> str:
    """A value as text, without the password if it is a URL with one."""
    if "://" not in text or "@" not in text:
        return text
    try:
        parts = urlsplit(text)
    except ValueError:
        return "***"
    return urlunsplit(parts._replace(netloc=f"***@{parts.netloc.rpartition('@')[2]}"))


def _limit(settings: type[BaseModel], name: str, error: Any) -> str:
    kind, context = error["type"], error.get("ctx", {})
    if kind == "value_error":
        return str(context["error"])
    if kind == "string_pattern_mismatch":
        field = settings.model_fields.get(name)
        return f"must be {field.description}" if field is not None and field.description else str(error["msg"])
    words = {
        "greater_than_equal": "must be at least {ge}",
        "greater_than": "must be more than {gt}",
        "less_than_equal": "must be at most {le}",
        "less_than": "must be less than {lt}",
        "literal_error": "must be {expected}",
        "int_parsing": "must be a whole number",
        "int_type": "must be a whole number",
        "int_from_float": "must be a whole number",
        "float_parsing": "must be a number",
        "float_type": "must be a number",
        "finite_number": "must be a finite number",
    }.get(kind)
    return str(error["msg"]) if words is None else words.format(**context)
