"""All errors that Manylora raises on purpose.

    ManyloraError
    * ConfigError                   a wrong setting, at start; exit code 2
    * RequestError                  the client's fault
      - InvalidRequestError         400
      - UnsupportedParameterError   400   code unsupported_parameter
      - ContextLengthError          400   code context_length_exceeded
      - NeverFitsError              400   code request_too_large: no empty pool could hold it
      - AuthenticationError         401
      - ForbiddenError              403
      - NotFoundError               404   unknown and forbidden look the same
      - ConflictError               409
      - PayloadTooLargeError        413
      - TimeoutExceededError        408
      - RateLimitError              429   the caller's share is used up for now; Retry-After if waiting helps
        . QuotaExceededError        429   code insufficient_quota: used up until the month ends
    * AdapterError                  the uploaded adapter's fault
      - AdapterFormatError          422   not as PEFT writes it
      - AdapterIncompatibleError    422   sound, but not for this base or not supported
    * CapacityError                 our fault, passes with time; 503 with Retry-After
      - QueueFullError
      - DrainingError
      - EngineUnavailableError      the engine is starting, restarting, or died during the request
      - AdapterUnavailableError     the adapter's blob is missing or corrupt, or its load failed
      - ReplicaLostError            the replica that computed for a gateway is gone
      - BusyError                   409   another request does the same at this moment
    * EngineError                   our fault, does not pass; 500 with a constant body
      - PageAccountingError         pages were freed twice, handed out twice, or lost
      - StaleSlotError              a step refers to an adapter slot that was reused
    * ClientError                   raised by `manylora.Client`: the server refused, is away, or is not Manylora

`code` is the machine-readable name in the HTTP error body. Messages say what was expected, what came, and what to do.
The only values in them are those of the caller's own input.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self


class ManyloraError(Exception):
    """Base of all deliberate errors.

    Args:
        message: What was expected, what came, and what to do.
        code: Stable machine-readable name; the class's default if omitted.
        param: The wrong field of the request, if there is one.
    """

    code = "manylora_error"

    def __init__(self, message: str, *, code: str | None = None, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        if code is not None:
            self.code = code


class ConfigError(ManyloraError):
    """A setting is wrong, so Manylora does not start."""

    code = "config_invalid"


class RequestError(ManyloraError):
    """The client's fault (4xx)."""

    code = "invalid_request"


class InvalidRequestError(RequestError):
    """A value is missing, malformed or out of range."""

    code = "invalid_value"


class UnsupportedParameterError(RequestError):
    """A field is unknown or not supported."""

    code = "unsupported_parameter"


class ContextLengthError(RequestError):
    """Prompt and requested output exceed the model's context."""

    code = "context_length_exceeded"


class NeverFitsError(RequestError):
    """The request or its adapter needs more pages than the whole pool has."""

    code = "request_too_large"


class AuthenticationError(RequestError):
    """There is no key, or it is not valid."""

    code = "invalid_api_key"


class ForbiddenError(RequestError):
    """The key is valid but lacks the scope."""

    code = "forbidden"


class NotFoundError(RequestError):
    """There is no such object, or the caller may not see it."""

    code = "not_found"


class ConflictError(RequestError):
    """The object exists already, or changed meanwhile."""

    code = "conflict"


class PayloadTooLargeError(RequestError):
    """The body exceeds its byte limit."""

    code = "payload_too_large"


class TimeoutExceededError(RequestError):
    """The client sent too slowly."""

    code = "request_timeout"


class RateLimitError(RequestError):
    """The tenant or the key has reached a limit of its own.

    Args:
        message: The limit, and what to do.
        retry_after_s: Seconds until there is room again, as far as is known; None if waiting does not help.
        code: Stable machine-readable name; the class's default if omitted.
    """

    code = "rate_limit_exceeded"

    def __init__(
        self, message: str, *, retry_after_s: float | None = None, code: str | None = None
    ) -> None:
        super().__init__(message, code=code)
        self.retry_after_s = retry_after_s


class QuotaExceededError(RateLimitError):
    """The tokens of the month are used up."""

    code = "insufficient_quota"


@dataclass(frozen=True, slots=True)
class Finding:
    """One fault of an adapter."""

    code: str
    message: str
    """The expected and the given value."""
    param: str | None
    """Wrong field of the config, or first wrong tensor; None if a whole file is wrong."""
    hint: str
    """Advice to the owner."""


class AdapterError(ManyloraError):
    """The uploaded adapter is at fault.

    Args:
        message: What was expected, and what came.
        hint: What to do; the error's whole message ends with it.
        findings: Everything that is wrong with the adapter, this first; none where nobody looked into it.
        named: `code` and `param` of every error; here `param` is what of the adapter is wrong.
    """

    code = "adapter_invalid"

    def __init__(
        self, message: str, *, hint: str = "", findings: Sequence[Finding] = (), **named: str | None
    ) -> None:
        super().__init__(f"{message} {hint}" if hint else message, **named)
        self.finding = Finding(self.code, message, self.param, hint)
        self.findings = tuple(findings)

    @classmethod
    def of(cls, findings: Sequence[Finding]) -> Self:
        """The error that says the first of these, and carries them all."""
        first = findings[0]
        return cls(
            first.message, code=first.code, param=first.param, hint=first.hint, findings=findings
        )


class AdapterFormatError(AdapterError):
    """Config or weights are not what PEFT writes."""


class AdapterIncompatibleError(AdapterError):
    """A sound adapter that this base or this version of Manylora cannot serve exactly."""


class CapacityError(ManyloraError):
    """Manylora cannot take this now; it passes with time."""

    code = "engine_overloaded"

    def __init__(self, message: str, *, retry_after_s: float = 1.0, **named: str | None) -> None:
        super().__init__(message, **named)
        self.retry_after_s = retry_after_s


class QueueFullError(CapacityError):
    """The waiting queue is full."""


class DrainingError(CapacityError):
    """The server is shutting down."""

    code = "server.draining"


class EngineUnavailableError(CapacityError):
    """The engine process is starting or restarting, or died under this request."""

    code = "engine_restarted"


class AdapterUnavailableError(CapacityError):
    """The adapter's weights cannot be loaded: the blob is missing or corrupt, or the load failed."""

    code = "adapter_load_failed"


class ReplicaLostError(CapacityError):
    """The replica that computed an answer for a gateway is gone."""

    code = "replica_lost"

    def __init__(
        self, message: str = "The replica that computed the answer is gone; send the request again."
    ) -> None:
        super().__init__(message)


class BusyError(CapacityError):
    """Another request of the caller does the very same just now."""

    code = "in_progress"


class EngineError(ManyloraError):
    """A fault of ours that does not pass."""

    code = "internal_error"


class PageAccountingError(EngineError):
    """Pages were freed twice, handed out twice, or lost."""


class StaleSlotError(EngineError):
    """A step refers to an adapter slot whose generation has moved on."""


class ClientError(ManyloraError):
    """A call of `manylora.Client` failed: the server refused it, cannot be reached, or is not Manylora.

    Args:
        message: What was expected, and what came.
        hint: What to do, where more is known than the message says.
        status: The HTTP status; None where there was no answer, or one that Manylora does not give.
        retry_after_s: After how many seconds the server wants to be asked again; None where it did not say.
        findings: Everything that is wrong with an adapter, each with `code`, `message`, `param` and `hint`.
        named: `code` and `param` of every error, as the server gave them.
    """

    code = "client_error"

    def __init__(
        self,
        message: str,
        *,
        hint: str = "",
        status: int | None = None,
        retry_after_s: float | None = None,
        findings: Sequence[Mapping[str, Any]] = (),
        **named: str | None,
    ) -> None:
        super().__init__(message, **named)
        self.hint = hint
        self.status = status
        self.retry_after_s = retry_after_s
        self.findings = tuple(findings)

    def __str__(self) -> str:
        others = "".join(
            f"\n{finding['message']} {finding['hint']}" for finding in self.findings[1:]
        )
        return f"{self.message} {self.hint}".rstrip() + others
