"""Chunks of one request that steps compute: those whose results are not known, and the next one."""

from __future__ import annotations

from dataclasses import dataclass, field

from manylora.engine.scheduling.plan import Chunk, StepPlan
from manylora.engine.scheduling.request_pages import RequestPages


@dataclass(slots=True, kw_only=True, eq=False)
class StepCursor:
    """Follows the chunks of one request from plan to result."""

    pages: RequestPages
    num_prompt: int
    """Tokens in the prompt."""
    max_tokens: int
    """Most tokens to generate."""
    in_flight: list[Chunk] = field(default_factory=list)
    """Chunks whose results are not known, oldest first: of one step, and of two until the first is committed."""
    num_coming: int = 0
    """Tokens that these sample and that are to be computed next. The one that ends the request by its length is not."""
    index: int = 0
    """Index of its last chunk in the plan of its step."""
    next_chunk: Chunk | None = None
    """Its next chunk, if that is one token and its pages have room for it; None if the next plan must find out."""

    @property
    def num_complete(self) -> int:
        """Tokens whose keys and values were computed by steps that are complete, from the first one on."""
        return self.in_flight[0].start if self.in_flight else self.pages.num_computed

    def begin(self, chunk: Chunk, plan: StepPlan) -> None:
        """Add a chunk to a plan. From now on its tokens count as computed, and the token that it samples is coming."""
        num_coming = self.num_coming
        chunk.token_source = self.index if num_coming else None
        self.index = len(plan.chunks)
        self.next_chunk = None
        plan.chunks.append(chunk)
        self.in_flight.append(chunk)
        pages = self.pages
        pages.last_step = plan.step
        pages.num_computed = chunk.start + len(chunk.token_ids)
        sample = chunk.sample
        # Prompt and `max_tokens` are never longer than the model takes, so its length need not be looked at.
        if sample is not None and sample.output_index + 1 < self.max_tokens:
            self.num_coming = num_coming + 1

    def end(self, chunk: Chunk, token_id: int | None) -> None:
        """Take out the oldest chunk in flight, and turn it into the next chunk if that is one token in the same page.

        To make hundreds of chunks in each step takes longer than all other decisions of a plan, and has the garbage
        collector look at each.

        Args:
            chunk: The oldest chunk in flight; its results are known.
            token_id: The sampled token, if the request keeps its pages and goes on with this token.
        """
        del self.in_flight[0]
        self.next_chunk = None
        sample = chunk.sample
        if sample is None:
            return
        num_coming = self.num_coming
        if num_coming:
            num_coming -= 1
            self.num_coming = num_coming
        pages = self.pages
        num_computed = pages.num_computed
        if (
            token_id is not None
            and num_computed % pages.geometry.page_tokens
            and (num_coming or not self.in_flight)
            and chunk.start >= self.num_prompt
            and len(chunk.token_ids) == 1
        ):
            chunk.token_ids[0] = 0 if num_coming else token_id
            chunk.start = num_computed
            sample.output_index += 1 + num_coming
            self.next_chunk = chunk
