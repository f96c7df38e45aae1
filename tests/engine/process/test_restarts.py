"""Engines that end, are ended or do not start: what clients are told, and what comes back."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest

from engine_client import (
    DEMO,
    Engine,
    collect,
    endless,
    eventually,
    has_restarted,
    is_alive,
    is_on_device,
    is_ready,
    question,
    tokens_of,
)
from manylora.adapters.ref import AdapterRef
from manylora.config import Config, ModelConfig, environment
from manylora.engine.core import MAX_FAILURES
from manylora.engine.process import client as client_module
from manylora.engine.process import supervisor
from manylora.engine.process.client import EngineClient
from manylora.engine.process.messages import FromEngine, Outputs, Ready, ToEngine
from manylora.engine.process.worker_process import StallDetector
from manylora.engine.request import RequestOutput
from manylora.engine.status import EngineReady
from manylora.errors import ConfigError, EngineUnavailableError

pytestmark = pytest.mark.slow


class ScriptedConnection:
    """Says what a script has: a message for each `receive`, then what `receive_now` finds until there is nothing."""

    script: ClassVar[list[list[FromEngine | None]]] = []
    ready: ClassVar[EngineReady]
    pid = None

    def __init__(self, _config: Config, _worker: object = None) -> None:
        self.exited = asyncio.get_running_loop().create_future()
        self._is_asked = asyncio.Event()
        self._there: list[FromEngine | None] = []

    async def start(self) -> Ready:
        return Ready(ready=self.ready, memory_plan="")

    async def receive(self) -> FromEngine:
        await self._is_asked.wait()
        if not self.script:
            await asyncio.Event().wait()  # nothing comes any more
        first, *self._there = self.script.pop(0)
        assert first is not None
        return first

    def receive_now(self) -> FromEngine | None:
        return self._there.pop(0) if self._there else None

    def send(self, _message: ToEngine) -> None:
        self._is_asked.set()

    async def stall(self, _detector: StallDetector) -> str:
        return await asyncio.Future()

    async def close(self) -> None:
        self.exited.cancel()


def test_what_comes_while_others_are_passed_on_waits_for_no_further_message(
    engine: Engine, config: Config, prompt: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def both(token_id: int, **fields: Any) -> Outputs:
        return Outputs(
            outputs=[
                RequestOutput(request_id=name, token_ids=[token_id], **fields)
                for name in ("a", "b")
            ]
        )

    script = [[both(1, queue_s=0.0)], [both(2), None, both(3, finish_reason="length")]]
    monkeypatch.setattr(client_module, "REQUESTS_A_ROUND", 1)
    monkeypatch.setattr(ScriptedConnection, "ready", engine.ready, raising=False)
    monkeypatch.setattr(ScriptedConnection, "script", script)
    monkeypatch.setattr(client_module, "EngineConnection", ScriptedConnection)

    async def main() -> list[list[RequestOutput]]:
        client = EngineClient(config, announce=lambda _: None)
        await client.start()
        reading = asyncio.gather(*(collect(client, question(name, prompt)) for name in ("a", "b")))
        outputs = await asyncio.wait_for(reading, 20)
        await client.close()
        return outputs

    assert [tokens_of(outputs) for outputs in engine.run(main())] == [[1, 2, 3], [1, 2, 3]]


class MortalConnection(ScriptedConnection):
    """Says for each start what `answers` has for it, and dies as soon as it is read from, but for the last."""

    answers: ClassVar[list[EngineReady]]
    started: ClassVar[list[ModelConfig]]

    def __init__(self, config: Config, worker: object = None) -> None:
        super().__init__(config, worker)
        self.started.append(config.model)

    async def start(self) -> Ready:
        return Ready(ready=self.answers[len(self.started) - 1], memory_plan="")

    async def receive(self) -> FromEngine:
        if len(self.started) < len(self.answers):
            self.exited.set_result(1)
        return await asyncio.Future()

    async def kill(self) -> None:
        """There is no process."""


def live(
    engine: Engine, answers: list[EngineReady], monkeypatch: pytest.MonkeyPatch
) -> tuple[EngineClient, list[str]]:
    """A client with engines that say `answers`, each 100 s later, and its lines of progress; returns at the last."""
    monkeypatch.setattr(MortalConnection, "answers", answers, raising=False)
    monkeypatch.setattr(MortalConnection, "started", [], raising=False)
    monkeypatch.setattr(client_module, "EngineConnection", MortalConnection)
    config = Config(model=ModelConfig(path="m"))
    lines: list[str] = []
    client = EngineClient(config, announce=lines.append, clock=lambda: 100.0 * len(lines))

    async def is_last() -> bool:
        return client.ready is not None and client.ready.boot_id == answers[-1].boot_id

    async def main() -> None:
        await client.start()
        await eventually(is_last)
        await client.close()

    engine.run(main())
    return client, lines


@pytest.mark.parametrize("device", ["cuda:0", "cpu"])
def test_an_engine_is_started_again_on_the_device_and_with_the_formats_and_model_of_the_first(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    memory = replace(engine.ready.memory, weights="int8")
    first = replace(engine.ready, device=device, dtype="bfloat16", memory=memory)
    foreign = replace(first, base=replace(first.base, digest="sha256:" + "0" * 64))
    client, _ = live(engine, [first, foreign, replace(first, boot_id="last")], monkeypatch)
    assert client.restarts == 1
    kind = device.partition(":")[0]
    models = [(model.device, model.dtype, model.weights) for model in MortalConnection.started]
    assert models == [("auto", "auto", "auto"), *[(kind, "bfloat16", "int8")] * 2]


def test_engines_that_die_after_a_long_life_are_no_crash_loop(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, lines = live(
        engine, [engine.ready] * 4 + [replace(engine.ready, boot_id="last")], monkeypatch
    )
    assert client.restarts == 4
    assert not any("stopped" in line and "times" in line for line in lines)


def test_an_engine_that_does_not_start_again_is_left_alone_for_a_while(
    engine: Engine, prompt: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MortalConnection, "answers", [engine.ready, engine.ready], raising=False)
    monkeypatch.setattr(MortalConnection, "started", [], raising=False)
    start = MortalConnection.start

    async def start_once(connection: MortalConnection) -> Ready:
        if len(connection.started) > 1:
            raise EngineUnavailableError("it does not start")
        return await start(connection)

    monkeypatch.setattr(MortalConnection, "start", start_once)
    monkeypatch.setattr(client_module, "EngineConnection", MortalConnection)
    monkeypatch.setattr(supervisor, "SECOND_DELAY_S", 0.0)
    lines: list[str] = []
    client = EngineClient(Config(model=ModelConfig(path="m")), announce=lines.append)

    async def is_broken() -> bool:
        return any(
            "stopped 3 times or more, each time before it was ready for 60 s" in line
            for line in lines
        )

    async def main() -> None:
        await client.start()
        await eventually(is_broken)
        assert client.ready is None
        with pytest.raises(EngineUnavailableError, match="stopped 3 times") as refusal:
            await collect(client, question("late", prompt))
        assert refusal.value.retry_after_s > 30
        await client.close()

    engine.run(main())


def test_a_killed_engine_is_replaced_and_nobody_waits_for_ever(
    engine: Engine, refs: dict[str, AdapterRef], prompt: list[int]
) -> None:
    client = engine.client

    async def main() -> None:
        before = await collect(client, question("before", prompt, refs["pirate"]))
        await client.pin_adapter(refs["french"], True)
        pid = client.pid
        tasks = [asyncio.create_task(collect(client, endless(f"r{i}", prompt))) for i in range(10)]
        await asyncio.sleep(0.3)
        os.kill(pid or 0, signal.SIGKILL)
        ends = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(end) for end in ends] == [EngineUnavailableError] * 10
        assert {end.code for end in ends if isinstance(end, EngineUnavailableError)} == {
            "engine_restarted"
        }
        assert client.ready is None
        with pytest.raises(EngineUnavailableError):
            await client.status()
        await eventually(lambda: is_ready(client))
        assert client.restarts == 1
        assert client.pid not in (None, pid)
        assert (await client.status()).boot_id != engine.ready.boot_id
        await eventually(lambda: is_on_device(client, refs["french"]), timeout_s=30)
        await client.pin_adapter(refs["french"], False)
        after = await collect(client, question("after", prompt, refs["pirate"]))
        assert tokens_of(after) == tokens_of(before)

    engine.run(main())


def test_a_paused_engine_that_is_killed_is_paused_when_it_is_back(
    engine: Engine, prompt: list[int]
) -> None:
    client = engine.client

    async def main() -> None:
        client.pause("wait")
        assert client.pid is not None
        os.kill(client.pid, signal.SIGKILL)
        await eventually(is_down)
        with pytest.raises(EngineUnavailableError):
            client.pause("keep")
        with pytest.raises(EngineUnavailableError):
            client.reset_prefix_cache()
        await eventually(lambda: is_ready(client))
        assert client.is_paused
        waiting = asyncio.create_task(collect(client, question("patient", prompt)))
        await eventually(is_kept)
        client.resume()
        assert (await waiting)[-1].finish_reason in ("stop", "length")
        assert (await client.status()).pause is None

    async def is_down() -> bool:
        return client.ready is None

    async def is_kept() -> bool:
        status = await client.status()
        return (status.pause, status.waiting, status.running) == ("keep", 1, 0)

    engine.run(main())


def test_a_machine_that_cannot_start_a_process_now_is_tried_again(
    engine: Engine, prompt: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    client = engine.client
    restarts = client.restarts
    start = subprocess.Popen
    refusals = [BlockingIOError("no more processes")]

    def start_at_second_try(command: list[str], **options: Any) -> subprocess.Popen[bytes]:
        if refusals:
            raise refusals.pop()
        return start(command, **options)

    monkeypatch.setattr(subprocess, "Popen", start_at_second_try)
    monkeypatch.setattr(supervisor, "CRASH_LOOP_DELAY_S", 0.0)

    async def has_come_back() -> bool:
        return client.restarts == restarts + 1

    async def main() -> None:
        os.kill(client.pid or 0, signal.SIGKILL)
        await eventually(has_come_back)
        assert tokens_of(await collect(client, question("after a refusal", prompt)))

    engine.run(main())
    assert not refusals


FAILING_WORKER = """
import sys
from pathlib import Path
from manylora.engine.execution.runner import ModelRunner
from manylora.engine.process import worker

launch = ModelRunner.launch

def fail_while_the_file_is_there(runner, plan, masks=None):
    if Path(sys.argv[1]).exists():
        raise RuntimeError("no kernel runs any more")
    return launch(runner, plan, masks)

ModelRunner.launch = fail_while_the_file_is_there
sys.exit(worker.main())
"""


def test_an_engine_whose_steps_all_fail_is_replaced_and_answers_again(
    config: Config, prompt: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, is_broken = subprocess.Popen, tmp_path / "broken"

    def start_failing(_: list[str], **options: Any) -> subprocess.Popen[bytes]:
        return start([sys.executable, "-P", "-c", FAILING_WORKER, str(is_broken)], **options)

    monkeypatch.setattr(subprocess, "Popen", start_failing)
    engine = Engine(config)
    client = engine.client

    async def main() -> None:
        before = await collect(client, question("before", prompt))
        is_broken.touch()
        for index in range(MAX_FAILURES - 1):
            (refusal,) = await collect(client, question(f"broken{index}", prompt))
            assert refusal.error is not None
            assert refusal.error.code == "internal_error"
        with pytest.raises(EngineUnavailableError, match="being restarted; send the request again"):
            await collect(client, question("last", prompt))
        is_broken.unlink()
        await eventually(lambda: has_restarted(client))
        assert tokens_of(await collect(client, question("after", prompt))) == tokens_of(before)

    engine.run(main())
    engine.close()


def test_a_stopped_engine_is_replaced_and_nobody_waits_for_ever(
    engine: Engine, prompt: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "SILENT_S", 1.0)
    monkeypatch.setattr(supervisor, "CRASH_LOOP_DELAY_S", 0.0)
    client = engine.client

    async def main() -> None:
        # From here on the detector has the shorter time.
        os.kill(client.pid or 0, signal.SIGKILL)
        await eventually(is_down)
        await eventually(lambda: is_ready(client))
        before = await collect(client, question("before a stop", prompt))
        stopped, restarts = client.pid or 0, client.restarts
        tasks = [
            asyncio.create_task(collect(client, endless(f"stopped{i}", prompt))) for i in range(3)
        ]
        os.kill(stopped, signal.SIGSTOP)
        ends = await asyncio.gather(*tasks, client.status(), return_exceptions=True)
        assert {end.code for end in ends if isinstance(end, EngineUnavailableError)} == {
            "engine_restarted"
        }
        assert not any(isinstance(end, list) for end in ends)
        await eventually(lambda: is_ready(client))
        assert (client.restarts, client.pid == stopped, is_alive(stopped)) == (
            restarts + 1,
            False,
            False,
        )
        assert tokens_of(await collect(client, question("after a stop", prompt))) == tokens_of(
            before
        )

    async def is_down() -> bool:
        return client.ready is None

    engine.run(main())


STUCK_WORKER = FAILING_WORKER.replace(
    'raise RuntimeError("no kernel runs any more")', "__import__('threading').Event().wait()"
)


def test_an_engine_whose_step_does_not_end_is_replaced(
    config: Config, prompt: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, is_stuck = subprocess.Popen, tmp_path / "stuck"

    def start_sticking(_: list[str], **options: Any) -> subprocess.Popen[bytes]:
        return start([sys.executable, "-P", "-c", STUCK_WORKER, str(is_stuck)], **options)

    monkeypatch.setattr(subprocess, "Popen", start_sticking)
    monkeypatch.setattr(client_module, "STUCK_S", 2.0)
    monkeypatch.setattr(client_module, "STUCK_STEPS", 0.0)
    engine = Engine(config)
    client = engine.client

    async def main() -> None:
        is_stuck.touch()
        with pytest.raises(EngineUnavailableError, match="being restarted; send the request again"):
            await collect(client, question("stuck", prompt))
        is_stuck.unlink()
        await eventually(lambda: has_restarted(client))
        assert tokens_of(await collect(client, question("after", prompt)))

    engine.run(main())
    engine.close()


def test_an_engine_that_stops_while_it_starts_is_ended(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, started = subprocess.Popen, list[subprocess.Popen[bytes]]()

    def start_stopped(_: list[str], **options: Any) -> subprocess.Popen[bytes]:
        started.append(
            start([sys.executable, "-c", "import os; os.kill(os.getpid(), 19)"], **options)
        )
        return started[-1]

    monkeypatch.setattr(subprocess, "Popen", start_stopped)
    monkeypatch.setattr(supervisor, "SILENT_START_S", 1.0)

    async def main() -> None:
        client = EngineClient(config, announce=lambda _: None)
        with pytest.raises(
            EngineUnavailableError, match="gave no sign of life for 1 s while starting"
        ):
            await client.start()

    asyncio.run(main())
    assert started[0].wait() == -signal.SIGKILL


def test_closing_ends_the_process_and_those_who_wait(config: Config, prompt: list[int]) -> None:
    engine = Engine(config)
    pid = engine.client.pid

    async def main() -> None:
        waits = asyncio.create_task(collect(engine.client, endless("waits", prompt)))
        await asyncio.sleep(0.1)
        await engine.client.close()
        with pytest.raises(EngineUnavailableError, match="shutting down"):
            await waits
        with pytest.raises(EngineUnavailableError):
            await collect(engine.client, question("late", prompt))

    engine.run(main())
    engine.close()
    assert pid is not None
    assert not is_alive(pid)


def test_a_wrong_setting_is_told_by_start_and_leaves_nothing_behind(tmp_path: Path) -> None:
    async def main() -> None:
        lines: list[str] = []
        client = EngineClient(
            Config(model=ModelConfig(path=str(tmp_path / "nothing"))), announce=lines.append
        )
        with pytest.raises(ConfigError, match="nothing"):
            await client.start()
        assert client.ready is None
        await client.close()

    asyncio.run(main())


ORPHAN = """
import asyncio, sys
from pathlib import Path
from manylora.config import Config, ModelConfig, MemoryConfig, RegistryConfig
from manylora.engine.process.client import EngineClient

async def main():
    config = Config(
        model=ModelConfig(path=sys.argv[1], device="cpu", dtype="float32", threads=1),
        memory=MemoryConfig(gib=0.05, host_gib=0.05),
        registry=RegistryConfig(blob_url=sys.argv[2]),
    )
    client = EngineClient(config, announce=lambda _: None)
    await client.start()
    print(client.pid, flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""


def test_no_engine_outlives_its_parent(tmp_path: Path) -> None:
    command = [sys.executable, "-P", "-c", ORPHAN, str(DEMO / "manylora-demo"), str(tmp_path)]
    folder = tmp_path / "t"
    folder.mkdir()
    settings = {**environment(), "TMPDIR": str(folder)}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=settings
    ) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert is_alive(pid)
        parent.kill()
    deadline = time.monotonic() + 60
    while is_alive(pid):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert list(folder.iterdir()) == []
