"""Changes under an Idempotency-Key: a client may send one again, and it is made once."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import orjson
from starlette.requests import Request
from starlette.responses import Response

from manylora.errors import InvalidRequestError
from manylora.registry.idempotency import AnsweredBeforeError, KeptAnswer, Retry, body_digest

if TYPE_CHECKING:
    from manylora.server.services import Services

_KEY = re.compile("[ -~]{1,255}")


class IdempotentChange:
    """A change that a client may send again under an Idempotency-Key: made once, answered the same each time."""

    def __init__(self, request: Request, services: Services) -> None:
        given = request.headers.getlist("idempotency-key")
        self.key = given[0].strip() if given else None
        """None makes the change each time it is sent."""
        if self.key is not None and not (len(given) == 1 and _KEY.fullmatch(self.key)):
            message = "Idempotency-Key must be one value of 1 to 255 printable ASCII characters."
            raise InvalidRequestError(message, code="idempotency.key_invalid")
        self._route = f"{request.method} {request.url.path}"
        self._uploads = services.registry.uploads

    async def answer(
        self,
        tenant_id: str,
        asked: tuple[str | bytes | bool | None, ...],
        change: Callable[[Retry | None], Awaitable[KeptAnswer]],
    ) -> Response:
        """Make the change, or give the answer that was given when it was made.

        Args:
            tenant_id: The tenant that is changed; keys of different tenants have nothing to do with each other.
            asked: Everything that the request asks for, beside its route.
            change: Makes the change, and keeps the answer in the same transaction.

        Raises:
            InvalidRequestError: The key was used for something else; code idempotency.key_reused.
            ManyloraError: Raised by `change`; nothing is kept then.
        """
        retry = (
            None
            if self.key is None
            else Retry(key=self.key, body_digest=body_digest(self._route, *asked))
        )
        before = None if retry is None else await self._uploads.answered(tenant_id, retry)
        if before is None:
            try:
                return answered(await change(retry))
            except AnsweredBeforeError as error:  # by another server over this database
                before = error.answer
        return answered(before, {"idempotent-replayed": "true"})


@contextmanager
def idempotent(request: Request, services: Services, caller: str) -> Iterator[IdempotentChange]:
    """The change that a request asks for, while no other request of this caller makes it.

    Raises:
        InvalidRequestError: The key is not 1 to 255 printable ASCII characters; code idempotency.key_invalid.
        BusyError: The change is being made; code idempotency.in_progress.
    """
    change = IdempotentChange(request, services)
    with services.uploads.retrying(caller, change.key):
        yield change


def answered(answer: KeptAnswer, headers: dict[str, str] | None = None) -> Response:
    """The response that carries an answer."""
    return Response(orjson.dumps(answer.body), answer.status, headers, "application/json")
