"""A gateway bills what its replicas lose, so that it takes no requests while it cannot."""

from __future__ import annotations

import errno
import shutil
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from api_server import ADMIN_KEY, BASE, Api, eventually
from broken_disk import broken_disk
from fake_cluster import FakeGateway, FakeReplica, gateway_before
from manylora.config import GatewayConfig
from manylora.errors import CapacityError
from manylora.registry.registry import Registry
from manylora.registry.usage import journal

pytestmark = pytest.mark.anyio
BODY = {"model": BASE, "prompt": "Hi", "max_tokens": 2}
PATHS = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages")


async def gateway_of_its_own(api: Api, folder: Path, stack: AsyncExitStack) -> FakeGateway:
    """A gateway before a test's app, with a journal of its own."""
    replica = await FakeReplica.start(api, stack)
    server, registry = api.services.config.server, api.services.config.registry
    shutil.copytree(server.data_dir, folder, ignore=lambda _, names: set(names) - {"pepper"})
    url = registry.database_url or f"sqlite:///{server.data_dir}/registry.sqlite"
    own = await Registry.open(url, folder, ADMIN_KEY)
    stack.push_async_callback(own.close)
    gateway = await FakeGateway.start(GatewayConfig(server=server, registry=registry), own, stack)
    await gateway.sees(**{replica.name: "ready"})
    return gateway


async def reasons(gateway: FakeGateway) -> list[str]:
    lines = (await gateway.metrics_page()).splitlines()
    of_reason = [
        line for line in lines if line.startswith("manylora_not_ready{") and line.endswith(" 1.0")
    ]
    return [line.split('reason="')[1].split('"')[0] for line in of_reason]


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [(errno.ENOSPC, 507, "storage.full"), (errno.EROFS, 503, "storage.unavailable")],
)
async def test_a_gateway_that_cannot_bill_passes_nothing_on(
    api: Api, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: int, status: int, code: str
) -> None:
    monkeypatch.setattr(journal, "PROBE_S", 0.01)
    key = await api.key("acme")
    async with AsyncExitStack() as stack:
        gateway = await gateway_of_its_own(api, tmp_path / "gateway", stack)
        client = await stack.enter_async_context(gateway.client(key))
        assert await reasons(gateway) == []
        with broken_disk(monkeypatch, error):
            with pytest.raises(CapacityError):
                await gateway.registry.usage.journal.append(b"{}")
            for path in PATHS:
                refused = await client.post(path, json=BODY)
                assert refused.status_code == status, refused.text
            ready = await client.get("/ready")
            assert (ready.status_code, ready.json()["error"]["code"]) == (status, code)
            assert await reasons(gateway) == [code]
            assert api.engine.requests == []
            assert (await client.get("/v1/models")).status_code == 200
        await eventually(lambda: _can_bill(gateway))
        assert await reasons(gateway) == []
        assert (await client.get("/ready")).status_code == 200
        assert (await client.post(PATHS[0], json=BODY)).status_code == 200


def _can_bill(gateway: FakeGateway) -> bool:
    try:
        gateway.registry.usage.check()
    except CapacityError:
        return False
    return True


async def test_a_gateway_says_why_it_is_not_ready(api: Api) -> None:
    async with gateway_before(api) as (gateway, _):
        api.services.drain.is_draining = True
        await gateway.sees()
        assert await reasons(gateway) == ["no_replica"]
        gateway.drain.is_near = True
        assert await reasons(gateway) == ["server.draining"]
