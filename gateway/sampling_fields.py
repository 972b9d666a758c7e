"""The fields that shape a reply's tokens, shared by chat and responses, and the `kvalet` extension object."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field

from gateway.errors import InvalidValue, UnsupportedField
from gateway.fields import Penalty, Probability, RequestModel, refuse_extras

GREEDY_BELOW = 1e-3
MAX_STOPS = 16
MAX_STOP_CHARS = 256
MAX_TOP_LOGPROBS = 20
MAX_BIASES = 1024
_SEED_RANGE = (-(2**63), 2**64 - 1)

TEMPLATE_FIELDS: dict[str, type] = {"enable_thinking": bool}
"""Template arguments that a request may set, with their types. Everything else belongs to the server."""


class GenerationFields(RequestModel):
    """Sampling beyond OpenAI's own fields, with the names that vLLM uses; allowed at the top level and in `kvalet`."""

    top_k: Annotated[int, Field(ge=-1, le=2**31 - 1)] | None = None
    min_p: Annotated[float, Field(ge=0.0, le=1.0)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=10.0)] | None = None
    min_tokens: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = None
    ignore_eos: bool | None = None


class KvaletOptions(GenerationFields):
    """The extension object: where and how a turn runs.

    worker: a worker id that must run it (admin keys). scope: who may share its pages. priority: higher goes first.
    deadline_s: seconds from accept after which it expires. durability: what an accepted turn survives.
    """

    worker: Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]{1,64}$")] | None = None
    scope: Literal["tenant", "key", "conversation"] | None = None
    priority: Annotated[int, Field(ge=-100, le=100)] = 0
    deadline_s: Annotated[float, Field(gt=0.0, le=86400.0)] | None = None
    durability: Literal["process", "host"] | None = None


class SamplingFields(GenerationFields):
    """Fields that chat and responses have in common."""

    temperature: Annotated[float, Field(ge=0.0, le=2.0)] | None = None
    top_p: Probability | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    kvalet: KvaletOptions | None = None


@dataclass(frozen=True, slots=True)
class Generation:
    """What a turn request needs of these fields. sampling: fields of the engine's sampling parameters; seed set."""

    sampling: dict[str, Any]
    min_tokens: int
    ignore_eos: bool
    template_kwargs: dict[str, Any]
    options: KvaletOptions


def generation_of(
    fields: SamplingFields,
    *,
    seed: int | None = None,
    presence_penalty: Penalty | None = None,
    frequency_penalty: Penalty | None = None,
    logit_bias: dict[str, float] | None = None,
    logprobs: int | None = None,
) -> Generation:
    """Collect the sampling parameters; draws a seed if none was given.

    Temperatures below GREEDY_BELOW are greedy: there the noise is smaller than the rounding of logits.
    Raises InvalidRequest or UnsupportedField naming the field.
    """
    options = fields.kvalet or KvaletOptions()
    refuse_extras(options, "kvalet")
    temperature = 1.0 if fields.temperature is None else fields.temperature
    top_k = _either(fields, options, "top_k", 0)
    sampling = {
        "temperature": temperature if temperature >= GREEDY_BELOW else 0.0,
        "top_k": max(0, top_k),
        "top_p": 1.0 if fields.top_p is None else fields.top_p,
        "min_p": _either(fields, options, "min_p", 0.0),
        "repetition_penalty": _either(fields, options, "repetition_penalty", 1.0),
        "seed": secrets.randbits(63) if seed is None else _seed(seed),
        "presence_penalty": presence_penalty or 0.0,
        "frequency_penalty": frequency_penalty or 0.0,
        "logit_bias": _biases(logit_bias),
        "logprobs": logprobs,
    }
    return Generation(
        sampling=sampling,
        min_tokens=_either(fields, options, "min_tokens", 0),
        ignore_eos=_either(fields, options, "ignore_eos", False),
        template_kwargs=_template_kwargs(fields.chat_template_kwargs),
        options=options,
    )


def stops_of(stop: str | list[str] | None) -> tuple[str, ...]:
    """Stop strings of a request.

    Raises InvalidRequest for more than MAX_STOPS, an empty one, or one over MAX_STOP_CHARS characters.
    """
    stops = (stop,) if isinstance(stop, str) else tuple(stop or ())
    if len(stops) > MAX_STOPS:
        raise InvalidValue("stop", f"'stop' has {len(stops)} strings, the limit is {MAX_STOPS}")
    for text in stops:
        if not 1 <= len(text) <= MAX_STOP_CHARS:
            raise InvalidValue(
                "stop", f"'stop' holds a string of {len(text)} characters, the limits are 1 and {MAX_STOP_CHARS}"
            )
    return stops


def _either(fields: GenerationFields, options: GenerationFields, name: str, default: Any) -> Any:
    outer, inner = getattr(fields, name), getattr(options, name)
    if outer is not None and inner is not None and outer != inner:
        raise InvalidValue(name, f"'{name}' = {outer!r} and 'kvalet.{name}' = {inner!r} differ")
    chosen = inner if outer is None else outer
    return default if chosen is None else chosen


def _seed(seed: int) -> int:
    low, high = _SEED_RANGE
    if not low <= seed <= high:
        raise InvalidValue("seed", f"'seed' = {seed} is not between {low} and {high}")
    return seed & (2**64 - 1)


def _biases(biases: dict[str, float] | None) -> list[list[int | float]]:
    if len(biases or {}) > MAX_BIASES:
        raise InvalidValue("logit_bias", f"'logit_bias' has more than {MAX_BIASES} entries")
    result: list[list[int | float]] = []
    for key, bias in (biases or {}).items():
        if not (key.isascii() and key.isdigit() and len(key) <= 9):
            raise InvalidValue("logit_bias", f"'logit_bias' key {key[:40]!r} is no token id")
        if not -100.0 <= bias <= 100.0:
            raise InvalidValue(f"logit_bias.{key}", f"'logit_bias.{key}' = {bias} is not between -100 and 100")
        result.append([int(key), float(bias)])
    return sorted(result)


def _template_kwargs(kwargs: dict[str, Any] | None) -> dict[str, Any]:
    for name, value in (kwargs or {}).items():
        where = f"chat_template_kwargs.{name[:80]}"
        if name not in TEMPLATE_FIELDS:
            raise UnsupportedField(where, value, f"allowed: {', '.join(sorted(TEMPLATE_FIELDS))}")
        if type(value) is not TEMPLATE_FIELDS[name]:
            raise InvalidValue(where, f"'{where}' must be of type {TEMPLATE_FIELDS[name].__name__}")
    return dict(kwargs or {})


def top_logprobs_of(value: int | None, param: str) -> int:
    """How many alternatives to report.

    Raises InvalidRequest beyond MAX_TOP_LOGPROBS.
    """
    if value is not None and not 0 <= value <= MAX_TOP_LOGPROBS:
        raise InvalidValue(param, f"'{param}' = {value} is not between 0 and {MAX_TOP_LOGPROBS}")
    return value or 0
