"""Ports that are taken, before or while a server starts."""

from __future__ import annotations

import socket
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from starlette.responses import Response
from starlette.types import ASGIApp

from manylora.config import GatewayConfig, RegistryConfig, ServerConfig
from manylora.errors import ConfigError
from manylora.registry.registry import Registry
from manylora.server import run
from manylora.server.cluster import app as cluster_app
from manylora.server.cluster import serve as gateway
from manylora.server.http.listen import bind, listen, listen_beside
from manylora.server.process.drain import Drain


@pytest.mark.parametrize("setting", ["server.port", "server.metrics_port"])
def test_a_taken_port_is_a_clear_error(setting: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        told = f"127.0.0.1 port {port}: Address already in use. Choose another server.host or {setting}."
        with pytest.raises(ConfigError, match=told), bind("127.0.0.1", port, setting):
            pass


def test_a_taken_metrics_port_is_named() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        pytest.raises(ConfigError, match=r"server\.metrics_port"),
    ):
        listen_beside(AsyncExitStack(), None, "127.0.0.1", taken.getsockname()[1])


def test_of_two_that_bind_a_port_the_second_is_told_when_it_listens() -> None:
    with bind("127.0.0.1", 0) as first, bind("127.0.0.1", first.getsockname()[1]) as second:
        listen(first)
        with pytest.raises(ConfigError, match="Address already in use"):
            listen(second)


def test_a_gateway_that_loses_its_port_while_it_starts_is_neither_listed_nor_says_that_it_listens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MANYLORA_PEPPER", "p" * 32)
    monkeypatch.setenv("MANYLORA_ADMIN_KEY", "k" * 32)
    monkeypatch.setattr(run, "configure_logs", lambda: None)
    said: list[str] = []
    open_gateway = cluster_app.open_gateway
    with bind("127.0.0.1", 0) as rival:

        async def open_late(
            config: GatewayConfig, registry: Registry, drain: Drain, stack: AsyncExitStack
        ) -> tuple[ASGIApp, Callable[[], Awaitable[Response]]]:
            listen(rival)
            return await open_gateway(config, registry, drain, stack)

        monkeypatch.setattr(cluster_app, "open_gateway", open_late)
        monkeypatch.setattr(gateway, "Membership", lambda *_: pytest.fail("It lists itself."))
        server = ServerConfig(role="gateway", port=rival.getsockname()[1], data_dir=tmp_path)
        config = GatewayConfig(server=server, registry=RegistryConfig())
        with pytest.raises(ConfigError, match=r"server\.port"):
            gateway.serve_gateway(config, said.append)
    assert said == []
