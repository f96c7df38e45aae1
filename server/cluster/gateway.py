"""A gateway's ASGI app: finds a replica for each request and passes both ways byte for byte.

It must read a body to choose a replica. Not read are bodies for which there is no room, of a caller that has as many
requests on their way as it may, and long ones that a replica refuses by their heads.

When a replica is lost or answers 503 or 507, and the client has received nothing yet, another replica is asked. An
answer that has begun ends with one error event. Each replica that is asked gets a ledger id of its own. Of one that is
lost, the gateway records what the client was sent, which overrules what that replica may write: it bills what it had
computed if only the connection broke, or some of it when it starts again.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
import secrets
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime

import structlog
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from manylora.config import ServerConfig
from manylora.errors import DrainingError, ManyloraError, NotFoundError, ReplicaLostError
from manylora.registry.limits import Limits
from manylora.registry.records import RETRIED, Identity, ResolvedModel, UsageEvent
from manylora.registry.registry import Registry
from manylora.registry.servers import Server
from manylora.server.apis import FACTS
from manylora.server.auth.admission import reservation_of
from manylora.server.auth.callers import DEFAULT_TENANT, Caller
from manylora.server.cluster.forwarding import (
    BROKEN,
    MAX_TRIES,
    NOT_REACHED,
    Forwarding,
    headers_for_client,
    no_replica,
    url_of,
    watching,
    whole,
)
from manylora.server.cluster.links import Links
from manylora.server.cluster.route_fields import read_fields
from manylora.server.cluster.router import Target
from manylora.server.cluster.wire import LEDGER_ID, LENGTH, STICKY, WEIGHT_SHARE, Frames
from manylora.server.errors import MAX_SHOWN, error_body
from manylora.server.hop import SESSION_HEADER, Counts
from manylora.server.http.body import Pace, held_body, json_bytes
from manylora.server.http.route_facts import error_shape
from manylora.server.limits.accounts import Accounts, Holder, LimitedAccount
from manylora.server.process.drain import Drain, Exchange
from manylora.server.versions.names import ModelNames

log = structlog.get_logger("manylora.server")
_SAID_BY_ALL = re.compile(
    rb'"code":"(adapter_(load_failed|blob_missing|blob_corrupt)|db\.(unavailable|lost))"'
)
"""In refusals that every replica would repeat."""
_NOT_RECORDED = re.compile(rb'"code":"storage\.(full|unavailable)"')
"""In the answer of a replica that cannot record usage. It may have computed for the request, and may yet find a record
that it could not write."""
REASONS = ("server.draining", "storage.full", "storage.unavailable", "db.lost", "no_replica")
"""Codes of the errors of `Gateway.check_ready`."""


@dataclass(slots=True)
class GatewayRequest:
    """A request for a generation, and what the gateway knows of it."""

    request: Request
    body: bytes
    """Empty once the answer has begun: nobody else is asked then."""
    headers: list[tuple[str, str]]
    target: Target
    event: Callable[..., UsageEvent]
    """Makes its usage event of what is known at its end."""
    started_s: float
    tried: list[str] = field(default_factory=list)
    """Names of the replicas that were asked."""

    def answered(self) -> None:
        """Let the body go, and what was counted while no replica had answered."""
        self.body = b""
        held_body(self.request).end()
        reservation_of(self.request).end()


@dataclass(slots=True)
class StreamedAnswer:
    """An answer that a replica streams, as far as the client has it."""

    frames: Frames = field(default_factory=Frames)
    has_begun: bool = False
    unsent: bytes = b""
    """Bytes that came before the connection to the replica broke, and were not sent."""


class Gateway:
    """Passes requests on; stands behind authentication. Thread: the event loop's.

    Args:
        config: Bounds of bodies.
        registry: Says which adapter a name means, and takes the usage of cut answers.
        links: The replicas, and what chooses among them.
        drain: Counts requests that run.
    """

    def __init__(
        self, config: ServerConfig, registry: Registry, links: Links, drain: Drain
    ) -> None:
        self.num_retried = 0
        """Requests sent to another replica than the first."""
        self.num_lost = 0
        """Answers that ended early because their replica was lost."""
        self.num_refused = 0
        """Requests beyond the limit `concurrent_requests` of their tenant or key."""
        self.registry = registry
        self.links = links
        self.drain = drain
        self._max_body_bytes = config.max_body_bytes
        self._default_tenant = DEFAULT_TENANT if config.auth == "off" else None
        self._forwarding = Forwarding(links, drain)
        self._accounts = Accounts()
        """Requests that no replica has answered yet, by tenant and key; replicas count the others."""
        self._pace = Pace()

    def check_ready(self) -> None:
        """Return if requests are passed on.

        Raises:
            CapacityError: They are not, and why; its code is one of `REASONS`.
        """
        self.drain.check(or_near=True)
        self.registry.usage.check()
        if not any(report.state == "ready" for report in self.links.reports.values()):
            raise no_replica()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer with what a replica answers."""
        path = scope["path"]
        if (
            path.startswith("/internal/")  # the gateway's token would open it
            or scope["method"] == "CONNECT"
            or not scope["raw_path"].startswith(b"/")
        ):
            raise NotFoundError(f"There is no route {scope['method']} {path[:MAX_SHOWN]}.")
        request = Request(scope, receive)
        exchange = Exchange()
        facts = FACTS.get(path) if scope["method"] == "POST" else None
        with self.drain.running(exchange.cut):
            if facts is not None and facts.generates:
                await self._generate(request, exchange, send)
            elif (
                facts is not None
                and facts.is_for_all_replicas
                and "server" not in request.query_params
            ):
                await self._forwarding.ask_all(request, exchange, send)
            else:
                await self._forwarding.pass_on(request, exchange, send)

    async def _generate(self, request: Request, exchange: Exchange, send: Send) -> None:
        self.registry.usage.check()  # what a replica loses is billed here
        caller, tenant_limits = await self._caller(request)
        self._count(request, caller.tenant_id, tenant_limits)
        if (refusal := await self._forwarding.refusal(request, exchange)) is not None:
            await refusal(request.scope, request.receive, send)
            return
        asked = await self._read(
            request, caller, await json_bytes(request, self._max_body_bytes, self._pace)
        )
        async with watching(request, exchange):
            await self._try_replicas(asked, exchange, send)

    async def _caller(self, request: Request) -> tuple[Caller, Limits]:
        """The caller, with the limits of its tenant; no tenant for an admin who names none, or what is no tenant."""
        identity: Identity = request.state.identity
        named = request.query_params.get("tenant", self._default_tenant)
        if identity.role == "admin" and named is not None:
            with suppress(ManyloraError):  # the replica says what is wrong
                row = await self.registry.tenants.get_tenant(named)
                caller = Caller(identity=identity, tenant_id=row.id, tenant=row.name)
                return caller, Limits(**row.limits)
        caller = Caller(identity=identity, tenant_id=identity.tenant_id, tenant=identity.tenant)
        return caller, identity.tenant_limits

    def _count(self, request: Request, tenant_id: str | None, tenant_limits: Limits) -> None:
        """Count a request until its reservation ends, which is when a replica answers.

        Raises:
            RateLimitError: As many are on their way as the tenant or the key may have.
        """
        identity: Identity = request.state.identity
        now_s = time.monotonic()
        held: list[tuple[Holder, str | None, Limits]] = [
            ("tenant", tenant_id, tenant_limits),
            ("key", identity.key_id, identity.key_limits),
        ]
        accounts = [
            LimitedAccount(
                holder,
                name,
                self._accounts.of(name, now_s),
                Limits(concurrent_requests=limits.concurrent_requests),
            )
            for holder, name, limits in held
            if name is not None
        ]
        reservation_of(request).admit(accounts, time.monotonic, self._refused, 0)

    def _refused(self, _limit: str) -> None:
        self.num_refused += 1

    async def _read(self, request: Request, caller: Caller, body: bytes) -> GatewayRequest:
        fields = read_fields(body)
        tenant = caller.tenant_id or ""
        session = fields.sticky or request.headers.get(SESSION_HEADER)
        sticky = secrets.token_hex(16)
        if session:  # any text, so not itself in a header
            key = tenant.encode()
            sticky = hashlib.blake2b(session.encode(), digest_size=16, key=key).hexdigest()
        model = ResolvedModel(name="")
        with suppress(ManyloraError):  # the replica says what is wrong
            names = ModelNames(self.registry, self.links.base_names, has_hints=False)
            model = await names.resolve(
                caller.tenant_id, fields.model, fields.adapter_id, sticky=sticky
            )
        version = model.version
        target = Target(
            adapter=version.digest if version else None,
            units=fields.units(len(body)),
            tenant=tenant,
            affinity=sticky.encode() if session else fields.beginning(tenant),
            held_by=version.held_by if version else None,
            copies=max(1, model.adapter.pinned_copies) if model.adapter else 1,
        )
        event = model.usage_event(
            caller.identity,
            caller.tenant_id,
            caller.tenant,
            str(request.state.request_id),
            request.url.path,
        )
        headers = [*self._forwarding.headers_for_replica(request), (STICKY, sticky)]
        return GatewayRequest(
            request, body, headers, target, event, asyncio.get_running_loop().time()
        )

    async def _try_replicas(self, asked: GatewayRequest, exchange: Exchange, send: Send) -> None:
        best: Response | None = None
        error: ManyloraError = no_replica()
        lost_id: str | None = None  # of the last replica, if it may have computed something
        while len(asked.tried) < MAX_TRIES:
            replica = next(iter(self.links.router.order(asked.target, asked.tried)), None)
            if replica is None or (asked.tried and not self.links.router.may_retry()):
                break
            if lost_id is not None:
                await asyncio.shield(self._bill(asked, lost_id, RETRIED, Counts()))
                lost_id = None
            ledger_id = self.registry.usage.mint_id()
            self.num_retried += len(asked.tried) == 1
            asked.tried.append(replica.name)
            self.links.router.sent(replica.name, asked.target)
            try:
                best = await self._ask(asked, replica, ledger_id, exchange, send)
            except ReplicaLostError as lost:
                error = lost
                lost_id = None if isinstance(lost.__cause__, NOT_REACHED) else ledger_id
                continue
            finally:
                self.links.router.ended(replica.name, asked.target)
            if best is None:
                return
            if best.status_code not in (503, 507) or _SAID_BY_ALL.search(best.body):
                break
            if _NOT_RECORDED.search(best.body):
                self.links.router.failed(replica.name)
                lost_id = ledger_id
        if lost_id is not None:
            await asyncio.shield(self._bill(asked, lost_id, "error", Counts()))
        if best is None:
            raise error
        await best(asked.request.scope, asked.request.receive, send)

    async def _ask(
        self,
        asked: GatewayRequest,
        replica: Server,
        ledger_id: str,
        exchange: Exchange,
        send: Send,
    ) -> Response | None:
        """Have a replica answer.

        Returns:
            None when the client has a stream; else an answer of which it got nothing.

        Raises:
            ReplicaLostError: The replica is gone, and the client got nothing.
        """
        share = self.links.router.weight_share(asked.target.tenant, replica.name)
        headers = [*asked.headers, (LEDGER_ID, ledger_id), (WEIGHT_SHARE, f"{share:.6f}")]
        stream = StreamedAnswer()
        try:
            with exchange.running(), self.links.using(replica.name, exchange.lose):
                return await self._pass_answer(asked, replica, headers, stream, send)
        except BROKEN as broken:
            self.links.router.failed(replica.name)
            if not stream.has_begun:
                raise ReplicaLostError from broken
            self.num_lost += 1
            error: ManyloraError = ReplicaLostError()
        except DrainingError as draining:
            error = draining
        await asyncio.shield(self._bill(asked, ledger_id, "error", stream.frames.counts))
        if not stream.has_begun:
            raise error
        event = error_shape(asked.request.url.path).event(error_body(error))
        await send({"type": "http.response.body", "body": stream.unsent + event})
        return None

    async def _pass_answer(
        self,
        asked: GatewayRequest,
        replica: Server,
        headers: list[tuple[str, str]],
        stream: StreamedAnswer,
        send: Send,
    ) -> Response | None:
        """Pass on a stream, which is kept in `stream`; returns an answer that is none."""
        async with self.links.session.post(
            url_of(replica, asked.request), data=asked.body, headers=headers, allow_redirects=False
        ) as answer:
            if not answer.content_type.startswith("text/event-stream"):
                body = await answer.read()
                if LENGTH in answer.headers:  # else the HTTP layer of the replica answered
                    body = stream.frames.take(body)
                self.links.router.answered(replica.name)
                return whole(answer, body)
            start = {"status": answer.status, "headers": headers_for_client(answer)}
            async for data in answer.content.iter_any():
                stream.unsent = stream.frames.take(data)
                if not stream.unsent:
                    continue
                if not stream.has_begun:
                    self.links.router.answered(replica.name)
                    stream.has_begun = True
                    asked.answered()
                    await send({"type": "http.response.start", **start})
                payload = stream.unsent
                await send({"type": "http.response.body", "body": payload, "more_body": True})
                stream.unsent = b""
            await send({"type": "http.response.body", "body": b""})
            return None

    async def _bill(
        self, asked: GatewayRequest, ledger_id: str, status: str, counts: Counts
    ) -> None:
        """Record the tokens that the client got of a broken answer; what fails is logged."""
        event = asked.event(
            at=datetime.now(UTC),
            id=ledger_id,
            status=status,
            overrules=True,
            prompt_tokens=counts.prompt,
            cached_tokens=counts.cached,
            completion_tokens=counts.completion,
            duration_s=asyncio.get_running_loop().time() - asked.started_s,
        )
        try:
            await self.registry.usage.record(event)
        except ManyloraError as error:
            log.exception("usage_not_recorded", ledger_id=ledger_id, code=error.code)
