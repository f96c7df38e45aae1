"""One HTTP request's generations, run side by side and merged: n choices, many prompts, one stream of steps.

Works on any `Engine`. Knows neither JSON nor usage.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass

from weft.engine.request import GenerationRequest, RequestOutput
from weft.engine.text import TextDelta, TextStream
from weft.errors import EngineError, EngineUnavailableError
from weft.server.errors import from_engine
from weft.server.prompts import Prompt
from weft.server.services import Engine


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Choice:
    """One generation among those of a request."""

    index: int
    """Place in the response's `choices`."""
    prompt_index: int
    prompt: Prompt
    request: GenerationRequest
    text: TextStream


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What one output of the engine adds to a choice."""

    choice: Choice
    output: RequestOutput
    delta: TextDelta
    num_tokens: int
    """Tokens of the choice delivered up to and with this step."""


class Generation:
    """Runs the choices and yields their steps as they come.

    Use as an async context manager: leaving it aborts whatever still runs.
    """

    def __init__(self, engine: Engine, choices: Sequence[Choice]) -> None:
        self.choices = tuple(choices)
        self._engine = engine
        self._arrived: asyncio.Queue[Step | BaseException | None] = asyncio.Queue()
        self._cut: BaseException | None = None
        self._pumps: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Generation:
        by_request: dict[str, list[Choice]] = {}
        for choice in self.choices:
            by_request.setdefault(choice.request.request_id, []).append(choice)
        for choices in by_request.values():
            pump = asyncio.create_task(self._pump(choices))
            pump.add_done_callback(self._note_failure)
            self._pumps.append(pump)
        return self

    async def __aexit__(self, *_: object) -> None:
        for pump in self._pumps:
            pump.cancel()
        await asyncio.gather(*self._pumps, return_exceptions=True)

    def cut(self, error: BaseException) -> None:
        """End the stream of steps with `error`, at once; later calls change nothing."""
        if self._cut is None:
            self._cut = error
            self._arrived.put_nowait(None)

    async def steps(self) -> AsyncIterator[Step]:
        """Steps of all choices in order of arrival, until every choice has finished.

        Raises:
            WeftError: The engine refused or lost a choice.
        """
        unfinished = len(self.choices)
        while unfinished:
            arrived = await self._arrived.get()
            if self._cut is not None:
                raise self._cut
            if isinstance(arrived, BaseException):
                raise arrived
            if arrived is None:
                continue
            unfinished -= arrived.delta.finish_reason is not None
            yield arrived

    async def _pump(self, choices: Sequence[Choice]) -> None:
        """Pass on what the engine says of one request: of one choice, or of all that a beam search ends with."""
        async with aclosing(_as_generator(self._engine.generate(choices[0].request))) as outputs:
            async for output in outputs:
                if output.error is not None:
                    raise from_engine(output.error)
                if output.finish_reason == "error":
                    raise EngineError("The engine ended the request without a reason.")
                if output.finish_reason == "abort":
                    raise EngineUnavailableError("The engine gave the request up; send it again.")
                for choice, part in zip(choices, output.hypotheses or [output], strict=True):
                    delta = choice.text.push(part)
                    self._arrived.put_nowait(
                        Step(choice=choice, output=part, delta=delta, num_tokens=choice.text.num_tokens)
                    )
                if all(choice.text.is_finished for choice in choices):
                    return
        raise EngineUnavailableError("The engine stopped before the request was finished; send it again.")

    def _note_failure(self, pump: asyncio.Task[None]) -> None:
        if not pump.cancelled() and (error := pump.exception()) is not None:
            self._arrived.put_nowait(error)


async def _as_generator(outputs: AsyncIterator[RequestOutput]) -> AsyncGenerator[RequestOutput, None]:
    """Pass outputs on, and close their source when closed."""
    try:
        async for output in outputs:
            yield output
    finally:
        close = getattr(outputs, "aclose", None)
        if close is not None:
            await close()
