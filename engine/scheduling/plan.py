"""Plan of one step, as plain data: all that happens on the device follows from it.

The scheduler makes the plan; the runner carries it out and asks nobody. A plan is valid until its step is committed:
its block tables and token lists are those of the live requests, which go on to change, and the scheduler may reuse a
chunk for a later step. To keep a plan longer, or to replay it, make a deep copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from manylora.adapters.residency.entry import SlotLease
from manylora.engine.request import ErrorInfo, TokenLogprobs
from manylora.engine.sampling_params import SamplingParams


# Frozen ones take three times as long to make, and a step makes one a row.
@dataclass(slots=True, kw_only=True)
class SampleSpec:
    """Choice of the token after a chunk."""

    params: SamplingParams
    seed: int
    """The request's seed, drawn if the client gave none."""
    choice_index: int
    output_index: int
    """Tokens that were generated before this one; the counter of the draw."""
    prompt_token_ids: list[int] = field(default_factory=list)
    """Filled only when `params.needs_history`."""
    output_token_ids: list[int] = field(default_factory=list)
    """Filled only when `params.needs_history`, and for `params.bad_words`."""
    changes_logits: bool = field(init=False)
    """True if the sampler may have to change the logits; looked up once for all steps of a row."""

    def __post_init__(self) -> None:
        self.changes_logits = self.params.changes_logits


@dataclass(slots=True, kw_only=True)
class Chunk:
    """Consecutive tokens of one request that are computed in this step."""

    request_id: str
    token_ids: list[int]
    start: int
    """Position of the first token; all before it are in the KV cache."""
    block_table: Sequence[Sequence[int] | npt.NDArray[np.int32]]
    """[num_groups][num_blocks]: pages that hold positions 0 to start + len(token_ids) - 1, and maybe more."""
    adapter: SlotLease | None = None
    """None is the base model."""
    sample: SampleSpec | None = None
    """None when the prompt goes on after this chunk, or no token is wanted."""
    prompt_targets: list[int] | None = None
    """For prompt logprobs: the token that follows each position of the chunk (shorter by one where the prompt ends)."""
    num_prompt_logprobs: int = 0
    """Alternatives per prompt position."""
    token_source: int | None = None
    """Place in the plan of the step before: the chunk whose sampled token is the one token of this chunk. `token_ids`
    is a 0 then, because the token is not known yet. None: `token_ids` has the tokens."""


class PageMove(NamedTuple):
    """A page that goes between device and host, whole."""

    device_page: int
    """In the arena."""
    host_page: int
    """In the host slab."""


class PageCopy(NamedTuple):
    """A page of the arena that is copied to another, whole."""

    source: int
    target: int


@dataclass(slots=True, kw_only=True)
class StepPlan:
    """One step. Pages are moved in the order of the fields, before anything is computed."""

    step: int
    """Counts up."""
    chunks: list[Chunk] = field(default_factory=list)
    """May be empty where pages are to be moved or zeroed."""
    swap_out: list[PageMove] = field(default_factory=list)
    """From the device to the host."""
    zero_pages: list[int] = field(default_factory=list)
    """Pages just handed out as KV that nothing below fills."""
    swap_in: list[PageMove] = field(default_factory=list)
    """From the host to the device, to pages just handed out."""
    copies: list[PageCopy] = field(default_factory=list)
    """To pages just handed out."""
    started: set[str] = field(default_factory=set)
    """Requests that got pages for this step."""
    units: float = 0.0
    """Price of what is computed, where steps are kept to a length; else 0."""
    batch_units: float = 0.0
    """Part of `units` that the batch lane causes."""
    has_interactive: bool = False
    """True if a row is not of the batch lane."""

    @property
    def num_tokens(self) -> int:
        """Tokens computed in the step."""
        return sum(len(chunk.token_ids) for chunk in self.chunks)

    @property
    def is_empty(self) -> bool:
        """True if there is nothing to move and nothing to compute."""
        return not (self.chunks or self.swap_out or self.zero_pages or self.swap_in or self.copies)


@dataclass(slots=True, kw_only=True)
class ChunkResult:
    """Result of one chunk; results are in the order of the plan."""

    request_id: str
    token_id: int | None = None
    """The sampled token; None where the chunk had no `sample`, and where the scores were no numbers."""
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    """One per entry of `prompt_targets`."""
    is_non_finite: bool = False
    """True if the model's scores were NaN or overflowed, which ends the request."""
    failure: ErrorInfo | None = None
    """Error that says why its grammar leaves no token, which ends the request too."""


@dataclass(slots=True, kw_only=True)
class PlanBuilder:
    """A step plan that the scheduler is still filling, with its budgets."""

    plan: StepPlan
    budget: int = 0
    """Tokens left for prompts."""
    prefilling: list[tuple[tuple[float, ...], int, bool]] = field(default_factory=list)
    """For each row whose prompt is not computed yet: its turn in the fair order, the tokens left, and whether it is in
    the batch lane."""
    needed: int = 0
    """Pages for the first tokens of requests whose adapters are on their way to the device."""
    promised: int = 0
    """Pages that are free once this step has swapped them out; requests that sit this step out get them."""
    leaving_adapter: str | None = None
    """The adapter that gives up its slot: no request may start with it, or hold it, in this plan."""
