"""Passes on requests that generate nothing, of which any replica knows the answer: all have one registry and one store.

And what every request needs that passes a gateway: its headers there and back, and its address.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import aiohttp
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Send
from yarl import URL

from manylora.errors import CapacityError, DrainingError, NotFoundError, ReplicaLostError
from manylora.registry.records import Identity
from manylora.registry.servers import Server
from manylora.server.cluster.links import Links
from manylora.server.cluster.router import Target
from manylora.server.cluster.wire import CLUSTER, INTERNAL, LENGTH, PROBE
from manylora.server.http.body import content_length
from manylora.server.process.drain import Drain, Exchange
from manylora.server.process.threads import cancel_all

LONG_BYTES = 16 * 1024
"""A gateway reads a longer body only after a replica said that its request may come in."""
MAX_TRIES = 3
"""Replicas that are asked for one request."""
_HOP_BY_HOP = frozenset(
    {
        "connection",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authorization",
        "proxy-connection",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
        "expect",
    }
)
_NOT_ASKED = _HOP_BY_HOP | INTERNAL | {"x-request-id", "content-length"}
_NOT_ANSWERED = _HOP_BY_HOP | INTERNAL | {"x-request-id", "date", "server"}
BROKEN = (aiohttp.ClientError, ReplicaLostError, TimeoutError, OSError)
NOT_REACHED = (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError)
_SAFE = frozenset({"GET", "HEAD"})
"""Methods that change nothing. What clients send as a body with them is not passed on."""


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
        listed = {server.name: server for server in self._links.listed}
        if (named := request.query_params.get("server")) is not None:
            if named not in listed:
                raise NotFoundError(
                    f"There is no replica {named!r}: GET /v1/servers lists them.", param="server"
                )
            order = self._connected([listed[named]])
        else:
            order = self._order(tenant)
            # Where no engine runs, its server still answers what needs none.
            order = order or [
                listed[name]
                for name, report in self._links.reports.items()
                if report.state == "down"
            ]
        error = no_replica()
        for replica in order[:MAX_TRIES]:
            try:
                await self._forward(request, replica, exchange, send)
            except ReplicaLostError as lost:
                if request.method not in _SAFE and not isinstance(lost.__cause__, NOT_REACHED):
                    message = (
                        "The replica that was asked is gone; look whether the change was made."
                    )
                    raise ReplicaLostError(message) from lost
                error = lost
            else:
                return
        raise error

    def _order(self, tenant: str) -> Sequence[Server]:
        """Replicas for all requests of a tenant that are no generations: what one holds of its limits is there."""
        return self._links.router.order(
            Target(adapter=None, units=0.0, tenant=tenant, affinity=tenant.encode())
        )

    async def refusal(self, request: Request, exchange: Exchange) -> Response | None:
        """A replica's refusal of a request whose body is long, by its head; None where the body is to be read."""
        length = content_length(request)
        if (length or 0) <= LONG_BYTES and "transfer-encoding" not in request.headers:
            return None
        replica = next(iter(self._order(request.state.identity.tenant or "")), None)
        if replica is None:
            return None
        headers = [*self.headers_for_replica(request), (PROBE, "1")]
        try:
            with exchange.running():
                answer = await self._ask(replica, request, headers, exchange)
        except BROKEN:
            self._links.router.failed(replica.name)
            return None
        return answer if 400 <= answer.status_code < 500 else None

    async def _ask(
        self,
        replica: Server,
        request: Request,
        headers: Sequence[tuple[str, str]],
        exchange: Exchange,
    ) -> Response:
        """A replica's answer to a request without a body, within the exchange."""
        with self._links.using(replica.name, exchange.lose):
            async with self._links.session.post(
                url_of(replica, request), headers=headers, allow_redirects=False
            ) as answer:
                return whole(answer, await answer.read())

    def _connected(self, servers: Sequence[Server]) -> Sequence[Server]:
        """These replicas, if this gateway is connected to all of them; the router may have ejected some.

        Raises:
            CapacityError: One of them does not report, or there is none.
        """
        if not servers:
            raise no_replica()
        for server in servers:
            if server.name not in self._links.reports:
                message = f"This gateway does not reach {server.name}; see GET /v1/servers, and try again later."
                raise CapacityError(message, code="no_replica", retry_after_s=1)
        return servers

    async def ask_all(self, request: Request, exchange: Exchange, send: Send) -> None:
        """Send a request without a body to all replicas; answers with the worst of their answers."""
        replicas = self._connected(self._links.listed)
        headers = self.headers_for_replica(request)
        asking = [
            asyncio.create_task(self._ask(each, request, headers, exchange)) for each in replicas
        ]
        try:
            async with watching(request, exchange):
                with exchange.running():
                    answers = await asyncio.gather(*asking)
        except BROKEN as error:
            raise ReplicaLostError(
                "A replica is gone, others go on; send the request again."
            ) from error
        finally:
            await cancel_all(asking)
        await max(answers, key=lambda answer: answer.status_code)(
            request.scope, request.receive, send
        )

    async def _forward(
        self, request: Request, replica: Server, exchange: Exchange, send: Send
    ) -> None:
        """Have a replica answer.

        Raises:
            ReplicaLostError: The replica is gone, and the client got nothing; the cause says how.
            ConnectionError: The rest of the answer does not come: the connection to the client must break.
        """
        watchers: list[asyncio.Task[None]] = []
        headers = self.headers_for_replica(request)
        length = request.headers.get("content-length", "0")
        body: AsyncIterator[bytes] | None = None
        if request.method in _SAFE or (
            length == "0" and "transfer-encoding" not in request.headers
        ):
            watchers.append(watch(request.receive, exchange))
        else:
            body = _body_of(request, exchange, watchers)
            headers += [("content-length", length)] if length != "0" else []
        has_begun = is_feed = False
        try:
            with exchange.running(), self._links.using(replica.name, exchange.lose):
                async with self._links.session.request(
                    request.method,
                    url_of(replica, request),
                    data=body,
                    headers=headers,
                    allow_redirects=False,
                    middlewares=() if request.method in _SAFE else (_once,),
                    # The replica sees the head at once, and may refuse the body.
                    expect100=body is not None,
                ) as answer:
                    self._links.router.answered(replica.name)
                    if is_feed := answer.content_type == "text/event-stream":
                        watchers.append(asyncio.create_task(self._end_feed(exchange)))
                    has_begun = True
                    is_last = body is not None and not watchers
                    start = {
                        "status": answer.status,
                        "headers": headers_for_client(answer, is_last=is_last),
                    }
                    await send({"type": "http.response.start", **start})
                    async for data in answer.content.iter_any():
                        await send({"type": "http.response.body", "body": data, "more_body": True})
                    await send({"type": "http.response.body", "body": b""})
        except BROKEN as error:
            # Otherwise perhaps the body was refused.
            if body is None or isinstance(error, NOT_REACHED):
                self._links.router.failed(replica.name)
            if has_begun:
                raise ConnectionError("the replica is lost") from error
            raise ReplicaLostError from error
        except DrainingError as error:
            if not has_begun:
                raise
            if not is_feed:
                raise ConnectionError("the answer is cut") from error
            await send({"type": "http.response.body", "body": b""})
        finally:
            await cancel_all(watchers)

    async def _end_feed(self, exchange: Exchange) -> None:
        """Cut a stream that has no end of its own when this gateway drains."""
        await self._drain.began.wait()
        exchange.cut(DrainingError("The server is shutting down."))

    def headers_for_replica(self, request: Request) -> list[tuple[str, str]]:
        """The client's headers for a replica, with proof that they come from a gateway.

        Content-Length is not among them. Values that are not UTF-8 are sent as the same text in UTF-8. What Connection
        names is passed on like the rest: a client could otherwise hide from the replica what this gateway has checked.
        """
        kept = [
            (name, _as_text(value))
            for name, value in request.headers.items()
            if name not in _NOT_ASKED
        ]
        return [
            *kept,
            (CLUSTER, self._links.token),
            ("x-request-id", str(request.state.request_id)),
        ]


async def _once(
    request: aiohttp.ClientRequest, send: aiohttp.ClientHandlerType
) -> aiohttp.ClientResponse:
    """Send a request once: aiohttp sends PUT and DELETE again by itself where a connection breaks."""
    try:
        return await send(request)
    except NOT_REACHED:
        raise
    except aiohttp.ClientConnectionError as error:
        raise ReplicaLostError from error


def _as_text(value: str) -> str:
    """The text that aiohttp, which writes UTF-8, sends as the bytes that came; Latin-1 it cannot send."""
    try:
        return value.encode("latin-1").decode()
    except UnicodeDecodeError:
        return value


def watch(receive: Receive, exchange: Exchange) -> asyncio.Task[None]:
    """Cut the exchange when the client leaves. The body must have been read."""

    async def until_gone() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        exchange.cut(ClientDisconnect())

    return asyncio.create_task(until_gone())


@asynccontextmanager
async def watching(request: Request, exchange: Exchange) -> AsyncIterator[None]:
    """`watch` during the block."""
    watcher = watch(request.receive, exchange)
    try:
        yield
    finally:
        await cancel_all([watcher])


async def _body_of(
    request: Request, exchange: Exchange, watchers: list[asyncio.Task[None]]
) -> AsyncIterator[bytes]:
    """The body, as the replica takes it in; ends the exchange when the client leaves, then or later."""
    try:
        async for chunk in request.stream():
            yield chunk
    except ClientDisconnect as gone:
        exchange.cut(gone)
        raise
    watchers.append(watch(request.receive, exchange))


def url_of(replica: Server, request: Request) -> URL:
    """A replica's address with path and query as they came."""
    query = request.scope["query_string"]
    path = request.scope["raw_path"] + (b"?" + query if query else b"")
    return URL(replica.url + path.decode("latin-1"), encoded=True)


def headers_for_client(
    answer: aiohttp.ClientResponse, *, is_last: bool = False
) -> list[tuple[bytes, bytes]]:
    """A replica's headers for the client.

    Args:
        answer: What the replica answered.
        is_last: The client's connection ends with it: nobody reads the rest of the body.
    """
    kept = [(name.lower(), value) for name, value in answer.raw_headers]
    length = next((value for name, value in kept if name == LENGTH.encode()), None)
    headers = [(name, value) for name, value in kept if name.decode("latin-1") not in _NOT_ANSWERED]
    headers += [(b"connection", b"close")] if is_last else []
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
