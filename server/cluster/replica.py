"""A replica: a server that computes what gateways pass on to it. It lists itself in the registry and reports its state.

Gateways find replicas in the registry and read the reports of each over a connection of their own. No server pushes
anything to another: adapters, keys and pins are read from the registry.
"""

from __future__ import annotations

import asyncio
import hmac
import re
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack
from functools import partial

import msgspec
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

import manylora
from manylora.errors import CapacityError, ConfigError, EngineUnavailableError
from manylora.registry.servers import Server
from manylora.server.cluster.loads import ranked
from manylora.server.cluster.membership import Membership
from manylora.server.cluster.wire import (
    CLUSTER,
    LEDGER_ID,
    LENGTH,
    PROBE,
    REPORT_S,
    STATE_PATH,
    STICKY,
    WEIGHT_SHARE,
    Report,
    cluster_token,
    frame,
)
from manylora.server.hop import Hop
from manylora.server.http.sse import ClosingResponse
from manylora.server.http.wire import TRUST
from manylora.server.process.threads import cancel_all, repeat
from manylora.server.services import Services, base_names

LOOK_S = 0.5
"""Seconds between two looks for changes in the registry and the list; a change is followed within a second."""
RESIDENTS_S = 1.0
"""Seconds between two looks at which adapters the engine has."""
_LEDGER_ID = re.compile(r"use_[0-9a-f]{8,56}")
_encode = msgspec.json.Encoder().encode


async def join(
    app: ASGIApp, services: Services, url: str, stack: AsyncExitStack, duties: Duties
) -> tuple[ASGIApp, Membership]:
    """Make a server a replica: list it, follow its duties, and take requests of gateways. `stack` ends all of it.

    Raises:
        CapacityError: The database cannot answer.
        ConfigError: A replica of another base is listed.
    """
    config = services.config.server
    server = Server(
        name=services.server_name,
        role="replica",
        boot_id=services.ready.boot_id,
        url=config.advertised_url or url,
        version=manylora.__version__,
        model=services.served_name,
        base=services.ready.base.digest,
    )
    membership = Membership(services.registry.servers, server)
    await membership.start()
    stack.push_async_callback(membership.stop)
    for other in await services.registry.servers.listed("replica"):
        if (other.model, other.base) != (server.model, server.base):
            message = f"{other.name} at {other.url} serves `{other.model}` ({other.base}) from this database."
            hint = (
                f"Replicas over one database serve one base: give `{server.model}` another database, "
                "or stop the rest."
            )
            raise ConfigError(f"{message} {hint}", param="model.path")
    following = asyncio.create_task(duties.follow(services), name="manylora-duties")
    stack.push_async_callback(cancel_all, [following])
    token = cluster_token(services.registry.key_ring)
    return FromGateways(app, Reports(services, membership), token), membership


class Duties:
    """Pins the adapters that are this replica's part of the pins, and lets deleted adapters go.

    All replicas read the registry, and compute the same order of replicas for an adapter. Thread: the event loop's.
    """

    def __init__(self) -> None:
        self._name = ""
        self._replicas: tuple[str, ...] = ()
        """Names of the ready ones; empty before the first look, when there are no duties."""
        self._seen: object = None

    def is_own(self, digest: str, copies: int) -> bool:
        """True if this replica is among the first `copies` in the order of replicas for an adapter."""
        return self._name in ranked(digest, self._replicas)[:copies]

    async def follow(self, services: Services) -> None:
        """Look for changes, for ever."""
        self._name = services.server_name
        await repeat(partial(self._look, services), LOOK_S, "changes_not_followed")

    async def _look(self, services: Services) -> None:
        registry = services.registry
        listed = await registry.servers.listed("replica")
        replicas = tuple(server.name for server in listed if server.state == "ready")
        now = (await registry.last_change(), replicas)
        if now == self._seen:
            return
        self._replicas = replicas
        await services.versions.pins.sync()
        await _drop_deleted(services)
        self._seen = now


async def _drop_deleted(services: Services) -> None:
    """Have the engine drop adapters that are no version's any more; requests that run with them finish."""
    digests = {resident.digest for resident in (await services.engine_status()).residents}
    known = await services.registry.adapters.version_names(digests)
    for digest in digests - known.keys():
        await services.engine.drop_adapter(digest)


class Reports:
    """The state of this replica as lines of JSON, for each gateway that listens."""

    def __init__(self, services: Services, membership: Membership) -> None:
        self._services = services
        self._membership = membership
        self._residents: dict[str, str] = {}
        self._looked_s = float("-inf")

    async def lines(self) -> AsyncGenerator[bytes, None]:
        """A report now, and every `REPORT_S` seconds until this server was drained."""
        told: dict[str, str] = {}
        drain = self._services.drain
        while not (drain.is_draining and not drain.num_running):
            now = await self._tiers()
            changes: dict[str, str | None] = {
                digest: tier for digest, tier in now.items() if told.get(digest) != tier
            }
            changes |= dict.fromkeys(told.keys() - now.keys())
            told = now
            yield _encode(self._report(changes)) + b"\n"
            await asyncio.sleep(REPORT_S)

    def _report(self, tiers: dict[str, str | None]) -> Report:
        load = self._services.engine.load
        gate = self._services.limits.gate
        rate = load.rate if load else 0.0
        backlog = sum(tenant.backlog for tenant in load.tenants.values()) if load else 0.0
        state = self._membership.server.state
        return Report(
            boot_id=self._membership.server.boot_id,
            state="down" if state == "ready" and not self._can_generate() else state,
            backlog_s=backlog / rate if rate else 0.0,
            rate=rate,
            base_names=base_names(self._services.config),
            running=gate.num_running,
            waiting=gate.num_waiting,
            tiers=tiers,
        )

    def _can_generate(self) -> bool:
        """True if an answer can be computed and recorded, as far as is known without asking the database."""
        try:
            self._services.registry.usage.check()
        except CapacityError:
            return False
        return self._services.engine.ready is not None

    async def _tiers(self) -> dict[str, str]:
        """Adapters of the engine that need no fetch, by digest; asked once for all gateways."""
        now_s = self._services.clock.monotonic()
        if now_s - self._looked_s >= RESIDENTS_S:
            self._looked_s = now_s
            try:
                status = await self._services.engine_status(REPORT_S)
            except EngineUnavailableError:
                return self._residents
            near = [
                resident for resident in status.residents if resident.tier in ("device", "host")
            ]
            self._residents = {resident.digest: resident.tier for resident in near}
        return self._residents


class FromGateways:
    """ASGI middleware, outermost: lets gateways ask for the state, and frames what is answered to their requests.

    Without the token, internal headers mean nothing.
    """

    def __init__(self, app: ASGIApp, reports: Reports, token: str) -> None:
        self._app = app
        self._reports = reports
        self._token = token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on."""
        headers = Headers(scope=scope) if scope["type"] == "http" else None
        if headers is None or not hmac.compare_digest(
            headers.get(CLUSTER, "").encode(), self._token.encode()
        ):
            await self._app(scope, receive, send)
        elif scope["path"] == STATE_PATH:
            if trust := scope.get("state", {}).get(TRUST):
                trust()
            await ClosingResponse(self._reports.lines(), media_type="application/x-ndjson")(
                scope, receive, send
            )
        elif PROBE in headers:
            scope["state"] = {**scope.get("state", {}), "is_probe": True}
            await self._app(scope, receive, send)
        elif not _LEDGER_ID.fullmatch(headers.get(LEDGER_ID, "")):
            await self._app(scope, receive, send)
        else:
            hop = _hop(headers)
            scope["state"] = {**scope.get("state", {}), "hop": hop}

            async def send_framed(message: Message) -> None:
                if message["type"] == "http.response.start":
                    message["headers"] = [
                        (LENGTH.encode() if name == b"content-length" else name, value)
                        for name, value in message["headers"]
                    ]
                else:
                    message = {**message, "body": frame(message.get("body", b""), hop.billed())}
                await send(message)

            await self._app(scope, receive, send_framed)


def _hop(headers: Headers) -> Hop:
    """Facts that a gateway sends with a request; a malformed one counts as not sent."""
    try:
        share = float(headers.get(WEIGHT_SHARE, "1"))
    except ValueError:
        share = 1.0
    share = share if 0 < share <= 1 else 1.0  # not NaN
    return Hop(ledger_id=headers[LEDGER_ID], weight_share=share, sticky=headers.get(STICKY, ""))
