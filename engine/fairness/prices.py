"""Prices of the work of a step, and loads, in units: one unit is the time of one prompt token in a full chunk.

Fair shares are counted in these units, bills never. The figures are measured at start
(`manylora.engine.execution.costs`). The idea of a cost per kind of work: Sheng et al., "Fairness in Serving Large
Language Models" (arXiv:2401.00588).
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Prices:
    """Units per piece of work. Prompt tokens found in the prefix cache cost nothing."""

    prompt: float = 1.0
    """One computed prompt token."""
    output: float = 2.0
    """One generated token, besides the context that it reads."""
    context: float = 1 / 600
    """One token of context that an output token attends to: it is read from memory for this row alone."""
    prompt_context: float = 1 / 30_000
    """One token of context that a prompt token attends to: the tokens of a chunk share the read, and each computes."""
    rank: float = 1 / 16
    """One rank of a distinct adapter in a step; its requests in the step share this."""
    page_load: float = 2.0
    """One page of an adapter that is brought to the device, paid by the tenant that asked for it."""

    def next_token(self, context: int, *, is_prompt: bool) -> float:
        """Price of a token of the prompt or of the output after `context` tokens."""
        if is_prompt:
            return self.prompt + self.prompt_context * context
        return self.output + self.context * context

    def load(self, num_pages: int | None) -> float:
        """Price of bringing an adapter to the device; 0 while its size is unknown."""
        return self.page_load * (num_pages or 0)


# Frozen ones take three times as long to make, and there may be thousands.
@dataclass(slots=True, kw_only=True)
class TenantLoad:
    """Requests and work of one tenant in the engine now."""

    weight: float = 1.0
    running: int = 0
    """Requests with pages."""
    paused: int = 0
    """Requests with pages that sat out the last step."""
    waiting: int = 0
    """Requests without pages."""
    reasons: dict[str, int] = field(default_factory=dict)
    """Waiting requests by reason, as in `EngineStatus.waiting_reasons`."""
    queued: float = 0.0
    """Units still to compute for its waiting requests, with predicted output lengths."""
    backlog: float = 0.0
    """Units still to compute for its waiting and running requests."""
    rate: float = 0.0
    """Units per second computed for it lately."""
    service: float = 0.0
    """Units computed for it since start."""
