"""A device that costs virtual time: steps by a formula, loads by a fixed fetch, copies by bandwidth."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from manylora.adapters.ref import AdapterRef
from manylora.adapters.residency.images import HostImage, HostImages
from manylora.engine.scheduling.plan import ChunkResult, StepPlan
from manylora.memory.eviction import PageCosts
from simulation.adapters import image_of
from simulation.at_once import AtOnce
from simulation.pages import SimulatedSlab
from simulation.virtual_time import VirtualTime


@dataclass(frozen=True, kw_only=True)
class CostModel:
    """Seconds of a step: `max(weights_s, tokens * token_s) + context * context_s + ranks * rank_s + launch_s`.

    The defaults are Llama-3-8B in bfloat16 on an H200: weights are read once in 3.49 ms, a token of a full step is
    15 GFLOP, a token of context is 128 KiB of KV cache, and a page is 16 tokens or 2 MiB.
    """

    weights_s: float = 3.49e-3
    token_s: float = 19e-6
    context_s: float = 30e-9
    """Per token of context that a request of the step reads."""
    rank_s: float = 1.22e-6
    """Per rank, once for each distinct adapter of the step."""
    launch_s: float = 0.5e-3
    page_copy_s: float = 2 * 2**20 / 50e9
    """One page between host and device, at 50 GB/s."""

    @property
    def page_costs(self) -> PageCosts:
        """What the engine is told."""
        return PageCosts(copy_s=self.page_copy_s, load_s=self.page_copy_s, token_s=self.token_s)


class CostedRunner(AtOnce):
    """Lets time pass for each plan; the tokens that it returns mean nothing.

    Args:
        time: Loads and copies go on in it while a step runs.
        costs: What a step takes.
        ranks: Of each adapter, by digest.
        observe: Told of every plan, with the second at which its step ended.
    """

    def __init__(
        self,
        time: VirtualTime,
        costs: CostModel,
        ranks: Mapping[str, int],
        observe: Callable[[StepPlan, float], None],
    ) -> None:
        self._time = time
        self._costs = costs
        self._ranks = ranks
        self._observe = observe
        self.slot_uses: set[tuple[int, int]] = set()
        """Adapter slots that a step has read, each with its generation: one entry per load that was of use."""
        self.num_steps = 0
        self.num_tokens = 0
        self.longest_step_s = 0.0

    def execute(self, plan: StepPlan) -> list[ChunkResult]:
        """Let the step's time pass."""
        costs = self._costs
        num_tokens = context = 0
        slots: dict[tuple[int, int], str] = {}
        results = []
        for chunk in plan.chunks:
            count = len(chunk.token_ids)
            num_tokens += count
            context += chunk.start + count
            if chunk.adapter is not None:
                slots[chunk.adapter.slot, chunk.adapter.generation] = chunk.adapter.digest
            token_id = (
                None if chunk.sample is None else (chunk.start * 31 + chunk.sample.seed) % 1000
            )
            results.append(ChunkResult(request_id=chunk.request_id, token_id=token_id))
        step_s = (
            max(costs.weights_s, num_tokens * costs.token_s)
            + context * costs.context_s
            + costs.launch_s
        )
        step_s += sum(self._ranks[digest] for digest in slots.values()) * costs.rank_s
        step_s += (len(plan.swap_out) + len(plan.swap_in) + len(plan.copies)) * costs.page_copy_s
        self._time.advance(step_s)
        self.slot_uses.update(slots)
        self.num_steps += 1
        self.num_tokens += num_tokens
        self.longest_step_s = max(self.longest_step_s, step_s)
        self._observe(plan, self._time.now_s)
        return results

    def close(self) -> None:
        """Nothing to give back."""


class FetchingLoader:
    """Fetches an adapter from the store in a fixed time.

    Args:
        time: What it sleeps in.
        images: Where images are kept.
        slab: The pages of images.
        num_pages: Of each adapter, by digest.
        fetch_s: Seconds of one fetch, packing included.
    """

    def __init__(
        self,
        time: VirtualTime,
        images: HostImages,
        slab: SimulatedSlab,
        num_pages: Mapping[str, int],
        fetch_s: float,
    ) -> None:
        self._time = time
        self.images = images
        self._slab = slab
        self._num_pages = num_pages
        self._fetch_s = fetch_s
        self.num_fetches = 0

    def load(self, ref: AdapterRef, *, is_paced: bool = True) -> HostImage:  # noqa: ARG002 - as the real one
        """Called on a loader's thread."""
        self.num_fetches += 1
        self._time.sleep(self._fetch_s)
        return self.image(ref.digest)

    def image(self, digest: str) -> HostImage:
        """The image of an adapter, at once; the caller adds it to the images."""
        return image_of(digest, self._num_pages[digest], self.images, self._slab)


class CostedCopier:
    """Copies at a fixed bandwidth, and in no time before that is set."""

    def __init__(self, time: VirtualTime) -> None:
        self._time = time
        self.page_copy_s = 0.0
        self.pages_at_once = 0

    def copy_now(self, _sources: Sequence[Any], pages: Sequence[int]) -> None:
        """Never called: a GPU's copies have a thread of their own."""
        raise AssertionError(f"{len(pages)} pages were copied on the engine's thread")

    def fence(self) -> None:
        """Nothing is launched that a copy would have to wait for."""

    def copy(self, _sources: Sequence[Any], pages: Sequence[int], _fence: object) -> None:
        """Called on the copier's thread."""
        self._time.sleep(len(pages) * self.page_copy_s)
