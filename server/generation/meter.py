"""The bill of one HTTP request: exactly one usage event, durable before the client sees the end.

1. A request that ends by itself is billed its prompt and its output.
2. A request that its client cuts, or that ends by what it asked for (its grammar leaves no token), is billed what the
   engine had computed for it when the cut reached the engine.
3. A request that Manylora breaks is billed the tokens handed to the socket.

Tokens computed again after a preemption, and tokens behind a stop string, are not billed. A prompt counts once however
many choices it has. Its cached tokens are those of its first choice: the others find in the prefix cache what the first
has computed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import structlog

from manylora.engine.request import AdapterState
from manylora.errors import ManyloraError
from manylora.registry.records import ResolvedModel, UsageEvent
from manylora.server.core_services import CoreServices
from manylora.server.generation.choices import Choice, ChoiceStep
from manylora.server.generation.schemas import OutputDetails, UsageDetails, UsageView
from manylora.server.hop import Counts
from manylora.server.limits.reservation import LimitReservation

log = structlog.get_logger("manylora.server")
MARK_TOKENS = 128
MARK_S = 1.0


@dataclass(eq=False)
class Meter:
    """Counts the tokens of one HTTP request, and records its usage event.

    Args:
        services: The ledger, metrics and clocks.
        reservation: Settled when the event is recorded; times count from its admission.
        model: The model that was asked for.
        event: Makes the event of what is known at the end.
        is_interactive: False for a line of a batch, whose times no metric has.
    """

    services: CoreServices
    reservation: LimitReservation
    model: ResolvedModel
    event: Callable[..., UsageEvent]
    is_interactive: bool

    def __post_init__(self) -> None:
        self._started_s = self.reservation.admitted_s
        self._prompt_tokens: dict[int, int] = {}
        self._cached_tokens = 0
        self._tokens: dict[int, int] = {}
        self._reasoning_tokens: dict[int, int] = {}
        self._last_token_s: dict[int, float] = {}
        self._ttft_s: float | None = None
        self._queue_s: float | None = None
        self._adapter_state: AdapterState | None = None
        self._marked = (0, self._started_s)
        self._is_finished = False

    def counts(self) -> Counts:
        """The tokens billed until now: those delivered, or those computed, by the rule above."""
        prompt = sum(self._prompt_tokens.values())
        return Counts(prompt, self._cached_tokens, sum(self._tokens.values()))

    @property
    def usage(self) -> UsageView:
        """`counts`, as clients see it."""
        prompt, cached, completion = self.counts()
        return UsageView(
            prompt_tokens=prompt,
            completion_tokens=completion,
            total_tokens=prompt + completion,
            prompt_tokens_details=UsageDetails(cached_tokens=cached),
            completion_tokens_details=OutputDetails(
                reasoning_tokens=sum(self._reasoning_tokens.values())
            ),
        )

    def observe(self, step: ChoiceStep) -> None:
        """Note the times of a step, when it comes from the engine."""
        now = self.services.clock.monotonic()
        if self._ttft_s is None:
            self._ttft_s = now - self._started_s
            self._queue_s = step.output.queue_s
            self._adapter_state = step.output.adapter_state
            if self.is_interactive:
                self.services.metrics.first_token(self._ttft_s, self._queue_s)
        last = self._last_token_s.get(step.choice.index)
        if last is not None and step.output.token_ids and self.is_interactive:
            self.services.metrics.itl.observe(now - last)
        self._last_token_s[step.choice.index] = now

    def deliver(self, step: ChoiceStep) -> None:
        """Count a step as delivered: it is part of the next write."""
        choice = step.choice
        num_prompt = len(choice.prompt.token_ids)
        is_first = choice.index not in self._tokens
        if is_first and choice.request.choice_index == 0:
            self._cached_tokens += min(step.output.cached_tokens, num_prompt)
        self._prompt_tokens[choice.prompt_index] = num_prompt
        self._tokens[choice.index] = step.num_tokens
        if choice.reasoning_tokens:
            self._reasoning_tokens[choice.index] = choice.reasoning_tokens

    def take_computed(self, choices: Iterable[Choice]) -> None:
        """Count the tokens computed for the choices instead of those delivered."""
        self._prompt_tokens = {}
        self._cached_tokens = 0
        for choice in choices:
            known = self._prompt_tokens.get(choice.prompt_index, 0)
            self._prompt_tokens[choice.prompt_index] = max(known, choice.prompt_tokens)
            self._tokens[choice.index] = choice.text.num_tokens
            if choice.request.choice_index == 0:
                self._cached_tokens += min(choice.cached_tokens, choice.prompt_tokens)

    def mark(self) -> None:
        """Leave a progress mark if enough was delivered since the last one."""
        now = self.services.clock.monotonic()
        tokens = sum(self._tokens.values())
        marked_tokens, marked_s = self._marked
        if tokens - marked_tokens >= MARK_TOKENS or now - marked_s >= MARK_S:
            self._marked = (tokens, now)
            self.services.ledger.progress(self._event("interrupted"))

    async def finish(self, status: str) -> None:
        """Record the event; later calls do nothing.

        Args:
            status: A finish reason, `aborted` or `error`.

        Raises:
            CapacityError: The event could not be made durable: the client must not see a good end.
        """
        event = self.close(status)
        if event is None:
            return
        try:
            await self.services.ledger.record(event)
        finally:
            self.settle(event)

    def close(self, status: str) -> UsageEvent | None:
        """The event to record, the first time; None later. Once it is recorded, `settle` it."""
        if self._is_finished:
            return None
        self._is_finished = True
        return self._event(status)

    def settle(self, event: UsageEvent) -> None:
        """Count a recorded event against the limits, and in the metrics."""
        self.reservation.settle(event.id, event.prompt_tokens + event.completion_tokens, event.at)
        adapter = self.model.adapter
        if event.duration_s is not None and self.is_interactive:
            self.services.metrics.whole.observe(event.duration_s)
        self.services.metrics.request_ended(
            event.tenant,
            f"{adapter.tenant}/{adapter.name}" if adapter else None,
            event.status,
            {
                "prompt": event.prompt_tokens,
                "cached": event.cached_tokens,
                "completion": event.completion_tokens,
            },
        )

    async def finish_quietly(self, status: str) -> None:
        """Record the event after the client is gone or was told of an error; what fails is logged."""
        try:
            await self.finish(status)
        except ManyloraError as error:
            ledger_id = self._event(status).id
            log.exception("usage_not_recorded", ledger_id=ledger_id, code=error.code)

    def _event(self, status: str) -> UsageEvent:
        counts = self.counts()
        return self.event(
            at=self.services.clock.now(),
            status=status,
            prompt_tokens=counts.prompt,
            cached_tokens=counts.cached,
            completion_tokens=counts.completion,
            queue_s=self._queue_s,
            ttft_s=self._ttft_s,
            duration_s=self.services.clock.monotonic() - self._started_s,
            adapter_state=self._adapter_state,
        )
