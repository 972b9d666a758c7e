"""Validation of request bodies: pydantic models in strict mode, faults mapped to OpenAI's error shape with `param`."""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from gateway.errors import InvalidRequest, InvalidValue, UnsupportedField

Body = TypeVar("Body", bound="RequestModel")

Probability = Annotated[float, Field(gt=0.0, le=1.0)]
Penalty = Annotated[float, Field(ge=-2.0, le=2.0)]
TokenCount = Annotated[int, Field(ge=1, le=2**31 - 1)]
MAX_METADATA = 16
Metadata = dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]]


class RequestModel(BaseModel):
    """A body or a part of one. Fields that no model names are collected and refused by `parse`."""

    model_config = ConfigDict(strict=True, extra="allow", frozen=True)


def parse(model: type[Body], body: dict[str, Any], defaults: dict[str, tuple[Any, ...]]) -> Body:
    """Validate a body against its model.

    defaults: fields of OpenAI's API that are not served, each with the values that mean "not used"; null always does.
    Raises InvalidRequest or UnsupportedField with the field's name.
    """
    try:
        parsed = model.model_validate(body)
    except ValidationError as error:
        raise _invalid(error) from error
    for name, value in (parsed.model_extra or {}).items():
        if name not in defaults:
            raise InvalidRequest(f"unknown field '{name[:80]}'", code="unknown_parameter", param=name[:80])
        if value is not None and not any(_same(value, allowed) for allowed in defaults[name]):
            raise UnsupportedField(name, value, _allowed(defaults[name]))
    return parsed


def refuse_extras(part: RequestModel, where: str, allowed_empty: frozenset[str] = frozenset()) -> None:
    """Refuse fields of a nested object that its model does not name; those in `allowed_empty` may be null or empty."""
    for name, value in (part.model_extra or {}).items():
        if name in allowed_empty and (value is None or value == [] or value == {}):
            continue
        raise UnsupportedField(f"{where}.{name[:80]}", value, "leave it out")


def check_metadata(metadata: dict[str, str] | None) -> None:
    """Refuse metadata of more than MAX_METADATA entries. Raises InvalidRequest."""
    if len(metadata or {}) > MAX_METADATA:
        raise InvalidValue("metadata", f"'metadata' has more than {MAX_METADATA} entries")


def _same(value: object, allowed: object) -> bool:
    return type(value) is type(allowed) and value == allowed


def _allowed(values: tuple[Any, ...]) -> str:
    return "leave it out" if not values else "allowed: null, " + ", ".join(repr(value) for value in values)


def _invalid(error: ValidationError) -> InvalidRequest:
    """The first fault, told with the path to the field; of a union's faults the deepest one is the one that counts."""
    faults = error.errors(include_url=False, include_context=False)
    fault = max(faults, key=lambda item: len(_path(item["loc"]))) if len(faults) > 1 else faults[0]
    param = ".".join(_path(fault["loc"])).replace(".[", "[")
    if fault["type"] == "missing":
        return InvalidRequest(f"missing required field '{param}'", code="missing_required_parameter", param=param)
    shown = repr(fault["input"])
    shown = shown if len(shown) <= 80 else shown[:77] + "..."
    return InvalidValue(param, f"'{param}' = {shown}: {fault['msg']}")


def _path(loc: tuple[int | str, ...]) -> list[str]:
    """Field names and list positions of a location, without the names that pydantic gives to a union's members."""
    path: list[str] = []
    for part in loc:
        if isinstance(part, int):
            path.append(f"[{part}]")
        elif part.isidentifier() and part.islower() and part not in ("str", "list", "dict", "float", "int", "bool"):
            path.append(part)
    return path
