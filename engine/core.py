"""The engine's loop: one call of `pump` is one step. It runs in the engine process, in `manylora.LLM`, and in tests.

With overlap, `pump` launches a step before it takes in the results of the step before it, so that the device need not
wait for the plan. docs/scheduling.md says what that changes.

Knows neither transport nor text. One request or step that fails does not end the engine. Where the device is lost, or
plans or steps fail several times in a row, `pump` raises, and the supervisor starts a fresh engine.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Callable
from typing import NamedTuple

from manylora.engine.execution.runner import LaunchedStep, ModelRunner
from manylora.engine.grammar.masks import Masks
from manylora.engine.request import PAUSED, GenerationRequest, RequestOutput
from manylora.engine.scheduling.plan import Chunk, StepPlan
from manylora.engine.scheduling.scheduler import Scheduler
from manylora.engine.status import EngineLoad, EngineStatus, PauseMode, StepBatches, StepStats
from manylora.errors import EngineError
from manylora.kernels.triton.compiles import CompileWatch
from manylora.memory.arena import is_device_lost
from manylora.memory.pool import page_map

logger = logging.getLogger(__name__)

NUM_KEPT_STEPS = 256
NUM_KEPT_BATCHES = 64
NUM_SHOWN_ADAPTERS = 8
NUM_KEPT_TENANTS = 256
MAX_FAILURES = 3
"""The engine gives up when this many plans or steps failed with no good step between them."""
STEP_FAILED = "step %d failed; its %d requests end with an error"
CHECK_DIVISOR = 100
"""An idle engine verifies its page counts for at most one second in 100, since a request may come meanwhile."""


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


class StepInFlight(NamedTuple):
    """A step that was launched and whose results were not taken in."""

    plan: StepPlan
    launched: LaunchedStep
    started_s: float
    """Second at which it was planned."""


class EngineCore:
    """Scheduler, residency and runner, driven by `pump`. Not thread-safe.

    Args:
        scheduler: Decides what to compute. The engine's pages, caches and adapters are those of its table.
        runner: Computes it.
        boot_id: Id of this start of the engine.
        overlaps: True if a step is launched before the results of the one before it are taken in.
        set_stepping: Called with the number of requests in steps and of those that could be; loads give way to steps.
        compiles: Watches for kernels that are compiled while requests are served; ended by `close`.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: ModelRunner,
        *,
        boot_id: str,
        overlaps: bool = False,
        set_stepping: Callable[[int, int], None] = lambda _running, _held_up: None,
        compiles: CompileWatch | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._scheduler = scheduler
        self._runner = runner
        self._masks = Masks()
        self._table = scheduler.table
        self._kv = scheduler.table.kv
        self.residency = scheduler.table.residency
        """Adapters on device and host; between two pumps they may be pinned, warmed and forgotten there."""
        self._boot_id = boot_id
        self._overlaps = overlaps
        self._set_stepping = set_stepping
        self._compiles = compiles or CompileWatch()
        self._clock = clock
        self._in_flight: deque[StepInFlight] = deque()
        """Oldest first. Between two pumps it is one step at most."""
        self.num_steps = 0
        """Steps launched since start."""
        self._num_failures = 0
        self._is_checked = True
        self._next_check_s = 0.0
        self._history = StepHistory()
        self._last_step_s: float | None = None
        """Second at which the last step was complete."""

    @property
    def num_compiles(self) -> int:
        """Kernels compiled since start, each while requests waited."""
        # A copy: another thread may ask during a compilation.
        return sum(tuple(self._compiles.counts.values()))

    def submit(self, request: GenerationRequest) -> None:
        """Take a request in.

        Raises:
            RequestError: It can never be served; the class and message say why.
            QueueFullError: Too many requests wait.
        """
        self._scheduler.submit(request)

    def abort(self, request_id: str) -> None:
        """End a request after its client left; unknown ids are ignored."""
        self._scheduler.finish(request_id, "abort")

    def pause(self, mode: PauseMode | None, is_ending: bool = False) -> None:
        """Compute nothing from now on, or with None go on; `is_ending` ends all requests with an error.

        Requests are taken in all the same, to wait. Those whose deadline passes end.
        """
        self._scheduler.pause = mode
        for request_id in list(self._table.requests) if is_ending else ():
            self._scheduler.finish(request_id, "error", PAUSED)

    def reset_prefix_cache(self) -> None:
        """Forget the cached KV that no request uses."""
        self._kv.prefixes.evict_unused()

    def has_work(self) -> bool:
        """True if `pump` has something to do besides finishing loads."""
        return self._scheduler.has_work() or bool(self._in_flight)

    def pump(self) -> list[RequestOutput]:
        """Take in finished loads, plan a step, launch it, and return outputs; there may be nothing to compute.

        The outputs are those of this step, or with overlap of the one before it.

        Raises:
            EngineError: The device is lost, plans or steps failed `MAX_FAILURES` times in a row, or pages were lost.
                This engine cannot go on; its requests get no further output.
        """
        try:
            return self._pump()
        except Exception as error:
            _give_up_if_lost(error)  # a kernel's error may show in whatever is called after it
            raise

    def _pump(self) -> list[RequestOutput]:
        for failure in self.residency.tick(self._kv.pool.completed_step):
            self._scheduler.fail_adapter(failure.digest, failure.error)
        self._scheduler.take_in_grammars()
        plan = self._plan()
        if plan is None and self._in_flight:
            self._settle()
            plan = self._plan()
        self._set_stepping(
            0 if plan is None else max(self._table.num_rows, 1), self._scheduler.num_held_up
        )
        if plan is None:
            outputs = self._scheduler.take_outputs()
            self._check_when_idle()
            return outputs
        self._is_checked = False
        self._run(plan)
        return self._scheduler.take_outputs()

    def status(self, *, is_detailed: bool = False) -> EngineStatus:
        """A snapshot, with `page_map` and `batches` if it is to be detailed. Takes in the step in flight first."""
        self._settle()
        table = self._table
        kv = self._kv
        transfers = self.residency.transfers
        age = None if self._last_step_s is None else self._clock() - self._last_step_s
        return EngineStatus(
            boot_id=self._boot_id,
            running=len(table.running),
            base_running=sum(state.adapter.lease is None for state in table.running),
            waiting=len(table.waiting),
            pause=self._scheduler.pause,
            waiting_reasons=table.waiting.reasons(),
            pages=kv.pool.counts(),
            available_pages=kv.num_available,
            residents=list(self.residency.residents()),
            last_steps=self._history.stats(),
            last_step_age_s=age,
            num_steps=self.num_steps,
            preemptions=dict(table.preemptions),
            loads=dict(transfers.loads),
            load_seconds=transfers.load_seconds,
            load_p95_s=transfers.load_p95_s,
            evictions=dict(kv.evictor.evictions),
            prefix_queries=kv.prefixes.num_queries,
            prefix_hits=kv.prefixes.num_hits,
            kernel_compiles=self.num_compiles,
            host_pages=kv.swap.counts(),
            tenants=self._scheduler.tenants(),
            service_tokens=table.service.tokens(NUM_KEPT_TENANTS),
            page_map=page_map(kv.pool) if is_detailed else None,
            batches=self._history.batches() if is_detailed else None,
        )

    def load(self) -> EngineLoad:
        """Work in the queue and in the steps, by tenant; cheap enough for several calls a second."""
        return self._scheduler.load()

    def check(self) -> None:
        """Verify that pages, slots and requests add up.

        Raises:
            EngineError: They do not.
        """
        self._kv.pool.check()
        self._table.check(len(self._in_flight))
        self.residency.check(self._kv.swap.num_used)

    def close(self) -> None:
        """Wait for the step in flight, end background loads and give the memory back; all requests are dropped."""
        self._compiles.end()
        self._drop_steps()
        self._set_stepping(0, 0)
        self.residency.transfers.close()
        self._scheduler.close()
        self._masks.close()
        self._runner.close()

    def _plan(self) -> StepPlan | None:
        try:
            return self._scheduler.plan()
        except Exception as error:
            logger.exception("planning a step failed")
            self._settle()  # what it yields is good
            self._note_failure(error)
            self._scheduler.fail_running()
            self.check()
            return None

    def _run(self, plan: StepPlan) -> None:
        """Launch a step, and take in the results of the one before it, and of this one where nothing may overlap it."""
        started_s = self._clock()
        self.num_steps += 1
        try:
            matchers = self._scheduler.matchers(plan)
            launched = self._runner.launch(plan, self._masks.begin(matchers) if matchers else None)
        except Exception as error:
            logger.exception(STEP_FAILED, plan.step, len(plan.chunks))
            self._settle()  # what it yields is good
            self._fail(plan, error)
            self._end_step(plan, started_s)
            return
        self._in_flight.append(StepInFlight(plan, launched, started_s))
        self._settle(1 if self._overlaps and not self._scheduler.needs_results(plan) else 0)

    def _settle(self, num_left: int = 0) -> None:
        """Take in the results of the oldest steps in flight, until `num_left` are left."""
        while len(self._in_flight) > num_left:
            step = self._in_flight.popleft()
            try:
                self._scheduler.commit(step.plan, self._runner.collect(step.launched))
                self._num_failures = 0
            except Exception as error:
                logger.exception(STEP_FAILED, step.plan.step, len(step.plan.chunks))
                self._fail(step.plan, error)
                self._end_step(step.plan, step.started_s)
                self._drop_steps()  # they go on from what this step should have computed
                return
            self._end_step(step.plan, step.started_s)

    def _drop_steps(self) -> None:
        """Wait for the steps in flight, and end their requests with an error."""
        while self._in_flight:
            step = self._in_flight.popleft()
            try:
                self._runner.collect(step.launched)
            except Exception as error:
                logger.exception("step %d failed, after the step before it", step.plan.step)
                _give_up_if_lost(error)
            self._scheduler.fail_step(step.plan)
            self._end_step(step.plan, step.started_s)

    def _fail(self, plan: StepPlan, error: Exception) -> None:
        self._note_failure(error)
        self._scheduler.fail_step(plan)

    def _end_step(self, plan: StepPlan, started_s: float) -> None:
        """Free the pages of a step that is complete, or failed, and take note of its time."""
        self._scheduler.complete(plan.step)
        before_s = self._last_step_s
        self._last_step_s = self._clock()
        # With overlap the device begins a step when it has ended the one before.
        seconds = self._last_step_s - (started_s if before_s is None else max(started_s, before_s))
        self._scheduler.note_step(plan, seconds)
        self._history.record(plan, seconds)

    def _note_failure(self, error: Exception) -> None:
        """Count a plan or step that failed, and give up where the next one would fail too."""
        self._num_failures += 1
        _give_up_if_lost(error)
        if self._num_failures >= MAX_FAILURES:
            raise EngineError(
                f"{MAX_FAILURES} plans or steps in a row failed; the engine must be started again"
            ) from error

    def _check_when_idle(self) -> None:
        started_s = self._clock()
        if self._is_checked or self._scheduler.has_work() or started_s < self._next_check_s:
            return
        self.check()
        self._is_checked = True
        ended_s = self._clock()
        self._next_check_s = ended_s + CHECK_DIVISOR * (ended_s - started_s)


def _give_up_if_lost(error: Exception) -> None:
    if is_device_lost(error):
        raise EngineError("the device is lost; the engine must be started again") from error
