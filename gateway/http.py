"""What every route shares: the gateway's parts, who asks, ids and query parameters."""

from __future__ import annotations

import hashlib
import re
import secrets
import time
from dataclasses import dataclass

from starlette.requests import Request

from gateway.auth import ApiKeys, Principal
from gateway.errors import InvalidValue, NotFound, Overloaded, PermissionRefused
from gateway.fleet import FleetMonitor
from gateway.metrics import GatewayMetrics
from gateway.prompt_size import PromptSizer
from gateway.settings import GatewaySettings
from gateway.turns import Idempotency, TurnService

_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
_MAX_KEY_CHARS = 255


class Stopping:
    """Whether this process has been asked to stop, and whether open replies have had their grace time."""

    def __init__(self, grace_s: float) -> None:
        self._grace_s = grace_s
        self._since: float | None = None

    def begin(self) -> None:
        """The process has been asked to stop."""
        self._since = time.monotonic()

    @property
    def has_begun(self) -> bool:
        """Whether no new traffic should come."""
        return self._since is not None

    @property
    def is_over(self) -> bool:
        """Whether open replies must end now."""
        return self._since is not None and time.monotonic() - self._since >= self._grace_s


@dataclass(frozen=True, slots=True)
class Gateway:
    """The parts of one gateway process."""

    settings: GatewaySettings
    keys: ApiKeys
    turns: TurnService
    fleet: FleetMonitor
    sizer: PromptSizer
    metrics: GatewayMetrics
    stopping: Stopping


def gateway_of(request: Request) -> Gateway:
    """The parts of the gateway that serves this request."""
    gateway: Gateway = request.app.state.gateway
    return gateway


def principal_of(request: Request) -> Principal:
    """Who asks. Raises AuthenticationFailed."""
    return gateway_of(request).keys.principal(request.headers.get("authorization"))


def admin_of(request: Request) -> Principal:
    """Who asks, if the key may see the fleet. Raises AuthenticationFailed, PermissionRefused."""
    principal = principal_of(request)
    if not principal.is_admin:
        raise PermissionRefused("this needs an admin key", code="admin_required")
    return principal


def new_id(prefix: str) -> str:
    """A fresh id like `resp_4f...`, 96 random bits."""
    return f"{prefix}{secrets.token_hex(12)}"


def path_id(request: Request, name: str, prefix: str, what: str) -> str:
    """An id from the path. Raises NotFound when it can be none of this kind."""
    value = str(request.path_params[name])
    if not is_id(value, prefix):
        raise no_such(what, value)
    return value


def is_id(value: str, prefix: str) -> bool:
    """Whether a client's text can be an id of this kind at all."""
    return value.startswith(prefix) and _ID.fullmatch(value) is not None


def no_such(what: str, value: str, param: str | None = None) -> NotFound:
    """The answer for an id that the tenant does not have."""
    return NotFound(f"{what} with id '{value[:80]}' not found", code=f"{what.lower()}_not_found", param=param)


def idempotency_of(request: Request, raw: bytes) -> Idempotency | None:
    """The client's idempotency key with the digest of path and body. Raises InvalidRequest for an unusable key."""
    key = request.headers.get("idempotency-key")
    if key is None:
        return None
    if not 1 <= len(key) <= _MAX_KEY_CHARS:
        raise InvalidValue(
            "Idempotency-Key", f"'Idempotency-Key' has {len(key)} characters, the limits are 1 and {_MAX_KEY_CHARS}"
        )
    digest = hashlib.sha256(request.url.path.encode() + b"\n" + raw).digest()
    return Idempotency(key, digest)


def query_int(request: Request, name: str, low: int, high: int) -> int | None:
    """An integer query parameter. Raises InvalidRequest when it is none or out of range."""
    value = request.query_params.get(name)
    if value is None:
        return None
    if not re.fullmatch(r"-?[0-9]{1,12}", value) or not low <= int(value) <= high:
        raise InvalidValue(name, f"'{name}' = {value[:40]!r} is no integer between {low} and {high}")
    return int(value)


def query_flag(request: Request, name: str) -> bool:
    """A true/false query parameter, false when left out. Raises InvalidRequest for other values."""
    value = request.query_params.get(name, "false").lower()
    if value not in ("true", "false", "1", "0"):
        raise InvalidValue(name, f"'{name}' = {value[:40]!r} is neither true nor false")
    return value in ("true", "1")


def check_capacity(gateway: Gateway) -> None:
    """Refuse a request beyond the number that one process waits for at once. Raises Overloaded."""
    if gateway.metrics.open_requests >= gateway.settings.max_streams:
        raise Overloaded(
            f"this gateway already waits for {gateway.settings.max_streams} replies",
            retry_after_s=1,
            code="gateway_busy",
        )
