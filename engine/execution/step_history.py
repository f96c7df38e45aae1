"""The last steps: what they computed, and the adapters in them."""

from __future__ import annotations

from collections import Counter, deque

from weft.engine.scheduling.plan import Chunk, StepPlan
from weft.engine.status import StepBatches, StepStats

NUM_KEPT_STEPS = 256
NUM_KEPT_BATCHES = 64
NUM_SHOWN_ADAPTERS = 8


class StepHistory:
    """The last steps, recorded one by one."""

    def __init__(self) -> None:
        self._stats: deque[StepStats] = deque(maxlen=NUM_KEPT_STEPS)
        self._batches: deque[Counter[str]] = deque(maxlen=NUM_KEPT_BATCHES)
        """Requests by adapter, of the last of `_stats`."""
        self.num_steps = 0
        """Steps since start."""

    def record(self, plan: StepPlan, seconds: float) -> None:
        """Take note of a step that was computed."""
        self.num_steps += 1
        batch = Counter(chunk.adapter.digest for chunk in plan.chunks if chunk.adapter is not None)
        self._batches.append(batch)
        self._stats.append(
            StepStats(
                step=plan.step,
                seconds=seconds,
                requests=len(plan.chunks),
                tokens=plan.num_tokens,
                prefill_tokens=sum(len(chunk.token_ids) for chunk in plan.chunks if _is_prefill(chunk)),
                adapters=len(batch),
                base_requests=len(plan.chunks) - batch.total(),
            )
        )

    def stats(self) -> list[StepStats]:
        """The last steps, oldest first, at most `NUM_KEPT_STEPS`."""
        return list(self._stats)

    def batches(self) -> StepBatches:
        """Requests by adapter in the last `NUM_KEPT_BATCHES` steps."""
        requests: Counter[str] = Counter()
        for batch in self._batches:
            requests.update(batch)
        shown = [digest for digest, _ in requests.most_common(NUM_SHOWN_ADAPTERS)]
        stats = list(self._stats)[-len(self._batches) :] if self._batches else []
        rows = []
        for step, batch in zip(stats, self._batches, strict=True):
            counts = [batch[digest] for digest in shown]
            rows.append([step.step, step.base_requests, *counts, batch.total() - sum(counts)])
        return StepBatches(adapters=shown, steps=rows)


def _is_prefill(chunk: Chunk) -> bool:
    return chunk.sample is None or chunk.sample.output_index == 0 or len(chunk.token_ids) > 1
