"""One life of the engine process: the process, the connection to it, and the time of the next start."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
import threading
from collections.abc import Callable
from contextlib import suppress
from math import inf
from pathlib import Path
from typing import IO, Any, cast

import zmq
import zmq.asyncio

from manylora.config import Config
from manylora.engine.process import messages
from manylora.engine.process.worker_process import (
    LOOK_S,
    SILENT_START_S,
    StallDetector,
    Worker,
    start_worker,
)
from manylora.errors import ConfigError, EngineUnavailableError

SOCKET_NAME = "engine"
MAX_SOCKET_PATH = 100
"""Largest path of a socket's parent. The system takes 107 characters; the rest is for the folder's random part."""

CRASH_LOOP_DEATHS = 3
CRASH_LOOP_LIFE_S = 60.0
"""An engine that dies before it is ready, or within this time after that, has crashed."""
CRASH_LOOP_DELAY_S = 30.0
SECOND_DELAY_S = 1.0

ENDED_INPUT_S = 7.0
"""Grace period after closing standard input, in seconds."""
LAST_WORDS_S = 0.5
"""Longest wait for a last message of an ended process, in seconds."""


class EngineConnection:
    """An engine process, its private folder, and the socket to it.

    Belongs to one event loop.

    Args:
        config: Settings of the engine.
        worker: A process that waits for its launch; None starts one.
    """

    def __init__(self, config: Config, worker: Worker | None = None) -> None:
        self._config = config
        self._worker = worker or start_worker()
        self.pid = self._worker.process.pid
        """Process id of the engine."""
        self._loop = asyncio.get_running_loop()
        self.exited: asyncio.Future[int] = self._loop.create_future()
        """Exit code, once the process has ended."""
        self._folder = Path(tempfile.mkdtemp(prefix="manylora-", dir=_short_folder()))
        self.address = f"ipc://{self._folder / SOCKET_NAME}"
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.set(zmq.SNDHWM, 0)
        self._socket.set(zmq.RCVHWM, 0)
        self._socket.set(zmq.MAXMSGSIZE, messages.MAX_MESSAGE_BYTES)
        try:
            self._socket.bind(self.address)
        except zmq.ZMQError:
            self._clean_up()
            raise
        threading.Thread(target=self._wait_for_exit, name="engine-wait", daemon=True).start()

    async def start(self) -> messages.Ready:
        """Launch the process and wait until it has loaded the model.

        Raises:
            ConfigError: A setting is wrong.
            EngineUnavailableError: It ended or stalled before it was ready.
        """
        launch = messages.Launch(self._config, self.address, self._worker.pulse_fd)
        with suppress(BrokenPipeError):  # it died at once; its exit code tells that
            self._input.write(messages.encode_launch(launch))
            self._input.flush()
        receiving = asyncio.ensure_future(self.receive())
        try:
            problem = await problem_during(receiving, self, StallDetector(SILENT_START_S, inf))
            await asyncio.wait({receiving}, timeout=LAST_WORDS_S)
            if not receiving.done():
                raise EngineUnavailableError(
                    f"The engine process {problem} while starting; its log says why."
                )
            first = receiving.result()
        finally:
            receiving.cancel()
        if isinstance(first, messages.StartFailed):
            kind = ConfigError if first.is_setting else EngineUnavailableError
            raise kind(first.message, code=first.code, param=first.param)
        if not isinstance(first, messages.Ready):
            raise EngineUnavailableError(
                f"The engine's first message was {type(first).__name__}, not Ready."
            )
        return first

    async def stall(self, detector: StallDetector) -> str:
        """Watch the process until it stalls, and return a sentence about that."""
        problem = None
        while problem is None:
            await asyncio.sleep(LOOK_S)
            problem = detector.problem(self._worker.pulse.signs(self.pid))
        return problem

    async def receive(self) -> messages.FromEngine:
        """Receive the next message."""
        return messages.decode_from_engine(await self._socket.recv())

    def receive_now(self) -> messages.FromEngine | None:
        """Receive the next message if it has come already."""
        receiving = cast("asyncio.Future[bytes]", self._socket.recv(zmq.NOBLOCK))
        # A receive without waiting is complete when the call returns.
        return (
            None
            if isinstance(receiving.exception(), zmq.Again)
            else messages.decode_from_engine(receiving.result())
        )

    def send(self, message: messages.ToEngine) -> None:
        """Send without waiting.

        Raises:
            EngineUnavailableError: The engine is gone.
        """
        sending = cast(
            "asyncio.Future[Any]", self._socket.send(messages.encode(message), zmq.NOBLOCK)
        )
        # A send without waiting is complete when the call returns.
        if isinstance(sending.exception(), zmq.ZMQError):
            raise EngineUnavailableError("The engine is gone; it is being restarted.")

    async def close(self) -> None:
        """Close the input of the process, which ends it, or else kill it. Returns when it is gone."""
        try:
            self._end_input()
            await asyncio.wait({self.exited}, timeout=ENDED_INPUT_S)
        finally:
            await self.kill()

    async def kill(self) -> None:
        """End the process now if it still lives, and remove its files."""
        if not self.exited.done():
            self._worker.process.kill()
            await asyncio.shield(self.exited)
        self._clean_up()

    def _wait_for_exit(self) -> None:
        code = self._worker.process.wait()
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self.exited.set_result, code)

    @property
    def _input(self) -> IO[bytes]:
        return cast("IO[bytes]", self._worker.process.stdin)

    def _end_input(self) -> None:
        """Close the standard input of the process, so that it ends softly within seconds."""
        with suppress(BrokenPipeError):
            self._input.close()

    def _clean_up(self) -> None:
        """Remove the files of an ended process."""
        self._context.destroy(linger=0)
        self._end_input()
        shutil.rmtree(self._folder, ignore_errors=True)


async def problem_during(
    reading: asyncio.Future[Any], connection: EngineConnection, detector: StallDetector
) -> str | None:
    """Wait for the end of `reading`, and return None; or say what happened if the process ends or stalls before."""
    watching = asyncio.ensure_future(connection.stall(detector))
    any_of: set[asyncio.Future[Any]] = {reading, watching, connection.exited}
    try:
        await asyncio.wait(any_of, return_when=asyncio.FIRST_COMPLETED)
        if connection.exited.done():
            return f"ended with exit code {connection.exited.result()}"
        return None if reading.done() else watching.result()
    finally:
        watching.cancel()


class RestartPolicy:
    """Decides when to start again: at once, then after a second, and every half minute if it keeps dying.

    The life of an engine begins when it is ready, because loading a model may take minutes.

    Args:
        clock: Monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._num_deaths = 0
        """Number of deaths in a row, without a life longer than `CRASH_LOOP_LIFE_S` between them."""
        self._ready_s: float | None = None
        """Time at which the living engine became ready; None while none is ready."""

    @property
    def is_crash_loop(self) -> bool:
        """True if it died too often, with a too short life each time."""
        return self._num_deaths >= CRASH_LOOP_DEATHS

    def became_ready(self) -> None:
        """Note that an engine is ready."""
        self._ready_s = self._clock()

    def died(self) -> float:
        """Note a death, and return the seconds to wait before the next start."""
        if self._ready_s is not None and self._clock() - self._ready_s > CRASH_LOOP_LIFE_S:
            self._num_deaths = 0
        self._ready_s = None
        self._num_deaths += 1
        return (0.0, SECOND_DELAY_S, CRASH_LOOP_DELAY_S)[
            min(self._num_deaths, CRASH_LOOP_DEATHS) - 1
        ]


def _short_folder() -> str:
    folder = tempfile.gettempdir()
    if len(folder) + len("/manylora-12345678/") + len(SOCKET_NAME) <= MAX_SOCKET_PATH:
        return folder
    return "/tmp"  # noqa: S108
