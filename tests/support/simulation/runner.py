"""A runner that computes with what its pages hold, and takes note of everything it should never have found in them.

As on a GPU, a step that was launched runs at any time until it is collected: sometimes at once, sometimes as late as
may be, always after the steps before it.
"""

from __future__ import annotations

import copy
import random
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from manylora.adapters.residency.entry import SlotLease
from manylora.engine.core import MAX_FAILURES
from manylora.engine.request import TokenLogprobs
from manylora.engine.scheduling.plan import Chunk, ChunkResult, StepPlan
from manylora.engine.scheduling.request_state import kv_tokens
from simulation.adapters import PlannedError
from simulation.build import SimulatedEngine
from simulation.pages import DevicePages, Fail, Keys, weights_of
from simulation.scenario import Scenario
from simulation.truth import Truth, next_token
from simulation.virtual_time import VirtualTime

PAST_THE_END = -1
"""Content of a page for a token of a row whose request has ended, which its plan could not know."""


@dataclass(kw_only=True, eq=False)
class SimulatedStep:
    """A step that was launched."""

    plan: StepPlan
    """As it was at the launch."""
    before: SimulatedStep | None
    """The step that was in flight when this one was launched."""
    raises_at: int
    """The stage at which it raises; -1 is none."""
    results: list[ChunkResult] = field(default_factory=list)
    error: PlannedError | None = None
    has_run: bool = False
    is_in_flight: bool = True


class SimulatedRunner:
    """Carries out plans on `DevicePages`.

    Args:
        engine: Has the pages, host pages, tables and leases that plans are about.
        scenario: Gives the time of steps and the share of them that raises: five times as large among steps that swap
            out, but fewer in a row than the engine gives up after.
        time: Steps take some of it, in which loads and copies go on.
        rng: Draws the time of each step and whether it raises.
        device: The arena.
        truths: What each request must read, by id.
        see: Is shown every plan before it is carried out.
        fail: Takes note of what must not happen.
    """

    def __init__(
        self,
        engine: SimulatedEngine,
        scenario: Scenario,
        *,
        time: VirtualTime,
        rng: random.Random,
        device: DevicePages,
        truths: Mapping[str, Truth],
        see: Callable[[StepPlan], None],
        fail: Fail,
    ) -> None:
        self._scenario = scenario
        self._time = time
        self._rng = rng
        self._geometry = engine.geometry
        self._pool = engine.pool
        self._pages = device.contents
        self._host = engine.slab.host_pages
        self._tables = engine.tables
        self._check_lease = engine.residency.slots.check_lease
        self._truths = truths
        self._see = see
        self._fail = fail
        self._scheduler = engine.scheduler
        self._is_late = random.Random(scenario.seed + 2)
        """Draws whether a step runs only when its results are collected."""
        self._queue: deque[SimulatedStep] = deque()
        """Steps that have not run."""
        self._last: SimulatedStep | None = None
        self._num_raised = 0
        """Steps in a row."""
        self.tokens: Counter[str] = Counter()
        """Tokens that each tenant is to be charged for: of steps that ended, and of requests that lived until then."""
        self.num_steps = 0
        self.num_moves = 0
        self.num_copies = 0
        self.fingerprint = 0
        """Hash of all plans so far: equal runs have equal ones."""
        self.hit: set[str] = set()
        """Requests of steps that raised."""
        self.unsound: set[str] = set()
        """Requests whose scores were no numbers."""

    def launch(self, plan: StepPlan, _masks: object = None) -> SimulatedStep:
        """Start a step, and maybe run it at once."""
        self.num_steps += 1
        self._see(plan)
        shown = [(chunk.start, *map(tuple, chunk.block_table)) for chunk in plan.chunks]
        self.fingerprint = hash((self.fingerprint, plan.step, len(plan.swap_out), *shown))
        raises = self._scenario.step_raises * (5 if plan.swap_out else 1)
        raises_at = self._rng.randrange(3) if self._rng.random() < raises else -1
        self._check_adapters(plan)
        self._check_targets(plan)
        before = self._last if self._last is not None and self._last.is_in_flight else None
        step = SimulatedStep(plan=_as_it_is(plan), before=before, raises_at=raises_at)
        self._last = step
        self._queue.append(step)
        if self._is_late.random() < 0.5:
            self._run_until(step)
            if step.error is not None and (before is None or before.error is None):
                step.is_in_flight = False
                raise step.error
        return step

    def collect(self, step: SimulatedStep) -> list[ChunkResult]:
        """Let a step and all before it run."""
        self._run_until(step)
        step.is_in_flight = False
        if step.error is not None:
            raise step.error
        for chunk in step.plan.chunks:
            state = self._scheduler.table.requests.get(chunk.request_id)
            if state is not None:
                self.tokens[state.place.key.tenant] += len(chunk.token_ids)
        return step.results

    def _run_until(self, last: SimulatedStep) -> None:
        while not last.has_run:
            step = self._queue.popleft()
            step.has_run = True
            try:
                self._run(step)
            except PlannedError as error:
                step.error = error
                self.hit.update(chunk.request_id for chunk in step.plan.chunks)

    def _run(self, step: SimulatedStep) -> None:
        """Time passes before pages are moved, before they are read, and after."""
        before = step.before
        if before is not None and before.error is not None:
            raise before.error  # what it goes on from was not computed
        step.before = None
        plan = step.plan
        pause_s = (0.001 + plan.num_tokens * self._scenario.token_s) / 3
        for chunk in plan.chunks:
            if chunk.token_source is not None:
                self._take_token(chunk, before)
        for stage, work in enumerate((self._move_pages, self._write, None)):
            self._time.advance(pause_s)
            if stage == step.raises_at and self._num_raised < MAX_FAILURES - 1:
                self._num_raised += 1
                raise PlannedError("the device is on fire")
            if work is not None:
                work(plan)
        self._num_raised = 0
        step.results = [self._result(chunk) for chunk in plan.chunks]

    def _take_token(self, chunk: Chunk, before: SimulatedStep | None) -> None:
        """Put the token that the step before sampled into a chunk."""
        source = chunk.token_source or 0
        if before is None or source >= len(before.results):
            self._fail(f"{chunk.request_id} takes the token of chunk {source}, which is in no step")
        elif chunk.token_ids != [0] or before.results[source].request_id != chunk.request_id:
            self._fail(f"{chunk.request_id} takes the token of {before.results[source].request_id}")
        else:
            chunk.token_ids[0] = before.results[source].token_id or 0

    def close(self) -> None:
        """Nothing to give back."""

    def _check_targets(self, plan: StepPlan) -> None:
        """The pages that a step is to write belong to requests when it is launched."""
        pages = [
            *plan.zero_pages,
            *(move.device_page for move in plan.swap_in),
            *(pair.target for pair in plan.copies),
        ]
        for chunk in plan.chunks:
            first, last = chunk.start, chunk.start + len(chunk.token_ids) - 1
            for table in chunk.block_table:
                pages.extend(
                    table[
                        first // self._geometry.page_tokens : last // self._geometry.page_tokens + 1
                    ]
                )
        for page in pages:
            if self._pool.state(page) != "kv":
                self._fail(f"page {page} is to be written while it is {self._pool.state(page)}")

    def _check_adapters(self, plan: StepPlan) -> None:
        for chunk in plan.chunks:
            if chunk.adapter is not None:
                self._check_lease(chunk.adapter)
                row = self._tables.rows.get(chunk.adapter.slot, [])
                if any(self._pool.state(page) != "adapter" for page in row):
                    self._fail(
                        f"{chunk.request_id} is to read slot {chunk.adapter.slot}, whose pages {row} are gone"
                    )

    def _move_pages(self, plan: StepPlan) -> None:
        pages = self._pages
        for move in plan.swap_out:
            content = pages[move.device_page]
            if not isinstance(content, Keys):
                self._fail(f"page {move.device_page} is swapped out but holds {content}")
                continue
            self._host[move.host_page].content = content.copy()
        for page in plan.zero_pages:
            self._check_writable(page, "zeroed")
            pages[page] = Keys()
        for move in plan.swap_in:
            self._check_writable(move.device_page, "swapped into")
            swapped = self._host[move.host_page].content
            if not isinstance(swapped, Keys):
                self._fail(f"host page {move.host_page} is swapped in but holds {swapped}")
                continue
            pages[move.device_page] = swapped.copy()
        for pair in plan.copies:
            self._check_writable(pair.target, "copied into")
            source = pages[pair.source]
            if not isinstance(source, Keys):
                self._fail(f"page {pair.source} is copied but holds {source}")
                continue
            pages[pair.target] = source.copy()
        self.num_moves += len(plan.swap_out) + len(plan.swap_in)
        self.num_copies += len(plan.copies)

    def _check_writable(self, page: int, verb: str) -> None:
        """A page that is written is owned by one request; what is published, free or an adapter's never is."""
        state = self._pool.state(page)
        # The request of a step in flight may have ended: its pages wait in quarantine for the step.
        if page == 0 or state not in ("kv", "quarantine"):
            self._fail(
                f"page {page} is {verb} while it is {'the zero page' if page == 0 else state}"
            )

    def _write(self, plan: StepPlan) -> None:
        writers: dict[int, str] = {}
        page_tokens = self._geometry.page_tokens
        for chunk in plan.chunks:
            end = chunk.start + len(chunk.token_ids)
            keys = self._keys(chunk)
            for block in range(chunk.start // page_tokens, (end - 1) // page_tokens + 1):
                first = max(chunk.start, block * page_tokens)
                last = min(end, (block + 1) * page_tokens)
                for group, table in enumerate(chunk.block_table):
                    page = table[block]
                    self._check_writable(page, "written")
                    if writers.setdefault(page, chunk.request_id) != chunk.request_id:
                        self._fail(
                            f"page {page} is written by {writers[page]} and {chunk.request_id} in one step"
                        )
                    content = self._pages[page]
                    offset = first - block * page_tokens
                    if not isinstance(content, Keys) or content.group not in (-1, group):
                        self._fail(
                            f"{chunk.request_id} writes position {first} to page {page}, which holds {content}"
                        )
                        continue
                    if len(content.cells) < offset:
                        self._fail(
                            f"{chunk.request_id} leaves a hole before position {first} in page {page}"
                        )
                    content.group = group
                    content.cells[offset : offset + last - first] = keys[first:last]

    def _keys(self, chunk: Chunk) -> list[int]:
        """Keys in the pages of a request up to the end of a chunk."""
        truth = self._truths[chunk.request_id]
        end = chunk.start + len(chunk.token_ids)
        if not chunk.token_ids or end > kv_tokens(truth.request):
            self._fail(
                f"{chunk.request_id} computes {len(chunk.token_ids)} tokens at {chunk.start}, past its end"
            )
        # Its plan did not know that the token before was the last, or was none.
        is_past_end = chunk.token_source is not None and (
            chunk.start == len(truth.keys) or chunk.request_id in self.unsound
        )
        if is_past_end:
            return [*truth.keys[: chunk.start], PAST_THE_END]
        if chunk.token_ids != truth.tokens[chunk.start : end]:
            self._fail(
                f"{chunk.request_id} computes {chunk.token_ids} at {chunk.start}, which are not its tokens"
            )
        return truth.keys[:end]

    def _result(self, chunk: Chunk) -> ChunkResult:
        truth = self._truths[chunk.request_id]
        keys = self._read(chunk, truth)
        if self._rng.random() < self._scenario.unsound:
            self.unsound.add(chunk.request_id)
            return ChunkResult(request_id=chunk.request_id, is_non_finite=True)
        sample = chunk.sample
        token_id = None if sample is None else next_token(keys, sample.choice_index)
        targets = chunk.prompt_targets or []
        return ChunkResult(
            request_id=chunk.request_id,
            token_id=token_id,
            prompt_logprobs=[
                TokenLogprobs(token_id=target, logprob=-float(chunk.start + index), rank=1)
                for index, target in enumerate(targets)
            ],
        )

    def _read(self, chunk: Chunk, truth: Truth) -> int:
        """Read the key at the last position, and note every page that does not hold the keys of this request."""
        page_tokens = self._geometry.page_tokens
        end = chunk.start + len(chunk.token_ids)
        keys = self._keys(chunk)
        if chunk.adapter is not None:
            self._read_adapter(chunk.request_id, chunk.adapter)
        digest = chunk.adapter.digest if chunk.adapter else None
        wanted = truth.request.adapter.digest if truth.request.adapter else None
        if digest != wanted:
            self._fail(f"{chunk.request_id} runs with {digest} instead of {wanted}")
        if len(chunk.block_table) != self._geometry.num_groups:
            self._fail(f"{chunk.request_id} has a table of {len(chunk.block_table)} groups")
        for group, table in enumerate(chunk.block_table):
            for block in range(self._geometry.blocks(end)):
                first = block * page_tokens
                count = min(end - first, page_tokens)
                content = self._pages[table[block]]
                if (
                    not isinstance(content, Keys)
                    or content.group != group
                    or content.cells[:count] != keys[first : first + count]
                ):
                    self._fail(
                        f"{chunk.request_id} reads positions {first} to {first + count - 1} of group {group} from page "
                        f"{table[block]} ({self._pool.state(table[block])}), which holds {content} and not what was "
                        "computed for it"
                    )
        content = self._pages[chunk.block_table[0][(end - 1) // page_tokens]]
        offset = (end - 1) % page_tokens
        return (
            content.cells[offset]
            if isinstance(content, Keys) and offset < len(content.cells)
            else -1
        )

    def _read_adapter(self, request_id: str, adapter: SlotLease) -> None:
        row = self._tables.rows.get(adapter.slot, [])
        found = [self._pages[page] for page in row]
        if not found or found != weights_of(adapter.digest, len(found)):
            self._fail(
                f"{request_id} reads slot {adapter.slot} for {adapter.digest[:14]}, whose pages hold {found}"
            )
        # A deleted adapter may leave while the step in flight still reads it.
        if any(self._pool.state(page) not in ("adapter", "quarantine") for page in row):
            self._fail(
                f"{request_id} reads slot {adapter.slot}, whose pages {row} are not an adapter's"
            )


def _as_it_is(plan: StepPlan) -> StepPlan:
    """A plan that does not change with the requests any more."""
    chunks = [
        replace(
            chunk,
            token_ids=[*chunk.token_ids],
            block_table=[[*row] for row in chunk.block_table],
            sample=copy.copy(chunk.sample),
        )
        for chunk in plan.chunks
    ]
    return replace(plan, chunks=chunks)
