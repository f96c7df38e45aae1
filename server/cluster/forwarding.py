"""Passes on requests that generate nothing, of which any replica knows the answer: all have one registry and one store.

And what every request needs that passes a gateway: its headers there and back, and its address.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

import aiohttp
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Send
from yarl import URL

from weft.errors import CapacityError, DrainingError, NotFoundError, ReplicaLostError
from weft.registry.records import Identity
from weft.server.cluster.links import Links
from weft.server.cluster.loads import Replica
from weft.server.cluster.router import Target
from weft.server.cluster.wire import CLUSTER, INTERNAL, LENGTH
from weft.server.drain import Drain, Exchange
from weft.server.threads import cancel_all

MAX_TRIES = 3
"""Replicas that are asked for one request."""
FOR_ALL = frozenset({"/pause", "/resume", "/reset_prefix_cache"})
"""vLLM's routes that mean all engines."""
_HOP_BY_HOP = frozenset(
    {
        *("connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "proxy-connection", "te"),
        *("trailer", "transfer-encoding", "upgrade", "expect"),
    }
)
_NOT_ASKED = _HOP_BY_HOP | INTERNAL | {"x-request-id"}
_NOT_ANSWERED = _HOP_BY_HOP | INTERNAL | {"x-request-id", "date", "server"}
BROKEN = (aiohttp.ClientError, ReplicaLostError, TimeoutError, OSError)


class Forwarding:
    """Passes requests on as they are. Thread: the event loop's.

    Args:
        links: The replicas, and what chooses among them.
        drain: Ends what has no end of its own.
    """

    def __init__(self, links: Links, drain: Drain) -> None:
        self._links = links
        self._drain = drain

    async def pass_on(self, request: Request, exchange: Exchange, send: Send) -> None:
        """Send another request to a replica: all of them work on one registry and one blob store."""
        identity: Identity | None = getattr(request.state, "identity", None)
        tenant = (identity.tenant if identity else None) or ""
        target = Target(adapter=None, units=0.0, tenant=tenant, affinity=tenant.encode())
        order = self._links.router.order(target)
        if (named := request.query_params.get("server")) is not None:
            order = [replica for replica in order if replica.name == named]
            if not order:
                raise NotFoundError(f"There is no ready replica {named!r}: GET /v1/servers lists them.", param="server")
        elif request.method == "POST" and request.url.path in FOR_ALL:
            await self._ask_all(request, order, send)
            return
        for replica in order[:MAX_TRIES]:
            try:
                await self._forward(request, replica, exchange, send)
            except aiohttp.ClientConnectorError:  # nothing of the body was read
                self._links.router.failed(replica.name)
            else:
                return
        raise no_replica()

    async def _ask_all(self, request: Request, replicas: Sequence[Replica], send: Send) -> None:
        """Send a request without a body to all replicas; answers with the worst of their answers."""
        headers = [(name, value) for name, value in self.headers_for_replica(request) if name != "content-length"]

        async def ask(replica: Replica) -> Response:
            async with self._links.session.post(url_of(replica, request), headers=headers) as answer:
                return whole(answer, await answer.read())

        try:
            answers = await asyncio.gather(*map(ask, replicas))
        except BROKEN as error:
            raise ReplicaLostError("A replica is gone, others go on; send the request again.") from error
        if not answers:
            raise no_replica()
        await max(answers, key=lambda answer: answer.status_code)(request.scope, request.receive, send)

    async def _forward(self, request: Request, replica: Replica, exchange: Exchange, send: Send) -> None:
        has_body = "content-length" in request.headers or "transfer-encoding" in request.headers
        is_read = asyncio.Event()
        if not has_body:
            is_read.set()
        body = _body_of(request, is_read) if has_body else None
        watchers: list[asyncio.Task[None]] = []
        has_begun = False
        try:
            with exchange.running(), self._links.using(replica.name, exchange.lose):
                async with self._links.session.request(
                    request.method,
                    url_of(replica, request),
                    data=body,
                    headers=self.headers_for_replica(request),
                    allow_redirects=False,
                ) as answer:
                    if is_read.is_set():
                        watchers.append(watch(request.receive, exchange))
                    if answer.content_type == "text/event-stream":
                        watchers.append(asyncio.create_task(self._end_feed(exchange)))
                    has_begun = True
                    headers = headers_for_client(answer)
                    await send({"type": "http.response.start", "status": answer.status, "headers": headers})
                    async for data in answer.content.iter_any():
                        await send({"type": "http.response.body", "body": data, "more_body": True})
                    await send({"type": "http.response.body", "body": b""})
        except aiohttp.ClientConnectorError:
            raise
        except BROKEN as error:
            if has_begun:  # the connection is closed: the client sees that the answer is not whole
                raise ConnectionError("the replica is lost") from error
            raise ReplicaLostError("The replica that was asked is gone; look whether the change was made.") from error
        except DrainingError:
            if not has_begun:
                raise
            await send({"type": "http.response.body", "body": b""})
        finally:
            await cancel_all(watchers)

    async def _end_feed(self, exchange: Exchange) -> None:
        """Cut a stream that has no end of its own when this gateway drains."""
        await self._drain.began.wait()
        exchange.cut(DrainingError("The server is shutting down."))

    def headers_for_replica(self, request: Request) -> list[tuple[str, str]]:
        """The client's headers for a replica, with proof that they come from a gateway."""
        kept = [(name, value) for name, value in request.headers.items() if name not in _NOT_ASKED]
        return [*kept, (CLUSTER, self._links.token), ("x-request-id", str(request.state.request_id))]


def watch(receive: Receive, exchange: Exchange) -> asyncio.Task[None]:
    """Cut the exchange when the client leaves. The body must have been read."""

    async def until_gone() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        exchange.cut(ClientDisconnect())

    return asyncio.create_task(until_gone())


async def _body_of(request: Request, is_read: asyncio.Event) -> AsyncIterator[bytes]:
    async for chunk in request.stream():
        yield chunk
    is_read.set()


def url_of(replica: Replica, request: Request) -> URL:
    """A replica's address with path and query as they came."""
    query = request.scope["query_string"]
    path = request.scope["raw_path"] + (b"?" + query if query else b"")
    return URL(replica.url + path.decode("latin-1"), encoded=True)


def headers_for_client(answer: aiohttp.ClientResponse) -> list[tuple[bytes, bytes]]:
    """A replica's headers for the client."""
    kept = [(name.lower(), value) for name, value in answer.raw_headers]
    length = next((value for name, value in kept if name == LENGTH.encode()), None)
    headers = [(name, value) for name, value in kept if name.decode("latin-1") not in _NOT_ANSWERED]
    return [*headers, (b"content-length", length)] if length is not None else headers


def whole(answer: aiohttp.ClientResponse, body: bytes) -> Response:
    """An answer that is no stream, which the client has not got yet: another replica may give a better one."""
    response = Response(body, answer.status)
    response.raw_headers = headers_for_client(answer)
    return response


def no_replica() -> CapacityError:
    """The error while no replica takes requests."""
    message = "No replica is ready; try again in a moment."
    return CapacityError(message, code="no_replica", retry_after_s=1)
