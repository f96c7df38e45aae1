"""The engine process: `python -P -m manylora.engine.process.worker`, started by the client, driven over ZeroMQ.

The first line on standard input is the launch. Standard input then stays open. The process ends when it ends, so no
engine outlives its parent. SIGINT and SIGTERM are ignored: the parent drains, then closes the engine.
"""

from __future__ import annotations

import gc
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec
import zmq

from manylora.adapters.blobs.memory import MemoryBlobs, MemoryPlace
from manylora.adapters.ref import AdapterRef
from manylora.engine.build import build_engine
from manylora.engine.core import EngineCore
from manylora.engine.execution.memory_plan import format_plan
from manylora.engine.process import messages
from manylora.engine.process.worker_process import Heart, Pulse
from manylora.engine.request import GenerationRequest, RequestOutput, error_info
from manylora.errors import ConfigError, ManyloraError


class Wakeup:
    """A count that wakes the poll of the same process."""

    def __init__(self) -> None:
        self._fd = os.eventfd(0, os.EFD_NONBLOCK)

    def fileno(self) -> int:
        """Descriptor to poll for reading."""
        return self._fd

    def wake(self) -> None:
        """Make the descriptor readable. Any thread may call it."""
        os.eventfd_write(self._fd, 1)

    def clear(self) -> None:
        """Drop all wakeups so far."""
        with suppress(BlockingIOError):
            os.eventfd_read(self._fd)


logger = logging.getLogger("manylora.engine")

IDLE_POLL_MS = 1000
"""Longest sleep without requests. The engine wakes to finish loads that nobody waits for."""
BLOCKED_POLL_MS = 20
"""Longest sleep with requests of which none can be computed. Finished loads wake the engine at once."""
LOAD_PERIOD_S = 0.1
"""Period of the load reports while the engine works, in seconds."""
MAX_STEPS_AHEAD = 4
"""Largest number of steps whose outputs wait for the client (back-pressure). Outputs are passed on while the next steps
are computed. Without a bound, outputs pile up before the client, and the first token of a tenant with few requests
waits behind all of them."""
EXIT_GRACE_S = 5.0
"""Seconds for a soft end after standard input ended or the engine failed; then the process ends hard."""
GPU_SWITCH_INTERVAL_S = 5e-4
"""Longest time for which a loading thread may keep the interpreter while the engine's thread waits. Python's default of
5 ms is a whole step of a GPU. On a CPU steps take longer, and the C++ kernels do not need the interpreter."""


@dataclass(eq=False)
class EngineLoop:
    """Reads messages, pumps the core, and sends a message of outputs per step, at most `MAX_STEPS_AHEAD` ahead."""

    core: EngineCore
    memory: MemoryBlobs
    """Memory for weights that are in no store."""
    socket: zmq.Socket[bytes]
    """Socket to the client."""
    wakeup: Wakeup
    """Wakes the loop when a load is done or the parent is gone."""
    parent_gone: threading.Event

    def __post_init__(self) -> None:
        self._poller = zmq.Poller()
        self._poller.register(self.socket, zmq.POLLIN)
        self._poller.register(self.wakeup.fileno(), zmq.POLLIN)
        self._next_load_s = 0.0
        self._is_idle_reported = True
        self._num_ahead = 0
        """Number of messages of outputs that the client has not passed on."""
        self._num_rounds = 0
        self._refusals: list[RequestOutput] = []
        """Refusals of the requests that came in this round."""
        self._actions: dict[type[messages.ToEngine], Callable[..., None]] = {
            messages.Submit: self._submit,
            messages.Abort: self.core.abort,
            messages.AskStatus: self._send_status,
            messages.Pause: self.core.pause,
            messages.ResetPrefixCache: self.core.reset_prefix_cache,
            messages.Taken: self._note_taken,
            messages.DropAdapter: self.core.residency.forget,
            messages.PinAdapter: self.core.residency.pin,
            messages.TakeWeights: self._take_weights,
            messages.DropWeights: self.memory.delete,
        }
        """Actions by message; each takes the fields of its message."""

    def turns(self) -> int:
        """Number of turns: rounds, and compiled kernels that a step waited for. Any thread may ask."""
        return self._num_rounds + self.core.num_compiles

    def run(self) -> None:
        """Serve until the client closes the standard input, or is gone."""
        timeout_ms = 0
        while True:
            self._num_rounds += 1
            self._poller.poll(timeout_ms)
            self.wakeup.clear()
            self._read()
            if self.parent_gone.is_set():
                return
            steps_before = self.core.num_steps
            outputs = self._refusals
            self._refusals = []
            if not self._is_too_far_ahead():
                outputs += self.core.pump()
            if outputs:
                self._send(messages.Outputs(outputs=outputs))
                self._num_ahead += 1
            self._report_load()
            timeout_ms = BLOCKED_POLL_MS if self.core.has_work() else IDLE_POLL_MS
            if self.core.num_steps > steps_before and not self._is_too_far_ahead():
                timeout_ms = 0

    def _is_too_far_ahead(self) -> bool:
        return self._num_ahead >= MAX_STEPS_AHEAD

    def _report_load(self) -> None:
        """Send the load every `LOAD_PERIOD_S` while there is work, and once when there is no more."""
        has_work = self.core.has_work()
        now_s = time.monotonic()
        if (now_s >= self._next_load_s) if has_work else not self._is_idle_reported:
            self._send(messages.Load(self.core.load()))
            self._next_load_s = now_s + LOAD_PERIOD_S
        self._is_idle_reported = not has_work

    def _read(self) -> None:
        """Act on all messages that have come."""
        while True:
            try:
                message = messages.decode_to_engine(self.socket.recv(zmq.NOBLOCK))
            except zmq.Again:
                return
            except (msgspec.DecodeError, ManyloraError):
                logger.exception("a message could not be read and was passed over")
                continue
            self._actions[type(message)](*msgspec.structs.astuple(message))

    def _submit(self, request: GenerationRequest) -> None:
        try:
            self.core.submit(request)
        except ManyloraError as error:
            self._refusals.append(
                RequestOutput(
                    request_id=request.request_id, finish_reason="error", error=error_info(error)
                )
            )

    def _send_status(self, is_detailed: bool) -> None:
        self._send(messages.Status(self.core.status(is_detailed=is_detailed)))

    def _note_taken(self, count: int) -> None:
        self._num_ahead -= count

    def _take_weights(self, ref: AdapterRef, place: MemoryPlace) -> None:
        try:
            self.memory.adopt(ref.weights_sha256, place)
        except OSError:  # the version was withdrawn meanwhile
            logger.warning("the weights %s are gone", ref.weights_sha256)
            return
        self.core.residency.warm(ref)

    def _send(self, message: messages.FromEngine) -> None:
        self.socket.send(messages.encode(message), zmq.NOBLOCK)


def main() -> int:
    """Run the process, and return its exit code."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    logging.basicConfig(
        stream=sys.stderr,
        level=logging.INFO,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
    )
    line = sys.stdin.buffer.readline(messages.MAX_LAUNCH_BYTES)
    if not line:  # the server ended before it had an engine
        return 0
    launch = messages.decode_launch(line)
    heart = Heart(Pulse(launch.pulse_fd))
    heart.start()
    wakeup = Wakeup()
    parent_gone = threading.Event()
    threading.Thread(
        target=_watch_parent, args=(wakeup, parent_gone), name="parent-watch", daemon=True
    ).start()
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.set(zmq.LINGER, 1000)
        socket.set(zmq.SNDHWM, 0)
        socket.set(zmq.RCVHWM, 0)
        socket.set(zmq.MAXMSGSIZE, messages.MAX_MESSAGE_BYTES)
        socket.connect(launch.address)
        try:
            return _serve(launch, socket, wakeup, parent_gone, heart)
        finally:
            if parent_gone.is_set():
                _remove_socket(launch.address)


def _serve(
    launch: messages.Launch,
    socket: zmq.Socket[bytes],
    wakeup: Wakeup,
    parent_gone: threading.Event,
    heart: Heart,
) -> int:
    try:
        parts = build_engine(launch.config, notify=wakeup.wake)
    except ManyloraError as error:
        failed = messages.StartFailed(
            error.message, error.code, isinstance(error, ConfigError), error.param
        )
        socket.send(messages.encode(failed))
        return 2
    parts.grammar_tokens.prepare()  # done later, it would hold up all requests
    _tune_interpreter(parts.ready.device)
    loop = EngineLoop(parts.core, parts.memory, socket, wakeup, parent_gone)
    heart.turns = loop.turns
    ready = messages.Ready(
        ready=parts.ready, memory_plan=format_plan(parts.ready.memory, parts.ready)
    )
    socket.send(messages.encode(ready))
    try:
        loop.run()
    except Exception:
        logger.exception("the engine ends")
        # A lost device may never answer, and the parent waits for the end of this process.
        threading.Thread(target=_end_hard, name="end-hard", daemon=True).start()
        return 1
    finally:
        parts.core.close()
    return 0


def _tune_interpreter(device: str) -> None:
    gc.freeze()  # a full collection of the objects of torch and transformers would take 0.3 s
    gc.set_threshold(10_000, 20)  # few objects are in cycles
    if device.startswith("cuda"):
        sys.setswitchinterval(GPU_SWITCH_INTERVAL_S)


def _end_hard() -> None:
    """End the process after the time for a soft end."""
    threading.Event().wait(EXIT_GRACE_S)
    os._exit(1)


def _remove_socket(address: str) -> None:
    """Remove the socket and its folder, in case the parent died before it did."""
    path = Path(address.removeprefix("ipc://"))
    with suppress(OSError):
        path.unlink(missing_ok=True)
        path.parent.rmdir()


def _watch_parent(wakeup: Wakeup, parent_gone: threading.Event) -> None:
    """Wait for the end of standard input, then end the process softly, or hard if that takes too long."""
    while os.read(0, 4096):
        pass
    parent_gone.set()
    wakeup.wake()
    _end_hard()


if __name__ == "__main__":
    sys.exit(main())
