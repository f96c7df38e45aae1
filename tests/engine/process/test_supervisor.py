from __future__ import annotations

import asyncio
import os
import stat
import subprocess
import tempfile
from pathlib import Path

import pytest

from manylora.config import Config, ModelConfig
from manylora.engine.process import messages
from manylora.engine.process.supervisor import (
    MAX_SOCKET_PATH,
    SOCKET_NAME,
    EngineConnection,
    RestartPolicy,
)
from manylora.engine.process.worker_process import Pulse, Worker
from manylora.errors import EngineUnavailableError


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.mark.parametrize("load_s", [0.0, 600.0])
@pytest.mark.parametrize("life_s", [None, 0.0, 60.0])
def test_the_first_restart_is_at_once_and_later_ones_take_longer(
    load_s: float, life_s: float | None
) -> None:
    """However long the model takes to load, and whether the engine becomes ready for a short life or not at all."""
    clock = Clock()
    policy = RestartPolicy(clock)
    delays_s: list[float] = []
    for _ in range(4):
        assert policy.is_crash_loop == (len(delays_s) >= 3)
        clock.now_s += load_s
        if life_s is not None:
            policy.became_ready()
            clock.now_s += life_s
        delays_s.append(policy.died())
    assert delays_s == [0.0, 1.0, 30.0, 30.0]


def test_deaths_after_a_long_life_are_no_crash_loop() -> None:
    clock = Clock()
    policy = RestartPolicy(clock)
    for _ in range(10):
        policy.became_ready()
        clock.now_s += 61.0
        assert policy.died() == 0.0
    assert not policy.is_crash_loop


def test_an_engine_that_lived_long_and_does_not_start_again_is_in_a_crash_loop() -> None:
    clock = Clock()
    policy = RestartPolicy(clock)
    policy.became_ready()
    clock.now_s += 61.0
    assert [policy.died() for _ in range(3)] == [0.0, 1.0, 30.0]


def test_a_crash_loop_ends_when_the_engine_lives_for_a_while() -> None:
    clock = Clock()
    policy = RestartPolicy(clock)
    for _ in range(3):
        policy.died()
    policy.became_ready()
    clock.now_s = 100.0
    assert policy.died() == 0.0
    assert not policy.is_crash_loop


async def folder_of_a_connection() -> tuple[Path, int]:
    """The private folder of a connection that is ended at once, and its mode while it was there."""
    connection = EngineConnection(Config(model=ModelConfig(path="m")))
    folder = Path(connection.address.removeprefix("ipc://")).parent
    mode = stat.S_IMODE(folder.stat().st_mode)
    await connection.kill()
    return folder, mode


def test_a_process_that_was_started_before_is_the_engine() -> None:
    process = subprocess.Popen(["head", "-n1"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    fd = Pulse.create()
    worker = Worker(process, Pulse(fd), fd)

    async def launch() -> int | None:
        connection = EngineConnection(Config(model=ModelConfig(path="m")), worker)
        with pytest.raises(EngineUnavailableError, match="ended with exit code 0 while starting"):
            await connection.start()
        await connection.kill()
        return connection.pid

    assert asyncio.run(launch()) == process.pid
    os.close(fd)
    assert process.stdout is not None
    with process.stdout:
        launched = messages.decode_launch(process.stdout.read())
    assert (launched.config.model.path, launched.pulse_fd) == ("m", fd)


def test_the_socket_lies_in_a_fresh_private_folder_that_is_removed() -> None:
    one, other = (asyncio.run(folder_of_a_connection()) for _ in range(2))
    assert one != other
    assert (one[1], one[0].exists()) == (0o700, False)


def test_the_sockets_path_is_short_though_the_temporary_folder_is_not(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    deep = tmp_path / ("x" * 100)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    folder, _ = asyncio.run(folder_of_a_connection())
    assert len(str(folder / SOCKET_NAME)) <= MAX_SOCKET_PATH
