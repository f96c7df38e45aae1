"""A step plan in the making."""

from __future__ import annotations

from dataclasses import dataclass, field

from weft.engine.scheduling.plan import Chunk, PageCopy, PageMove, StepPlan
from weft.engine.scheduling.request_state import RequestState


@dataclass(slots=True, kw_only=True)
class PlanBuilder:
    """Filled by the scheduler and by what it asks for pages."""

    step: int
    budget: int = 0
    """Tokens left for prompts."""
    prefilling: list[tuple[tuple[float, ...], int, bool]] = field(default_factory=list)
    """Of each row whose prompt is not computed yet: its turn in the fair order, the tokens left, and whether it is in
    the batch lane."""
    needed: int = 0
    """Pages for the first tokens of requests whose adapters are on their way to the device."""
    started: set[str] = field(default_factory=set)
    """Requests that got pages in this plan."""
    chunks: list[Chunk] = field(default_factory=list)
    swap_out: list[PageMove] = field(default_factory=list)
    zero_pages: list[int] = field(default_factory=list)
    swap_in: list[PageMove] = field(default_factory=list)
    copies: list[PageCopy] = field(default_factory=list)
    promised: int = 0
    """Pages that requests which sit this step out get when what is swapped out in it is on the host."""
    by_place: list[RequestState] | None = None
    """Requests with pages, the most entitled first; None until somebody asks for others' pages."""
    unobtainable: int | None = None
    """The fewest pages that could not be had from others in this plan."""
    has_looked_for_slot: bool = False
    """Whether the plan has looked for an adapter slot that others give up."""
    leaving_adapter: str | None = None
    """The adapter whose requests give its slot up: nobody may start with it, or hold it, in this plan."""

    def may_preempt(self, state: RequestState) -> bool:
        """Whether a request with pages may lose them in this step: not what the step itself is to fill."""
        return not state.is_protected and state.request_id not in self.started

    def plan(self) -> StepPlan | None:
        """The finished plan; None where there is nothing to do."""
        if not (self.chunks or self.swap_out or self.zero_pages or self.swap_in or self.copies):
            return None
        return StepPlan(
            step=self.step,
            chunks=self.chunks,
            swap_out=self.swap_out,
            zero_pages=self.zero_pages,
            swap_in=self.swap_in,
            copies=self.copies,
        )
