from __future__ import annotations

import io
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from unittest.mock import Mock

import pytest
import zmq

from fake_engine import demo_ready
from manylora.adapters.blobs.memory import MemoryBlobs
from manylora.config import Config, ModelConfig
from manylora.engine.process import messages, worker
from manylora.engine.process.worker import MAX_STEPS_AHEAD, EngineLoop, Wakeup
from manylora.engine.request import GenerationRequest, RequestOutput
from manylora.engine.status import EngineLoad
from manylora.errors import EngineError
from simulation.driven import Simulator, adapter, expected_tokens, request


class Process:
    """The engine's loop in a thread, around a simulated engine that may have requests before the loop starts."""

    def __init__(self, address: str, submitted: Sequence[GenerationRequest] = ()) -> None:
        self.simulator = Simulator(checked=False, load_ticks=0)
        self.wakeup = Wakeup()
        self.parent_gone = threading.Event()
        self._context = zmq.Context()
        self.socket: zmq.Socket[bytes] = self._context.socket(zmq.DEALER)
        self.socket.set(zmq.RCVTIMEO, 60_000)
        self.socket.bind(address)
        self._inner: zmq.Socket[bytes] = self._context.socket(zmq.DEALER)
        self._inner.connect(address)
        for each in submitted:
            self.simulator.submit(each)
        loop = EngineLoop(
            self.simulator.core, MemoryBlobs(0), self._inner, self.wakeup, self.parent_gone
        )
        self.loads: list[EngineLoad] = []
        self.thread = threading.Thread(target=loop.run)
        self.thread.start()

    def send(self, message: messages.ToEngine) -> None:
        self.socket.send(messages.encode(message))

    def receive(self) -> messages.FromEngine:
        """The next message that is not a load, which are kept apart."""
        while isinstance(message := messages.decode_from_engine(self.socket.recv()), messages.Load):
            self.loads.append(message.load)
        return message

    def receive_load(self) -> EngineLoad:
        message = messages.decode_from_engine(self.socket.recv())
        assert isinstance(message, messages.Load)
        return message.load

    def outputs_until_end_of(self, *request_ids: str) -> list[list[RequestOutput]]:
        steps = []
        open_ids = set(request_ids)
        while open_ids:
            message = self.receive()
            assert isinstance(message, messages.Outputs)
            self.send(messages.Taken(1))
            steps.append(message.outputs)
            open_ids -= {output.request_id for output in message.outputs if output.finish_reason}
        return steps

    def close(self) -> None:
        self.parent_gone.set()
        self.wakeup.wake()
        self.thread.join(60)
        assert not self.thread.is_alive()
        self._context.destroy(linger=0)


@pytest.fixture
def process(tmp_path: Path) -> Iterator[Process]:
    process = Process(f"ipc://{tmp_path}/s")
    yield process
    process.close()


def test_a_step_is_one_message_with_all_its_outputs(tmp_path: Path) -> None:
    # Sent as messages they could arrive steps apart.
    requests = [request(name, max_tokens=100) for name in ("a", "b")]
    process = Process(f"ipc://{tmp_path}/s", submitted=requests)
    try:
        steps = process.outputs_until_end_of("a", "b")
    finally:
        process.close()
    for each in requests:
        tokens = [
            token
            for step in steps
            for o in step
            if o.request_id == each.request_id
            for token in o.token_ids
        ]
        assert tokens == expected_tokens(each, 100)
    ids = [[output.request_id for output in step] for step in steps]
    assert ids == [["a", "b"]] * 100


def test_the_engine_waits_for_a_client_that_does_not_take_its_outputs(process: Process) -> None:
    process.send(messages.Submit(request("a", max_tokens=50)))
    for _ in range(MAX_STEPS_AHEAD):
        assert isinstance(process.receive(), messages.Outputs)
    process.send(messages.AskStatus())  # what else is asked is answered meanwhile
    message = process.receive()
    assert isinstance(message, messages.Status)
    assert message.status.num_steps == MAX_STEPS_AHEAD
    for _ in range(MAX_STEPS_AHEAD):
        process.send(messages.Taken(1))
    assert len(process.outputs_until_end_of("a")) == 50 - MAX_STEPS_AHEAD


def test_the_load_is_told_while_there_is_work_and_once_when_there_is_none_any_more(
    process: Process,
) -> None:
    process.send(messages.Submit(request("a", max_tokens=50)))
    process.outputs_until_end_of("a")
    assert process.loads[0].tenants[""].running + process.loads[0].tenants[""].waiting == 1
    last = process.receive_load()
    assert last.tenants == {}


def test_junk_is_passed_over(process: Process) -> None:
    for junk in (b"", b"\xff" * 1000, messages.encode(messages.StartFailed("m", "c", True))):
        process.socket.send(junk)
    process.send(messages.Submit(request("a")))
    assert process.outputs_until_end_of("a")


def test_a_request_that_cannot_be_is_refused_by_an_output(process: Process) -> None:
    process.send(messages.Submit(request("a", prompt=[])))
    ((refusal,),) = process.outputs_until_end_of("a")
    assert refusal.error is not None
    assert refusal.error.kind == "request"


def test_an_adapters_messages_reach_the_residency(process: Process) -> None:
    process.send(messages.PinAdapter(adapter("a"), True))
    process.send(messages.DropAdapter("unknown"))
    process.send(messages.Submit(request("a", ref=adapter("a"))))
    process.outputs_until_end_of("a")
    residents = process.simulator.residency.residents()
    assert [resident.digest for resident in residents if resident.pinned] == [adapter("a").digest]


def test_an_abort_is_answered(process: Process) -> None:
    process.simulator.store.ticks = 1 << 30
    process.send(messages.Submit(request("a", ref=adapter("a"))))
    process.send(messages.Abort("a"))
    assert process.outputs_until_end_of("a")[-1][0].finish_reason == "abort"


def test_the_loop_ends_when_its_parent_is_gone(process: Process) -> None:
    process.parent_gone.set()
    process.wakeup.wake()
    process.thread.join(60)
    assert not process.thread.is_alive()


def test_an_idle_engine_does_not_spin(process: Process, monkeypatch: pytest.MonkeyPatch) -> None:
    process.send(messages.AskStatus())
    process.receive()
    pumps: list[None] = []
    monkeypatch.setattr(process.simulator.core, "pump", lambda: pumps.append(None) or [])  # type: ignore[func-returns-value]
    assert not threading.Event().wait(0.3)
    assert len(pumps) <= 3  # the one under way, and more if the machine stood still


def test_a_wakeup_outlives_many_wakes() -> None:
    wakeup = Wakeup()
    poller = zmq.Poller()
    poller.register(wakeup.fileno(), zmq.POLLIN)
    for _ in range(100_000):
        wakeup.wake()
    assert poller.poll(0)
    wakeup.clear()
    assert not poller.poll(0)


def test_an_engine_that_lost_its_device_ends_even_where_closing_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    exits: list[int] = []
    ended_hard = threading.Event()

    def end(code: int) -> None:
        exits.append(code)
        ended_hard.set()

    def close() -> None:
        assert ended_hard.wait(60), "the core does not let itself be closed"

    lost = EngineError("the device is lost; the engine must be started again")
    core = Mock(num_steps=0, pump=Mock(side_effect=lost), close=close)

    parts = Mock(core=core, ready=demo_ready())
    monkeypatch.setattr(worker, "build_engine", lambda *_, **__: parts)
    monkeypatch.setattr(worker, "_tune_interpreter", lambda _: None)
    monkeypatch.setattr(worker, "EXIT_GRACE_S", 0.01)
    monkeypatch.setattr("os._exit", end)
    launch = messages.Launch(Config(model=ModelConfig(path="m")), f"ipc://{tmp_path}/s", 0)
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.set(zmq.LINGER, 0)
        socket.connect(launch.address)
        assert worker._serve(launch, socket, Wakeup(), threading.Event(), Mock()) == 1
    assert exits == [1]
    assert "the device is lost" in caplog.text


@pytest.mark.parametrize(("device", "interval_s"), [("cpu", None), ("cuda:0", 5e-4)])
def test_beside_a_gpu_loading_threads_hand_the_interpreter_over_sooner(
    device: str, interval_s: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_interval = Mock()
    monkeypatch.setattr("gc.freeze", Mock())
    monkeypatch.setattr("gc.set_threshold", Mock())
    monkeypatch.setattr("sys.setswitchinterval", set_interval)
    worker._tune_interpreter(device)
    assert [call.args for call in set_interval.call_args_list] == (
        [] if interval_s is None else [(interval_s,)]
    )


def test_a_process_whose_server_ended_before_its_launch_ends_in_silence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(worker, "signal", Mock())
    monkeypatch.setattr(sys, "stdin", Mock(buffer=io.BytesIO()))
    assert worker.main() == 0
    assert capsys.readouterr() == ("", "")
