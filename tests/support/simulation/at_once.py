"""The base of runners that compute a step when it is launched, as a CPU does."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace

from manylora.engine.scheduling.plan import Chunk, ChunkResult, StepPlan


def with_tokens(plan: StepPlan, sampled: Sequence[int | None]) -> StepPlan:
    """A plan with the tokens that the step before it sampled."""
    if all(chunk.token_source is None for chunk in plan.chunks):
        return plan
    return replace(plan, chunks=[_with_token(chunk, sampled) for chunk in plan.chunks])


def _with_token(chunk: Chunk, sampled: Sequence[int | None]) -> Chunk:
    if chunk.token_source is None:
        return chunk
    return replace(chunk, token_ids=[sampled[chunk.token_source] or 0])


class AtOnce(ABC):
    """An heir computes steps in `execute`."""

    @abstractmethod
    def execute(self, plan: StepPlan) -> list[ChunkResult]:
        """Compute a step; returns one result per chunk."""

    sampled: Sequence[int | None] = ()
    """Tokens of the step that was launched last."""

    def launch(self, plan: StepPlan, _masks: object = None) -> list[ChunkResult]:
        """Start a step."""
        results = self.execute(with_tokens(plan, self.sampled))
        self.sampled = [result.token_id for result in results]
        return results

    def collect(self, launched: list[ChunkResult]) -> list[ChunkResult]:
        """The results of a step that was launched."""
        return launched
