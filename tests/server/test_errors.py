from __future__ import annotations

import orjson
import pytest

from manylora import errors
from manylora.engine.request import ErrorInfo
from manylora.errors import ManyloraError
from manylora.server.errors import answer, error_body, error_response, from_engine


def every_class(cls: type[ManyloraError] = ManyloraError) -> list[type[ManyloraError]]:
    return [cls, *(found for sub in cls.__subclasses__() for found in every_class(sub))]


def test_every_error_class_has_its_status_and_one_shape() -> None:
    statuses: dict[int, set[type[ManyloraError]]] = {}
    for cls in every_class():
        status, _ = answer(cls("m"))
        statuses.setdefault(status, set()).add(cls)
        response = error_response(cls("m"))
        assert response.status_code == status
        assert set(orjson.loads(response.body)["error"]) == {"message", "type", "param", "code"}
    assert statuses == {
        400: {
            errors.RequestError,
            errors.InvalidRequestError,
            errors.UnsupportedParameterError,
            errors.ContextLengthError,
            errors.NeverFitsError,
        },
        401: {errors.AuthenticationError},
        403: {errors.ForbiddenError},
        404: {errors.NotFoundError},
        408: {errors.TimeoutExceededError},
        409: {errors.ConflictError, errors.BusyError},
        413: {errors.PayloadTooLargeError},
        422: {errors.AdapterError, errors.AdapterFormatError, errors.AdapterIncompatibleError},
        429: {errors.RateLimitError, errors.QuotaExceededError},
        500: {
            errors.ManyloraError,
            errors.ConfigError,
            errors.ClientError,
            *every_class(errors.EngineError),
        },
        503: {
            errors.CapacityError,
            errors.QueueFullError,
            errors.DrainingError,
            errors.ReplicaLostError,
            errors.EngineUnavailableError,
            errors.AdapterUnavailableError,
        },
    }


def test_faults_of_ours_say_the_same_always() -> None:
    bodies = [error_body(cls("secret /home/path")) for cls in every_class(errors.EngineError)]
    assert all(body == bodies[0] for body in bodies)
    assert "secret" not in str(bodies)


def test_what_passes_with_time_says_when() -> None:
    for error, header in (
        (errors.QueueFullError("m", retry_after_s=0.1), "1"),
        (errors.QueueFullError("m", retry_after_s=2.2), "3"),
    ):
        assert error_response(error).headers["retry-after"] == header
    assert "retry-after" not in error_response(errors.NotFoundError("m")).headers


def test_a_full_disk_is_507() -> None:
    assert answer(errors.CapacityError("full", code="storage.full"))[0] == 507


@pytest.mark.parametrize(
    ("code", "kind", "cls"),
    [
        ("context_length_exceeded", "request", errors.InvalidRequestError),
        ("request_too_large", "request", errors.InvalidRequestError),
        ("unheard_of", "request", errors.InvalidRequestError),
        ("engine_overloaded", "capacity", errors.CapacityError),
        ("unheard_of", "capacity", errors.CapacityError),
        ("adapter_load_failed", "adapter", errors.AdapterUnavailableError),
        ("internal_error", "internal", errors.EngineError),
    ],
)
def test_errors_of_the_engine_come_back_as_their_classes(
    code: str, kind: str, cls: type[ManyloraError]
) -> None:
    error = from_engine(ErrorInfo(code=code, message="m", kind=kind))  # type: ignore[arg-type]
    assert type(error) is cls
    assert error.code == code
