"""The Idempotency-Key header: a change that is sent again is made once and answered twice."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import orjson
from starlette.requests import Request
from starlette.responses import Response

from weft.errors import InvalidRequestError
from weft.registry.uploads import Answer, AnsweredBeforeError, Retry
from weft.server.services import Services

HEADER = "idempotency-key"
REPLAYED = "idempotent-replayed"
MAX_KEY = 255


def retry_key(request: Request) -> str | None:
    """The request's key; None when it has none.

    Raises:
        InvalidRequestError: Not 1 to 255 printable ASCII characters, or several; code idempotency.key_invalid.
    """
    given = request.headers.getlist(HEADER)
    if not given:
        return None
    key = given[0].strip()
    if len(given) > 1 or not (0 < len(key) <= MAX_KEY and key.isascii() and key.isprintable()):
        raise InvalidRequestError(
            f"Idempotency-Key must be one value of 1 to {MAX_KEY} printable ASCII characters.",
            code="idempotency.key_invalid",
        )
    return key


async def change_once(
    services: Services,
    tenant_id: str,
    key: str | None,
    digest: str,
    change: Callable[[Retry | None], Awaitable[Answer]],
) -> Response:
    """Make a change, or tell what was answered when it was made.

    Args:
        services: For the answers that are kept.
        tenant_id: Whose change it is; keys of different tenants have nothing to do with each other.
        key: From `retry_key`; None makes the change in any case.
        digest: `body_digest` of what is asked for.
        change: Makes it, and keeps the answer in the same transaction.

    Raises:
        InvalidRequestError: The key was used for something else; code idempotency.key_reused.
        WeftError: Whatever `change` raises; nothing is kept then.
    """
    retry = None if key is None else Retry(key=key, body_digest=digest)
    before = None if retry is None else await services.registry.uploads.answered(tenant_id, retry)
    if before is None:
        try:
            return answered(await change(retry))
        except AnsweredBeforeError as error:  # by another server over this database
            before = error.answer
    return answered(before, {REPLAYED: "true"})


def answered(answer: Answer, headers: dict[str, str] | None = None) -> Response:
    """The response that carries an answer."""
    return Response(orjson.dumps(answer.body), answer.status, headers, "application/json")
