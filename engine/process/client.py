"""The engine as the server sees it: another process, which is kept alive and answers asynchronously.

Knows neither HTTP nor text. All methods belong to one event loop.
"""

from __future__ import annotations

import asyncio
import copy
import itertools
import logging
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from typing import cast

import msgspec
import zmq

from manylora.adapters.blobs.memory import MemoryPlace
from manylora.adapters.ref import AdapterRef
from manylora.config import Config, Device, Dtype
from manylora.engine.process import messages
from manylora.engine.process.inbox import Inbox
from manylora.engine.process.supervisor import (
    CRASH_LOOP_DEATHS,
    CRASH_LOOP_DELAY_S,
    CRASH_LOOP_LIFE_S,
    EngineConnection,
    RestartPolicy,
    problem_during,
)
from manylora.engine.process.worker_process import (
    SILENT_S,
    STUCK_S,
    STUCK_STEPS,
    StallDetector,
    Worker,
)
from manylora.engine.request import GenerationRequest, RequestOutput
from manylora.engine.status import EngineLoad, EngineReady, EngineStatus, PauseMode
from manylora.errors import EngineUnavailableError, ManyloraError

logger = logging.getLogger(__name__)

PAUSE = "pause"
REQUESTS_A_ROUND = 8
"""Number of requests whose outputs are passed on in one round of the event loop."""


class EngineClient:
    """Starts the engine process, restarts it if it dies or stalls, and carries requests and outputs.

    Args:
        config: All settings.
        announce: Called with lines of progress for people.
        worker: A process that waits for its launch, which becomes the first engine.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        config: Config,
        *,
        announce: Callable[[str], None],
        worker: Worker | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._worker = worker
        self._announce = announce
        self._policy = RestartPolicy(clock)
        self._clock = clock
        self._connection: EngineConnection | None = None
        self._supervision: asyncio.Task[None] | None = None
        self._streams: dict[
            str, tuple[AdapterRef | None, Inbox[RequestOutput | ManyloraError]]
        ] = {}
        """Adapter and outputs of each open request."""
        self._queries: deque[asyncio.Future[EngineStatus]] = deque()
        """Callers of `status`, in the order in which the engine answers them."""
        self._standing: dict[str, messages.ToEngine] = {}
        """Messages that a restarted engine gets again: pins by digest, weights by the digest of their blob, a pause."""
        self._start_s = 1.0
        self._first: EngineReady | None = None
        """Report of the first engine. Every later engine must serve the same model on the same kind of device."""
        self._down = EngineUnavailableError("The engine has not been started.")
        self.ready: EngineReady | None = None
        """Report of the engine when it became ready; None while it is down."""
        self.load: EngineLoad | None = None
        """Last load that the engine reported; None while it is down and before it has worked."""
        self.restarts = 0
        """Number of times that the engine became ready again after it died."""

    @property
    def pid(self) -> int | None:
        """Process id of the engine; None while it is down."""
        return self._connection.pid if self._connection else None

    async def start(self) -> EngineReady:
        """Start the engine, and keep it alive from then on. Returns when the model is loaded.

        Raises:
            ConfigError: A setting is wrong, for example the model's path.
            EngineUnavailableError: The engine ended before it was ready.
        """
        connection, ready = await self._launch()
        self._supervision = asyncio.create_task(self._supervise(connection))
        return ready

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[RequestOutput, None]:
        """Outputs of a request, the last one with `finish_reason`. Closing the iterator aborts the request.

        A refusal is an output with `finish_reason` "error".

        Raises:
            EngineUnavailableError: The engine is down, or died during the request.
        """
        connection = self._connected()
        outputs: Inbox[RequestOutput | ManyloraError] = Inbox()
        self._streams[request.request_id] = (request.adapter, outputs)
        is_over = False
        try:
            connection.send(messages.Submit(request))
            while True:
                for output in await outputs.take():
                    is_over = isinstance(output, ManyloraError) or output.finish_reason is not None
                    if isinstance(output, ManyloraError):
                        raise output
                    yield output
                    if is_over:
                        return  # later items are dropped, such as the death of the engine
        finally:
            del self._streams[request.request_id]
            if not is_over:
                self.abort(request.request_id)

    def abort(self, request_id: str) -> None:
        """End a request. Its iterator ends with `finish_reason` "abort". Unknown ids and a dead engine are no error."""
        self._tell(messages.Abort(request_id))

    def uses(self, weights_sha256: str) -> bool:
        """True if a request that has not ended may still need to load these weights."""
        return any(
            adapter is not None and adapter.weights_sha256 == weights_sha256
            for adapter, _ in self._streams.values()
        )

    async def status(self, *, is_detailed: bool = False) -> EngineStatus:
        """Ask for a snapshot; a detailed one has `page_map` and `batches`.

        Raises:
            EngineUnavailableError: The engine is down, or died before it answered.
        """
        self._connected().send(messages.AskStatus(is_detailed))
        answer: asyncio.Future[EngineStatus] = asyncio.get_running_loop().create_future()
        self._queries.append(answer)
        return await answer

    async def drop_adapter(self, digest: str) -> None:
        """Tell the engine to forget a deleted adapter. A dead engine has nothing to forget."""
        self._standing.pop(digest, None)
        self._tell(messages.DropAdapter(digest))

    async def pin_adapter(self, ref: AdapterRef, is_pinned: bool) -> None:
        """Pin or unpin an adapter; a restarted engine is told again."""
        message = messages.PinAdapter(ref, is_pinned)
        self._standing.pop(ref.digest, None)
        if is_pinned:
            self._standing[ref.digest] = message
        self._tell(message)

    @property
    def is_paused(self) -> bool:
        """True if the engine was told to pause."""
        return PAUSE in self._standing

    def pause(self, mode: PauseMode, *, is_ending: bool = False) -> None:
        """Pause the engine until it is resumed; `is_ending` ends all its requests with an error.

        Raises:
            EngineUnavailableError: The engine is down; nothing has changed.
        """
        self._connected().send(messages.Pause(mode, is_ending))
        self._standing[PAUSE] = messages.Pause(mode)

    def resume(self) -> None:
        """Resume the engine. One that starts later is not paused."""
        self._standing.pop(PAUSE, None)
        self._tell(messages.Pause(None))

    def reset_prefix_cache(self) -> None:
        """Drop the cached KV that no request uses.

        Raises:
            EngineUnavailableError: The engine is down.
        """
        self._connected().send(messages.ResetPrefixCache())

    async def take_weights(self, ref: AdapterRef, place: MemoryPlace) -> None:
        """Give the engine weights that are in no store, for host memory. A restarted engine gets them again.

        Args:
            ref: A version with these weights.
            place: Place of the bytes in this process, which stays open until `drop_weights`.
        """
        message = self._standing[ref.weights_sha256] = messages.TakeWeights(ref, place)
        self._tell(message)

    async def drop_weights(self, weights_sha256: str) -> None:
        """Tell the engine to forget weights that are in no store."""
        self._standing.pop(weights_sha256, None)
        self._tell(messages.DropWeights(weights_sha256))

    async def close(self) -> None:
        """End the engine. Open requests get EngineUnavailableError."""
        if self._supervision is not None:
            self._supervision.cancel()
            with suppress(asyncio.CancelledError):
                await self._supervision
            self._supervision = None
        connection = self._connection
        self._go_down(
            EngineUnavailableError("The engine is shutting down.", code="server.draining")
        )
        if connection is not None:
            await connection.close()

    def _connected(self) -> EngineConnection:
        if self._connection is None:
            raise copy.copy(self._down)
        return self._connection

    def _tell(self, message: messages.ToEngine) -> None:
        if self._connection is not None:
            with suppress(EngineUnavailableError):
                self._connection.send(message)

    async def _launch(self) -> tuple[EngineConnection, EngineReady]:
        """Start a process, and send requests to it once it is ready."""
        self._announce(f"manylora: loading model {self._config.model.path} ...")
        started_s = self._clock()
        connection = EngineConnection(self._config, self._worker)
        self._worker = None
        try:
            first = await connection.start()
            self._settle_on(first.ready)
        except BaseException:
            await connection.kill()
            raise
        self._policy.became_ready()
        self._start_s = max(self._clock() - started_s, 1.0)
        self._announce(f"manylora: {first.memory_plan}")
        self._announce(f"manylora: engine ready after {self._start_s:.1f} s")
        self._connection = connection
        self.ready = first.ready
        for message in self._standing.values():
            self._tell(message)
        return connection, first.ready

    def _settle_on(self, ready: EngineReady) -> None:
        """Fix device and formats of later engines to those of the first, and refuse another model.

        With `auto`, an engine that has lost its GPU would come back on the CPU, far slower and with another dtype.
        """
        if self._first is None:
            self._first = ready
            device = cast("Device", ready.device.partition(":")[0])
            dtype = cast("Dtype", ready.dtype)
            model = replace(
                self._config.model, device=device, dtype=dtype, weights=ready.memory.weights
            )
            self._config = replace(self._config, model=model)
        elif (ready.base, ready.geometry) != (self._first.base, self._first.geometry):
            raise EngineUnavailableError(
                "The model's files have changed; restart the server to serve them."
            )

    async def _supervise(self, connection: EngineConnection) -> None:
        """Read from the engine until it dies, end all open requests, start another engine, and repeat."""
        while True:
            problem = await self._read_until_over(connection)
            logger.error("the engine process %s %s", connection.pid, problem)
            delay_s = self._note_death(
                "The engine stopped and is being restarted; send the request again."
            )
            await connection.kill()
            connection = await self._relaunch(delay_s)
            self.restarts += 1

    async def _relaunch(self, delay_s: float) -> EngineConnection:
        while True:
            await asyncio.sleep(delay_s)
            try:
                return (await self._launch())[0]
            except (ManyloraError, OSError, zmq.ZMQError, msgspec.DecodeError) as error:
                # A machine that lacks processes, files or memory for a while must not end the supervision.
                logger.error("the engine did not start again: %s", error)  # noqa: TRY400 - its message says all
                delay_s = self._note_death("The engine does not start; its log says why.")

    def _note_death(self, message: str) -> float:
        """End all open requests with an error, and return the seconds to wait before the next start."""
        delay_s = self._policy.died()
        if self._policy.is_crash_loop:
            message = (
                f"The engine stopped {CRASH_LOOP_DEATHS} times or more, each time before it was ready for "
                f"{CRASH_LOOP_LIFE_S:.0f} s; it is started again every {CRASH_LOOP_DELAY_S:.0f} s."
            )
        self._announce(f"manylora: {message}")
        self._go_down(EngineUnavailableError(message, retry_after_s=delay_s + self._start_s))
        return delay_s

    def _go_down(self, error: EngineUnavailableError) -> None:
        self._connection = None
        self.ready = None
        self.load = None
        self._down = error
        # One object raised in several tasks would join their tracebacks.
        for _, outputs in self._streams.values():
            outputs.put(copy.copy(error))
        for answer in self._queries:
            if not answer.done():
                answer.set_exception(copy.copy(error))
        self._queries.clear()

    async def _read_until_over(self, connection: EngineConnection) -> str:
        """Read until the engine has ended or stalls, and return what happened. A stalled process still lives."""
        reading = asyncio.create_task(self._read(connection))
        try:
            problem = await problem_during(
                reading, connection, StallDetector(SILENT_S, self._stuck_s())
            )
            if reading.done():
                logger.error(
                    "reading from the engine failed; it is ended", exc_info=reading.exception()
                )
            return problem or "could not be read from"
        finally:
            reading.cancel()
            await asyncio.wait([reading])  # it passes on the outputs that have come

    def _stuck_s(self) -> float:
        """Seconds without the end of a step after which the engine counts as stuck: many times its longest step."""
        step_s = self._first.memory.step_tokens * self._first.token_s if self._first else 0.0
        return max(STUCK_S, STUCK_STEPS * step_s)

    async def _read(self, connection: EngineConnection) -> None:
        """Pass outputs on: first tokens at once, others of a few requests in each round of the event loop.

        Each output is a write to a client's socket. A request that arrives meanwhile takes several rounds to get to the
        engine, and would wait in each round for all outputs of that round. Outputs of one stream that come while others
        are passed on wait together: a server that is behind writes several tokens of a stream at once.
        """
        current: dict[str, list[RequestOutput]] = {}
        following: dict[str, list[RequestOutput]] = {}
        num_current = num_following = 0
        try:
            while True:
                message = (
                    connection.receive_now()
                    if num_current or num_following
                    else await connection.receive()
                )
                while message is not None:
                    if isinstance(message, messages.Outputs):
                        num_following += 1
                        for output in message.outputs:
                            if output.queue_s is not None:
                                self._pass_on([output])
                            else:
                                following.setdefault(output.request_id, []).append(output)
                    else:
                        self._take(message)
                    message = connection.receive_now()
                if not num_current:
                    current, following, num_current, num_following = following, {}, num_following, 0
                for request_id in list(itertools.islice(current, REQUESTS_A_ROUND)):
                    self._pass_on(current.pop(request_id))
                await asyncio.sleep(0)
                if num_current and not current:
                    self._tell(messages.Taken(num_current))
                    num_current = 0
        finally:  # outputs that came before the death of the engine are passed on too
            for outputs in (*current.values(), *following.values()):
                self._pass_on(outputs)

    def _pass_on(self, outputs: Iterable[RequestOutput]) -> None:
        for output in outputs:
            stream = self._streams.get(output.request_id)
            if stream is not None:
                stream[1].put(output)

    def _take(self, message: messages.FromEngine) -> None:
        match message:
            case messages.Load(load=load):
                self.load = load
            case messages.Status(status=status):
                answer = self._queries.popleft()
                if not answer.done():  # its caller may have been cancelled
                    answer.set_result(status)
            case _:
                logger.error("the engine said %s out of turn", type(message).__name__)
