"""What a gateway says when it starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from manylora.config import Auth, GatewayConfig, RegistryConfig, ServerConfig
from manylora.server import run
from manylora.server.cluster.serve import serve_gateway


class _ListensError(Exception):
    pass


@pytest.mark.parametrize(
    ("auth", "told"), [("off", "everybody on this machine is admin"), ("on", "dashboard http")]
)
def test_a_gateway_says_who_may_come(
    auth: Auth, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MANYLORA_PEPPER", "p" * 32)
    monkeypatch.setenv("MANYLORA_ADMIN_KEY", "k" * 32)
    monkeypatch.setattr(run, "configure_logs", lambda: None)
    monkeypatch.setattr(run, "keep_interpreter_moving", lambda: None)
    said: list[str] = []

    def announce(line: str) -> None:
        said.append(line)
        if "listening on" in line:
            raise _ListensError

    server = ServerConfig(role="gateway", port=0, data_dir=tmp_path, auth=auth)
    config = GatewayConfig(server=server, registry=RegistryConfig())
    with pytest.raises(_ListensError):
        serve_gateway(config, announce)
    assert told in "\n".join(said)
    assert len(said) == 4
