"""One HTTP request's generations, run side by side and merged: n choices, many prompts, one stream of steps.

Knows neither JSON nor usage.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from itertools import groupby
from typing import TYPE_CHECKING

from manylora.adapters.ref import AdapterRef
from manylora.engine.process.inbox import Inbox
from manylora.engine.request import FlowKey, GenerationRequest, RequestOutput
from manylora.engine.text.text_stream import NONE_SHOWN, TextDelta, TextStream
from manylora.errors import EngineError, EngineUnavailableError
from manylora.server.errors import from_engine
from manylora.server.generation.prompts import Prompt, Prompts
from manylora.server.generation.schemas import GenerationBody
from manylora.server.limits.gate import Admission
from manylora.server.process.threads import cancel_all

if TYPE_CHECKING:
    from manylora.engine.text.tokenizer import Tokenizer
    from manylora.server.core_services import Engine


def best_choices(candidates: Sequence[Choice], steps: Iterable[ChoiceStep], n: int) -> list[Choice]:
    """The `n` candidates of each prompt with the highest log-probability per token, best first.

    Candidates of a beam search come best first by its own score. Where there are no more than `n`, all are returned as
    they are.

    Args:
        candidates: Prompt by prompt.
        steps: All of them, with log-probabilities where there are more candidates than `n`.
        n: How many of each prompt.
    """
    logprobs = defaultdict[int, list[float]](list)
    for step in steps:
        logprobs[step.choice.index] += (entry.logprob for entry in step.delta.logprobs or ())

    def mean(choice: Choice) -> float:
        own = logprobs[choice.index]
        return sum(own) / max(len(own), 1)

    best: list[Choice] = []
    for _, group in groupby(candidates, key=lambda choice: choice.prompt_index):
        of_prompt = list(group)
        if len(of_prompt) > n and of_prompt[0].request.beam is None:
            of_prompt.sort(key=mean, reverse=True)
        best += of_prompt[:n]
    return best


LAST_OUTPUT_S = 10.0
"""Longest wait for the last outputs of aborted requests. The engine sends them after the step that it computes."""


@dataclass(slots=True, kw_only=True, eq=False)
class Choice:
    """One generation among those of a request, and what the engine has computed for it so far."""

    index: int
    """Place in the response's `choices`."""
    prompt_index: int
    prompt: Prompt
    request: GenerationRequest
    text: TextStream
    """The output. It has no tokens after a stop string."""
    prompt_tokens: int = 0
    """Computed tokens of the prompt, the cached ones included; all of them once a token of output has come."""
    cached_tokens: int = 0
    """Tokens of the prompt that were taken from the prefix cache."""
    reasoning_tokens: int = 0
    """Tokens of output that were reasoning."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceStep:
    """An output of the engine, and the text that it adds to a choice."""

    choice: Choice
    output: RequestOutput
    delta: TextDelta
    num_tokens: int
    """Tokens of the choice delivered up to and with this step."""


def choices_of(
    body: GenerationBody,
    prompts: Prompts,
    tokenizer: Tokenizer,
    ledger_id: str,
    adapter: AdapterRef | None,
    flow: FlowKey,
) -> list[Choice]:
    """All candidates; those of a beam search have one request.

    Args:
        body: The number of candidates, and how they are searched.
        prompts: Each has its own candidates.
        tokenizer: Turns their tokens into text.
        ledger_id: Ids of the engine's requests begin with it.
        adapter: None is the base.
        flow: The place of the requests in the engine's order.
    """
    choices = []
    beam = body.beam
    count = body.num_candidates
    for prompt_index, prompt in enumerate(prompts.prompts):
        shown_ids = prompt.answer.shown_ids if prompt.answer is not None else NONE_SHOWN
        first = prompt_index * count
        for choice_index in range(count):
            fork_index = 0 if beam is not None else choice_index
            request = GenerationRequest(
                request_id=f"{ledger_id}-{first + fork_index}",
                prompt_token_ids=prompt.token_ids,
                params=prompts.params,
                adapter=adapter,
                flow=flow,
                choice_index=fork_index,
                fork_of=f"{ledger_id}-{first}" if fork_index else None,
                beam=beam,
                grammar=prompts.grammar,
            )
            choices.append(
                Choice(
                    index=first + choice_index,
                    prompt_index=prompt_index,
                    prompt=prompt,
                    request=request,
                    text=TextStream(tokenizer, prompts.params, prompt.token_ids, shown_ids),
                )
            )
    return choices


@dataclass(eq=False)
class Generation:
    """Runs the choices and yields their steps as they come.

    Use as an async context manager: leaving it aborts whatever still runs.

    Args:
        engine: Computes them.
        choices: What to compute.
        may_grow: Asked before a choice goes on: whether the choices together may have this many tokens of output. Where
            they may not, the choice ends with `finish_reason` "length".
        admission: What the gate let in; None for work that passes around it.
    """

    engine: Engine
    choices: Sequence[Choice]
    may_grow: Callable[[int], bool] = lambda _: True
    admission: Admission | None = None

    def __post_init__(self) -> None:
        self._num_wanted = len(self.choices)
        """Tokens of output so far, and one more of each choice that has not finished."""
        self._arrived: Inbox[ChoiceStep | BaseException | None] = Inbox()
        self._cut: BaseException | None = None
        self._pumps: dict[str, asyncio.Task[None]] = {}
        """By request of the engine."""

    async def __aenter__(self) -> Generation:
        by_request: dict[str, list[Choice]] = {}
        for choice in self.choices:
            by_request.setdefault(choice.request.request_id, []).append(choice)
        for request_id, choices in by_request.items():
            pump = asyncio.create_task(self._pump(choices))
            pump.add_done_callback(self._note_failure)
            self._pumps[request_id] = pump
        return self

    async def __aexit__(self, *_: object) -> None:
        await cancel_all(self._pumps.values())

    def cut(self, error: BaseException) -> None:
        """End the stream of steps with `error`, at once; later calls change nothing."""
        if self._cut is None:
            self._cut = error
            self._arrived.put(None)

    async def abort(self) -> None:
        """End the choices that still run; then each has what was computed for it until it ended.

        Waits until the engine has said so, at most `LAST_OUTPUT_S` seconds. Of an engine that is dead or silent, the
        outputs that came before count.
        """
        for request_id, pump in self._pumps.items():
            if not pump.done():
                self.engine.abort(request_id)
        await asyncio.wait(self._pumps.values(), timeout=LAST_OUTPUT_S)

    async def steps(self) -> AsyncIterator[list[ChoiceStep]]:
        """Steps of all choices in order of arrival, those together that have arrived, until every choice has finished.

        Raises:
            ManyloraError: The engine refused or lost a choice.
        """
        unfinished = len(self.choices)
        while unfinished:
            arrived = await self._arrived.take()
            together = [each for each in arrived if isinstance(each, ChoiceStep)]
            if together and self._cut is None:
                unfinished -= sum(step.delta.finish_reason is not None for step in together)
                yield together
            if self._cut is not None:
                raise self._cut
            for each in arrived:
                if isinstance(each, BaseException):
                    raise each

    async def _pump(self, choices: Sequence[Choice]) -> None:
        """Pass on the engine's outputs for one request: one choice, or all choices of a beam search."""
        if self._cut is not None:
            return  # before the engine was asked
        has_started = False
        async with aclosing(self.engine.generate(choices[0].request)) as outputs:
            async for output in outputs:
                own = list(zip(choices, output.hypotheses or [output], strict=False))
                for choice, part in own:
                    self._note(choice, part)
                if output.finish_reason == "abort":
                    for choice, part in own:
                        choice.text.push(part)  # of a beam search, what its beams had
                self._check(output, has_started)
                if self.admission is not None and not has_started:
                    self.admission.started(output.queue_s)
                has_started = True
                for choice, part in own:
                    self._pass_on(choice, part)
                if all(choice.text.is_finished for choice in choices):
                    return
        raise EngineUnavailableError(
            "The engine stopped before the request was finished; send it again."
        )

    def _check(self, output: RequestOutput, has_started: bool) -> None:
        """Raise the error if the engine ended the request without finishing its answer."""
        if output.error is not None:
            error = from_engine(output.error)
            raise error if self.admission is None or has_started else self.admission.refused(error)
        if output.finish_reason == "error":
            raise EngineError("The engine ended the request without a reason.")
        if output.finish_reason == "abort":
            raise EngineUnavailableError("The engine gave up the request; send it again.")

    def _pass_on(self, choice: Choice, output: RequestOutput) -> None:
        delta = choice.text.push(self._within_limits(output))
        self._arrived.put(
            ChoiceStep(choice=choice, output=output, delta=delta, num_tokens=choice.text.num_tokens)
        )
        if delta.finish_reason is not None:
            self._num_wanted -= 1
            if self.admission is not None:
                prompt = choice.prompt_tokens
                self.admission.finished(
                    prompt - choice.cached_tokens, prompt, choice.text.num_tokens
                )

    def _note(self, choice: Choice, output: RequestOutput) -> None:
        choice.cached_tokens = choice.cached_tokens or output.cached_tokens
        if output.token_ids:
            choice.prompt_tokens = len(choice.prompt.token_ids)
        elif output.finish_reason is not None:
            choice.prompt_tokens = max(choice.prompt_tokens, output.computed_prompt_tokens)

    def _within_limits(self, output: RequestOutput) -> RequestOutput:
        """The output. It is the last of its choice if one more token per choice would exceed the limits."""
        self._num_wanted += len(output.token_ids)
        is_fine = output.finish_reason is not None or self.may_grow(self._num_wanted)
        return output if is_fine else replace(output, finish_reason="length")

    def _note_failure(self, pump: asyncio.Task[None]) -> None:
        if not pump.cancelled() and (error := pump.exception()) is not None:
            self._arrived.put(error)
