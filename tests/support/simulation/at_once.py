"""The base of runners that compute a step when it is launched, as a CPU does."""

from __future__ import annotations

from abc import ABC, abstractmethod

from weft.engine.scheduling.plan import ChunkResult, StepPlan


class AtOnce(ABC):
    """An heir computes steps in `execute`."""

    @abstractmethod
    def execute(self, plan: StepPlan) -> list[ChunkResult]:
        """Compute a step; returns one result per chunk."""

    def launch(self, plan: StepPlan, _masks: object = None) -> list[ChunkResult]:
        """Start a step."""
        return self.execute(plan)

    def collect(self, launched: list[ChunkResult]) -> list[ChunkResult]:
        """The results of a step that was launched."""
        return launched
