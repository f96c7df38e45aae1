"""What this process is taking in now: so no two requests make the same change, and no tenant sends too much at once.

A crash loses all of it, and nothing of it is needed after one. Thread: the event loop's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING

import orjson
from starlette.requests import Request
from starlette.responses import Response

from manylora.errors import BusyError, InvalidRequestError, RateLimitError
from manylora.registry.records import CONFIG_FILE, WEIGHTS_FILE
from manylora.registry.uploads import Answer, AnsweredBeforeError, Retry, body_digest

if TYPE_CHECKING:
    from manylora.server.services import Services

FILES = (CONFIG_FILE, WEIGHTS_FILE)
STREAMS = 2
"""Files that a tenant may send at once."""
RETRY_S = 2.0
MAX_KEY = 255


class Once:
    """A change that a client may send again under an Idempotency-Key: made once, answered the same each time."""

    def __init__(self, request: Request, services: Services) -> None:
        given = request.headers.getlist("idempotency-key")
        self.key = given[0].strip() if given else None
        """None makes the change each time it is sent."""
        if self.key is not None and not (
            len(given) == 1
            and 0 < len(self.key) <= MAX_KEY
            and self.key.isascii()
            and self.key.isprintable()
        ):
            message = (
                f"Idempotency-Key must be one value of 1 to {MAX_KEY} printable ASCII characters."
            )
            raise InvalidRequestError(message, code="idempotency.key_invalid")
        self._route = f"{request.method} {request.url.path}"
        self._uploads = services.registry.uploads

    async def answer(
        self,
        tenant_id: str,
        asked: tuple[str | bytes | bool | None, ...],
        change: Callable[[Retry | None], Awaitable[Answer]],
    ) -> Response:
        """Make the change, or give the answer that was given when it was made.

        Args:
            tenant_id: The tenant that is changed; keys of different tenants have nothing to do with each other.
            asked: All that is asked for beside the route.
            change: Makes the change, and keeps the answer in the same transaction.

        Raises:
            InvalidRequestError: The key was used for something else; code idempotency.key_reused.
            ManyloraError: Whatever `change` raises; nothing is kept then.
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
def once(request: Request, services: Services, caller: str) -> Iterator[Once]:
    """The change that a request asks for, while no other request of this caller makes it.

    Raises:
        InvalidRequestError: The key is not 1 to 255 printable ASCII characters; code idempotency.key_invalid.
        BusyError: The change is being made; code idempotency.in_progress.
    """
    change = Once(request, services)
    with services.intake.retrying(caller, change.key):
        yield change


def answered(answer: Answer, headers: dict[str, str] | None = None) -> Response:
    """The response that carries an answer."""
    return Response(orjson.dumps(answer.body), answer.status, headers, "application/json")


class Intake:
    """Uploads and retries in progress."""

    def __init__(self) -> None:
        self.streams: Counter[str] = Counter()
        """Files that are coming, by tenant."""
        self.reserved: Counter[str] = Counter()
        """Bytes that are coming in uploads of one request, by tenant."""
        self._taken: set[tuple[str, str, str]] = set()

    def retrying(self, caller: str, key: str | None) -> AbstractContextManager[None]:
        """Make the change that a caller knows by this key; None is no key.

        Raises:
            BusyError: It is being made; code idempotency.in_progress.
        """
        doing = "A request with this Idempotency-Key is in progress"
        return self._taking(
            [] if key is None else [("retry", caller, key)], doing, "idempotency.in_progress"
        )

    def writing(self, upload_id: str, *files: str) -> AbstractContextManager[None]:
        """Be the only one that writes these files of an upload.

        Raises:
            BusyError: Another request does; code upload.busy.
        """
        doing = "Another request sends this file or completes this upload"
        return self._taking([("file", upload_id, file) for file in files], doing, "upload.busy")

    def is_writing(self, upload_id: str) -> bool:
        """Whether a request writes a file of the upload."""
        return not self._taken.isdisjoint(("file", upload_id, file) for file in FILES)

    def stream(self, tenant_id: str) -> AbstractContextManager[None]:
        """Take a file from the tenant.

        Raises:
            RateLimitError: Two are coming already; code upload.too_many.
        """
        if self.streams[tenant_id] >= STREAMS:
            message = f"A tenant may send {STREAMS} files at once; wait for one to end."
            raise RateLimitError(message, retry_after_s=RETRY_S, code="upload.too_many")
        return _counted(self.streams, tenant_id, 1)

    def reserving(self, tenant_id: str, num_bytes: int) -> AbstractContextManager[None]:
        """Count these bytes as coming."""
        return _counted(self.reserved, tenant_id, num_bytes)

    @contextmanager
    def _taking(self, tokens: list[tuple[str, str, str]], doing: str, code: str) -> Iterator[None]:
        if not self._taken.isdisjoint(tokens):
            raise BusyError(f"{doing}; ask again in a moment.", retry_after_s=RETRY_S, code=code)
        self._taken.update(tokens)
        try:
            yield
        finally:
            self._taken.difference_update(tokens)


@contextmanager
def _counted(counter: Counter[str], name: str, amount: int) -> Iterator[None]:
    counter[name] += amount
    try:
        yield
    finally:
        counter[name] -= amount
        if not counter[name]:
            del counter[name]
