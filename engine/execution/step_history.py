"""The last steps: their work, and the adapters in them."""

from __future__ import annotations

from collections import Counter, deque

from manylora.engine.scheduling.plan import Chunk, StepPlan
from manylora.engine.status import StepBatches, StepStats

NUM_KEPT_STEPS = 256
NUM_KEPT_BATCHES = 64
NUM_SHOWN_ADAPTERS = 8


class StepHistory:
    """Records the last steps."""

    def __init__(self) -> None:
        self._steps: deque[tuple[StepStats, Counter[str]]] = deque(maxlen=NUM_KEPT_STEPS)
        """Last steps, each with its number of requests by adapter."""

    def record(self, plan: StepPlan, seconds: float) -> None:
        """Record a computed step."""
        batch = Counter(chunk.adapter.digest for chunk in plan.chunks if chunk.adapter is not None)
        stats = StepStats(
            step=plan.step,
            seconds=seconds,
            requests=len(plan.chunks),
            tokens=plan.num_tokens,
            prefill_tokens=sum(len(chunk.token_ids) for chunk in plan.chunks if _is_prefill(chunk)),
            adapters=len(batch),
            base_requests=len(plan.chunks) - batch.total(),
        )
        self._steps.append((stats, batch))

    def stats(self) -> list[StepStats]:
        """The last steps, oldest first, at most `NUM_KEPT_STEPS`."""
        return [stats for stats, _ in self._steps]

    def batches(self) -> StepBatches:
        """Requests by adapter in the last `NUM_KEPT_BATCHES` steps."""
        last = list(self._steps)[-NUM_KEPT_BATCHES:]
        requests: Counter[str] = Counter()
        for _, batch in last:
            requests.update(batch)
        shown = [digest for digest, _ in requests.most_common(NUM_SHOWN_ADAPTERS)]
        rows = []
        for step, batch in last:
            counts = [batch[digest] for digest in shown]
            rows.append([step.step, step.base_requests, *counts, batch.total() - sum(counts)])
        return StepBatches(adapters=shown, steps=rows)


def _is_prefill(chunk: Chunk) -> bool:
    return chunk.sample is None or chunk.sample.output_index == 0 or len(chunk.token_ids) > 1
