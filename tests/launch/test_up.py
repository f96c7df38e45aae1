"""What `manylora cluster up` gives to its servers, and when it starts them again."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import time
from pathlib import Path

import httpx
import pytest
from typer.testing import CliRunner

from fake_engine import DEMO_MODEL
from manylora.cli import make_app
from manylora.config import Config
from manylora.launch import up as launch
from manylora.launch.server_process import ServerProcess
from manylora.server.settings import load_config

Started = dict[str, tuple[tuple[str, ...], dict[str, str]]]


class FakeServer:
    """Ends at once, with status 3."""

    def wait(self) -> int:
        return 3

    def wait_listening(self) -> str:
        return "ray-address"


class SilentServer(FakeServer):
    """Says that it listens at `url`, and lives until it is killed."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.killed: list[None] = []

    def wait_listening(self) -> str:
        return self.url

    def kill(self) -> None:
        self.killed.append(None)


class Done(Exception):  # noqa: N818 - no error
    pass


@pytest.mark.parametrize(
    ("lives_s", "delays"), [(1, [0.5, 1, 2, 4, 8, 16, 30, 30]), (61, [0.5] * 8)]
)
def test_the_delays_grow_until_a_child_lives_for_long(
    monkeypatch: pytest.MonkeyPatch, lives_s: float, delays: list[float]
) -> None:
    slept: list[float] = []
    lines: list[str] = []
    times = (at * lives_s for at in range(1000))

    async def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == len(delays):
            raise Done

    async def to_thread(function: object) -> int:
        assert callable(function)
        return int(function())

    monkeypatch.setattr(asyncio, "sleep", sleep)
    monkeypatch.setattr(asyncio, "to_thread", to_thread)
    monkeypatch.setattr(time, "monotonic", lambda: next(times))
    running: dict[str, ServerProcess] = {"replica-0": FakeServer()}  # type: ignore[dict-item]
    with pytest.raises(Done):
        asyncio.run(launch._keep("replica-0", FakeServer, running, lines.append))  # type: ignore[arg-type]
    assert slept == delays
    assert (
        lines[1] == f"manylora: replica-0 ended with status 3 and starts again in {delays[1]:g} s"
    )


def test_a_child_that_does_not_answer_for_a_while_is_killed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It answers some looks, misses some, answers again, and is stopped then."""
    answers = [True, False, False, True, True, False, True, False, False, False]
    lines: list[str] = []
    asked: list[str] = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(str(request.url))
        if not answers[len(asked) - 1]:
            raise httpx.ReadTimeout("stopped")
        return httpx.Response(503)  # it drains

    monkeypatch.setattr(launch, "LOOK_S", 0.0)
    monkeypatch.setattr(launch, "SILENT_LOOKS", 3)
    opened = httpx.AsyncClient(transport=httpx.MockTransport(answer))
    monkeypatch.setattr(httpx, "AsyncClient", lambda **_: opened)
    child = SilentServer("http://127.0.0.1:1")
    asyncio.run(launch._kill_if_silent("replica-0", child, lines.append))  # type: ignore[arg-type]
    assert asked == ["http://127.0.0.1:1/health"] * len(answers)
    assert (child.killed, lines) == ([None], ["manylora: replica-0 does not answer and is killed"])


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Started:
    """Arguments and environment of what would be started."""
    found: Started = {}

    async def run(groups: tuple[launch.Starts, ...], *_: object) -> None:
        for group in groups:
            for name, start in group.items():
                _, arguments, env = start.args  # type: ignore[attr-defined]
                found[name] = (arguments, env)

    monkeypatch.setattr(launch, "_run", run)
    return found


MODEL = ("--model", str(DEMO_MODEL))


def ended(*arguments: str, **env: str | None) -> tuple[int, str]:
    """Status and output of the command."""
    command = ["cluster", "up", "--port", "0", *arguments]
    done = CliRunner().invoke(
        make_app(), command, env={"MANYLORA_ADMIN_KEY": None, "MANYLORA_PEPPER": None, **env}
    )
    return done.exit_code, done.output


def up(*arguments: str, **env: str | None) -> str:
    status, output = ended(*MODEL, *arguments, **env)
    assert status == 0, output
    return output


def test_servers_get_every_setting_and_one_set_of_secrets(started: Started, tmp_path: Path) -> None:
    file = tmp_path / "manylora.yaml"
    file.write_text("tenant_defaults: {requests_per_minute: null}\nmemory: {prefix_cache: false}\n")
    given = (
        "--set",
        "scheduler.max_running=7",
        "--config",
        str(file),
        "--data-dir",
        str(tmp_path / "d"),
    )
    shown = up("--replicas", "3", *given, MANYLORA_SERVER__DRAIN_S="12.5")
    assert set(started) == {"gateway", "replica-0", "replica-1", "replica-2"}
    config = load_config(
        {}, {n: v for n, v in started["replica-0"][1].items() if n.startswith("MANYLORA_")}
    )
    assert isinstance(config, Config)
    assert (config.scheduler.max_running, config.server.drain_s, config.memory.prefix_cache) == (
        7,
        12.5,
        False,
    )
    assert config.tenant_defaults.requests_per_minute is None
    assert config.registry.database_url == f"sqlite:///{tmp_path}/d/registry.sqlite"
    secrets = {tuple(env[name] for name in launch.SECRETS) for _, env in started.values()}
    assert len(secrets) == 1
    assert secrets.pop()[0] in shown
    up(*given)
    assert (tmp_path / "d" / "cluster.pepper").read_text() == started["gateway"][1][
        "MANYLORA_PEPPER"
    ]


def test_replicas_share_cores_and_gpus_and_the_gateway_alone_has_the_ports(
    started: Started, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "usable_cores", lambda: 16)
    monkeypatch.setattr(launch, "count_cuda_devices", lambda: 2)
    given = ("--data-dir", str(tmp_path), "--set", "server.metrics_port=9464")
    up("--replicas", "3", *given)
    environs = [started[f"replica-{number}"][1] for number in range(3)]
    assert [env["MANYLORA_MODEL__THREADS"] for env in environs] == ["5"] * 3
    assert [env["CUDA_VISIBLE_DEVICES"] for env in environs] == ["0", "1", "0"]
    assert [env["MANYLORA_SERVER__METRICS_PORT"] for env in environs] == ["null"] * 3
    assert started["gateway"][1]["MANYLORA_SERVER__METRICS_PORT"] == "9464"
    up("--set", "model.threads=2", *given, CUDA_VISIBLE_DEVICES="4,6")
    environs = [started[f"replica-{number}"][1] for number in range(2)]
    assert [env["CUDA_VISIBLE_DEVICES"] for env in environs] == ["4", "6"]
    assert [env["MANYLORA_MODEL__THREADS"] for env in environs] == ["2"] * 2
    up("--set", "server.host=0.0.0.0", *given)
    arguments, env = started["replica-0"]
    at = {"role": "replica", "host": arguments[arguments.index("--host") + 1]}
    config = load_config(
        {"server": at}, {name: value for name, value in env.items() if name.startswith("MANYLORA_")}
    )
    assert config.server.advertised_url is None


def test_ray_gets_a_token_of_its_own_unless_it_runs_already(
    started: Started, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "find_spec", lambda _: True)
    up("--ray", "--data-dir", str(tmp_path), RAY_AUTH_MODE=None, RAY_AUTH_TOKEN_PATH=None)
    assert set(started) == {"gateway", "ray"}
    env = started["ray"][1]
    assert (env["RAY_AUTH_MODE"], env["RAY_AUTH_TOKEN_PATH"]) == (
        "token",
        str(tmp_path / "ray.token"),
    )
    assert (tmp_path / "ray.token").stat().st_mode & 0o777 == 0o600
    up("--ray", "--data-dir", str(tmp_path), RAY_AUTH_TOKEN_PATH="/elsewhere")
    assert started["ray"][1]["RAY_AUTH_TOKEN_PATH"] == "/elsewhere"
    up(
        "--ray",
        "--data-dir",
        str(tmp_path),
        "--address",
        "auto",
        RAY_AUTH_MODE=None,
        RAY_AUTH_TOKEN_PATH=None,
    )
    assert "RAY_AUTH_MODE" not in started["ray"][1]
    assert '"address": "auto"' in started["ray"][0][-1]


@pytest.mark.parametrize(
    ("message", "arguments"),
    [
        ("model.path: cannot read", ("--model", "{empty}")),
        ("model.path is required", ()),
        ("Choose another server.host or server.port", (*MODEL, "--port", "{taken}")),
        ("database that cannot be used", (*MODEL, "--database-url", "sqlite:///{empty}")),
        ("go with --ray", (*MODEL, "--address", "auto")),
        ("is the folder of a single server", (*MODEL, "--data-dir", "{single}")),
    ],
)
def test_what_cannot_be_started_is_refused_in_words(
    started: Started, tmp_path: Path, message: str, arguments: tuple[str, ...]
) -> None:
    empty, single = tmp_path / "empty", tmp_path / "single"
    for folder in (empty, single):
        folder.mkdir()
    (single / "pepper").write_text("00" * 32)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        places = {"empty": empty, "single": single, "taken": taken.getsockname()[1]}
        status, output = ended(
            "--data-dir", str(tmp_path / "d"), *(each.format(**places) for each in arguments)
        )
    assert (status, message in output) == (2, True), output
    assert started == {}


@pytest.mark.parametrize(("missing", "extra"), [("aiohttp", "cluster"), ("ray", "ray")])
def test_a_missing_package_is_named(
    monkeypatch: pytest.MonkeyPatch, missing: str, extra: str
) -> None:
    monkeypatch.setattr(launch, "find_spec", lambda name: None if name == missing else True)
    done = CliRunner().invoke(make_app(), ["cluster", "up", "--ray", "--model", str(DEMO_MODEL)])
    assert (done.exit_code, f"pip install 'manylora[{extra}]'" in done.output) == (2, True), (
        done.output
    )


def test_a_child_that_does_not_drain_in_time_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ("serve", "--model", str(DEMO_MODEL), "--port", "0")
    with ServerProcess("slow", arguments) as slow:
        monkeypatch.setattr(slow, "terminate", lambda: None)
        assert slow.stop(0.1) == -signal.SIGKILL


def test_replicas_divide_the_cores_that_suffice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {7, 1, 3, 2, 5})
    assert [launch.own_cores(number, 2) for number in range(2)] == [[1, 2], [3, 5, 7]]
    assert launch.own_cores(4, 5) == [7]
    assert launch.own_cores(4, 6) == []
