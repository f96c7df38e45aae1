"""A runner that computes with what its pages hold, and takes note of everything it should never have found in them."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping

from simulation.adapters import PlannedError
from simulation.at_once import AtOnce
from simulation.build import SimulatedEngine
from simulation.pages import DevicePages, Fail, Keys, weights_of
from simulation.scenario import Scenario
from simulation.truth import Truth, next_token
from simulation.virtual_time import VirtualTime
from weft.adapters.residency.slots import SlotLease
from weft.engine.core import MAX_FAILURES
from weft.engine.request import TokenLogprobs
from weft.engine.scheduling.plan import Chunk, ChunkResult, StepPlan


class SimulatedRunner(AtOnce):
    """Carries out plans on `DevicePages`.

    Args:
        engine: Whose pages, host pages, tables and leases plans are about.
        scenario: How long steps take, and which share of them raises: of those that swap out, five times as many, but
            never so many in a row that the engine gives up.
        time: Steps take some of it, in which loads and copies go on.
        rng: For how long, and which step raises.
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
        self._num_raised = 0
        """Steps in a row."""
        self.num_steps = 0
        self.num_moves = 0
        self.num_copies = 0
        self.fingerprint = 0
        """Of all plans so far: equal runs have equal ones."""
        self.hit: set[str] = set()
        """Requests of steps that raised."""
        self.unsound: set[str] = set()
        """Requests whose scores were no numbers."""

    def execute(self, plan: StepPlan) -> list[ChunkResult]:
        """Run a step; time passes before pages are moved, before they are read, and after."""
        self.num_steps += 1
        self._see(plan)
        shown = [(chunk.start, *map(tuple, chunk.block_table)) for chunk in plan.chunks]
        self.fingerprint = hash((self.fingerprint, plan.step, len(plan.swap_out), *shown))
        pause_s = (0.001 + plan.num_tokens * self._scenario.token_s) / 3
        raises = self._scenario.step_raises * (5 if plan.swap_out else 1)
        raises_at = self._rng.randrange(3) if self._rng.random() < raises else -1
        self._check_adapters(plan)
        for stage, work in enumerate((self._move_pages, self._write, None)):
            self._time.advance(pause_s)
            if stage == raises_at and self._num_raised < MAX_FAILURES - 1:
                self._num_raised += 1
                self.hit.update(chunk.request_id for chunk in plan.chunks)
                raise PlannedError("the device is on fire")
            if work is not None:
                work(plan)
        self._num_raised = 0
        return [self._result(chunk) for chunk in plan.chunks]

    def close(self) -> None:
        """Nothing to give back."""

    def _check_adapters(self, plan: StepPlan) -> None:
        for chunk in plan.chunks:
            if chunk.adapter is not None:
                self._check_lease(chunk.adapter)

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
        for copy in plan.copies:
            self._check_writable(copy.target, "copied into")
            source = pages[copy.source]
            if not isinstance(source, Keys):
                self._fail(f"page {copy.source} is copied but holds {source}")
                continue
            pages[copy.target] = source.copy()
        self.num_moves += len(plan.swap_out) + len(plan.swap_in)
        self.num_copies += len(plan.copies)

    def _check_writable(self, page: int, verb: str) -> None:
        """A page that is written is owned by one request; what is published, free or an adapter's never is."""
        state = self._pool.state(page)
        if page == 0 or state != "kv":
            self._fail(f"page {page} is {verb} while it is {'the zero page' if page == 0 else state}")

    def _write(self, plan: StepPlan) -> None:
        writers: dict[int, str] = {}
        page_tokens = self._geometry.page_tokens
        for chunk in plan.chunks:
            truth = self._truths[chunk.request_id]
            end = chunk.start + len(chunk.token_ids)
            if not chunk.token_ids or chunk.token_ids != truth.tokens[chunk.start : end]:
                self._fail(f"{chunk.request_id} computes {chunk.token_ids} at {chunk.start}, which are not its tokens")
            for block in range(chunk.start // page_tokens, (end - 1) // page_tokens + 1):
                first = max(chunk.start, block * page_tokens)
                last = min(end, (block + 1) * page_tokens)
                for group, table in enumerate(chunk.block_table):
                    page = table[block]
                    self._check_writable(page, "written")
                    if writers.setdefault(page, chunk.request_id) != chunk.request_id:
                        self._fail(f"page {page} is written by {writers[page]} and {chunk.request_id} in one step")
                    content = self._pages[page]
                    offset = first - block * page_tokens
                    if not isinstance(content, Keys) or content.group not in (-1, group):
                        self._fail(f"{chunk.request_id} writes position {first} to page {page}, which holds {content}")
                        continue
                    if len(content.cells) < offset:
                        self._fail(f"{chunk.request_id} leaves a hole before position {first} in page {page}")
                    content.group = group
                    content.cells[offset : offset + last - first] = truth.keys[first:last]

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
        """What stands at the last position; notes every page that does not hold what this request must read."""
        page_tokens = self._geometry.page_tokens
        end = chunk.start + len(chunk.token_ids)
        keys = truth.keys
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
        return content.cells[offset] if isinstance(content, Keys) and offset < len(content.cells) else -1

    def _read_adapter(self, request_id: str, adapter: SlotLease) -> None:
        row = self._tables.rows.get(adapter.slot, [])
        found = [self._pages[page] for page in row]
        if not found or found != weights_of(adapter.digest, len(found)):
            self._fail(f"{request_id} reads slot {adapter.slot} for {adapter.digest[:14]}, whose pages hold {found}")
        if any(self._pool.state(page) != "adapter" for page in row):
            self._fail(f"{request_id} reads slot {adapter.slot}, whose pages {row} are not an adapter's")
