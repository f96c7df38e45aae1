"""The client's end of one engine process: a socket that listens, and the process that connects to it."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import zmq
import zmq.asyncio

from weft.config import Config
from weft.engine.process.messages import (
    MAX_MESSAGE_BYTES,
    Close,
    FromEngine,
    Ready,
    StartFailed,
    ToEngine,
    decode_from_engine,
    encode,
)
from weft.engine.process.supervisor import EngineProcess
from weft.errors import ConfigError, EngineUnavailableError

ASKED_S = 5.0
"""How long an engine has to end after it was asked to."""
ENDED_INPUT_S = 7.0
"""And after its standard input was closed."""
LAST_WORDS_S = 0.5
"""How long a message of a process that has ended may still be on its way."""


class EngineConnection:
    """Starts an engine process and speaks with it. Belongs to one event loop.

    Args:
        config: Settings of the engine.
    """

    def __init__(self, config: Config) -> None:
        self._loop = asyncio.get_running_loop()
        self.exited: asyncio.Future[int] = self._loop.create_future()
        """Done with the exit code when the process has ended."""
        self._process = EngineProcess(config, self._note_exit)
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.set(zmq.SNDHWM, 0)
        self._socket.set(zmq.RCVHWM, 0)
        self._socket.set(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        try:
            self._socket.bind(self._process.address)
        except zmq.ZMQError:
            self._context.destroy(linger=0)
            self._process.clean_up()
            raise

    @property
    def pid(self) -> int | None:
        """Process id of the engine."""
        return self._process.pid

    async def start(self) -> Ready:
        """Start the process and wait until it has loaded the model.

        Raises:
            ConfigError: A setting is wrong.
            EngineUnavailableError: It ended without being ready.
        """
        self._process.start()
        receiving = asyncio.ensure_future(self.receive())
        either: set[asyncio.Future[Any]] = {receiving, self.exited}
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if not receiving.done():
                await asyncio.wait({receiving}, timeout=LAST_WORDS_S)
            if not receiving.done():
                raise EngineUnavailableError(
                    f"The engine process ended while starting, with exit code {self.exited.result()}; its log says why."
                )
            first = receiving.result()
        finally:
            receiving.cancel()
        if isinstance(first, StartFailed):
            raise _start_error(first)
        if not isinstance(first, Ready):
            raise EngineUnavailableError(f"The engine's first word was {type(first).__name__}, not Ready.")
        return first

    async def receive(self) -> FromEngine:
        """The next message."""
        return decode_from_engine(await self._socket.recv())

    def receive_now(self) -> FromEngine | None:
        """The next message, if it is there already."""
        receiving = cast("asyncio.Future[bytes]", self._socket.recv(zmq.NOBLOCK))
        # Receiving without waiting is over when the call returns.
        return None if isinstance(receiving.exception(), zmq.Again) else decode_from_engine(receiving.result())

    def send(self, message: ToEngine) -> None:
        """Send without waiting.

        Raises:
            EngineUnavailableError: The engine is gone.
        """
        sending = cast("asyncio.Future[Any]", self._socket.send(encode(message), zmq.NOBLOCK))
        # Sending without waiting is over when the call returns.
        if isinstance(sending.exception(), zmq.ZMQError):
            raise EngineUnavailableError("The engine is gone; it is being restarted.")

    async def close(self) -> None:
        """Ask the process to end, then close its input, then kill it; returns when it is gone."""
        try:
            if not self.exited.done():
                try:
                    self.send(Close())
                    await self._has_exited(ASKED_S)
                except EngineUnavailableError:
                    pass
                self._process.end_input()
                await self._has_exited(ENDED_INPUT_S)
        finally:
            await self.kill()

    async def kill(self) -> None:
        """End the process now, if it still lives, and remove its traces."""
        if self._process.pid is not None and not self.exited.done():
            self._process.kill()
            await asyncio.shield(self.exited)
        self._context.destroy(linger=0)
        self._process.clean_up()

    def _note_exit(self, code: int) -> None:
        """Called from a thread of the process's own."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self.exited.set_result, code)

    async def _has_exited(self, timeout_s: float) -> None:
        await asyncio.wait({self.exited}, timeout=timeout_s)


def _start_error(failed: StartFailed) -> ConfigError | EngineUnavailableError:
    if failed.is_setting:
        return ConfigError(failed.message, code=failed.code, param=failed.param)
    return EngineUnavailableError(failed.message, code=failed.code, param=failed.param)
