"""Errors of the `gateway` package: each is one HTTP answer in OpenAI's shape.

ApiError
|-- InvalidRequest        400  a field is malformed; `param` names it
|   |-- InvalidValue      400  a value out of its limits
|   |-- UnsupportedField  400  a field that is known, not served, and not at its default
|   `-- PromptTooLong     400  prompt tokens beyond the context length; both numbers
|-- AuthenticationFailed  401  no API key or an unknown one
|-- PermissionRefused     403  the key may not do this
|-- NotFound              404  no such thing in this tenant
|-- Conflict              409  an idempotency key with another body, a conversation in another state
|-- BodyTooLarge          413  the body is over the limit
|-- WrongMediaType        415  the body is not JSON
|-- Overloaded            429  the queue is full; carries Retry-After
|-- TurnFault             500  an accepted turn failed
|-- Unavailable           503  control, or every worker of the model, is out of reach
`-- TimedOut              504  no result within the gateway's own limit
"""

from __future__ import annotations

from typing import Any


class ApiError(Exception):
    """One refused or failed request. The application's handler turns it into the HTTP answer."""

    status = 500
    kind = "server_error"

    def __init__(self, message: str, *, code: str | None = None, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.code = code
        self.param = param

    @property
    def headers(self) -> dict[str, str]:
        """Headers that belong to the answer."""
        return {}

    def body(self) -> dict[str, Any]:
        """The JSON body, as OpenAI shapes it."""
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}


class InvalidRequest(ApiError):
    """A malformed request. The client must change it."""

    status = 400
    kind = "invalid_request_error"


class InvalidValue(InvalidRequest):
    """A field with a value that is out of its limits."""

    def __init__(self, param: str, message: str) -> None:
        super().__init__(message, code="invalid_value", param=param)


class UnsupportedField(InvalidRequest):
    """A field that is not served and not at its default."""

    def __init__(self, param: str, value: object, allowed: str) -> None:
        shown = repr(value)
        shown = shown if len(shown) <= 80 else shown[:77] + "..."
        super().__init__(f"'{param}' = {shown} is not supported; {allowed}", code="unsupported_parameter", param=param)


class PromptTooLong(InvalidRequest):
    """More prompt tokens than the model's context holds."""

    def __init__(self, num_tokens: int, limit: int, param: str) -> None:
        super().__init__(
            f"the prompt has {num_tokens} tokens, more than the context length of {limit} allows "
            "(at least one token must remain for the reply)",
            code="context_length_exceeded",
            param=param,
        )
        self.num_tokens = num_tokens
        self.limit = limit


class AuthenticationFailed(ApiError):
    """No usable API key."""

    status = 401
    kind = "authentication_error"

    @property
    def headers(self) -> dict[str, str]:
        """Names the scheme, as HTTP asks for."""
        return {"WWW-Authenticate": "Bearer"}


class PermissionRefused(ApiError):
    """A known key that may not do this."""

    status = 403
    kind = "permission_error"


class NotFound(ApiError):
    """Nothing of that id in this tenant; a foreign id is answered alike."""

    status = 404
    kind = "invalid_request_error"


class Conflict(ApiError):
    """The request contradicts an earlier one."""

    status = 409
    kind = "invalid_request_error"


class BodyTooLarge(ApiError):
    """A body over `limit` bytes."""

    status = 413
    kind = "invalid_request_error"

    def __init__(self, limit: int) -> None:
        super().__init__(f"the request body is larger than {limit} bytes", code="request_too_large")
        self.limit = limit


class BodyTooSlow(ApiError):
    """A body that has not arrived after `limit_s` seconds."""

    status = 408
    kind = "invalid_request_error"

    def __init__(self, limit_s: float) -> None:
        super().__init__(f"the request body has not arrived within {limit_s:g} s", code="request_timeout")
        self.limit_s = limit_s


class WrongMediaType(ApiError):
    """A body that does not call itself JSON."""

    status = 415
    kind = "invalid_request_error"


class Overloaded(ApiError):
    """The queue is full. The client may try again after `retry_after_s`."""

    status = 429
    kind = "rate_limit_error"

    def __init__(self, message: str, retry_after_s: int, code: str) -> None:
        super().__init__(message, code=code)
        self.retry_after_s = retry_after_s

    @property
    def headers(self) -> dict[str, str]:
        """Retry-After in whole seconds."""
        return {"Retry-After": str(self.retry_after_s)}


class TurnFault(ApiError):
    """An accepted turn ended `failed` for a reason that is not the client's."""

    status = 500


class Unavailable(ApiError):
    """Something that the request needs is out of reach for now."""

    status = 503
    kind = "service_unavailable_error"

    def __init__(self, message: str, *, code: str, retry_after_s: int = 2) -> None:
        super().__init__(message, code=code)
        self.retry_after_s = retry_after_s

    @property
    def headers(self) -> dict[str, str]:
        """Retry-After in whole seconds."""
        return {"Retry-After": str(self.retry_after_s)}


class TimedOut(ApiError):
    """No result within the gateway's own limit."""

    status = 504
    kind = "timeout_error"


_CLIENT_FAULTS = {
    "capacity_exceeded", "context_length_exceeded", "invalid_logit_bias", "invalid_prompt", "parent_failed",
}  # fmt: skip
_OUTAGES = {"worker_gone"}


def error_of_turn(error: dict[str, Any] | None, state: str) -> ApiError:
    """The HTTP error for a turn that ended without a reply: 400 where the request was at fault, 503 where
    what it names is out of reach, else 500.
    """
    if state == "cancelled":
        return Conflict("the turn was cancelled", code="cancelled")
    if state == "expired":
        return TimedOut("the turn's deadline passed before it was done", code="deadline_exceeded")
    code = str((error or {}).get("code") or "server_error")
    message = str((error or {}).get("message") or "the turn failed")
    if code in _OUTAGES:
        return Unavailable(message, code=code)
    kind = InvalidRequest if code in _CLIENT_FAULTS else TurnFault
    return kind(message, code=code, param=(error or {}).get("param"))
