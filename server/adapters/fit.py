"""Fit: if these adapters can be on the device all at once, and the KV cache that is left beside them.

Answered from the memory plan and the layout planner alone: it does not matter what is resident now, and idle
adapters reserve nothing. Adapters that do not fit at once can still be served; they take turns. Knows neither HTTP nor
torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from manylora.adapters.base_shape import BaseShape
from manylora.adapters.lora.layout import adapter_pages
from manylora.engine.status import EngineReady
from manylora.memory.geometry import PageGeometry
from manylora.server.adapters.schemas import AdapterFitItem, AdapterFitView, FitNumbers


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """Memory that adapters share with the KV cache."""

    pages: int
    """Pages of the pool that can be handed out."""
    slots: int
    """Most adapters on the device at once."""
    geometry: PageGeometry
    max_model_len: int

    @classmethod
    def of(cls, ready: EngineReady) -> Capacity:
        """The capacity of a running engine."""
        return cls(
            pages=ready.memory.num_pages,
            slots=ready.memory.slots,
            geometry=ready.geometry,
            max_model_len=ready.max_model_len,
        )

    def requests(self, pages: int) -> int:
        """Requests of `max_model_len` tokens that fit into `pages`."""
        return pages // self.geometry.pages(self.max_model_len)


def find_fit(items: Sequence[AdapterFitItem], capacity: Capacity) -> AdapterFitView:
    """Add up what the adapters need; equal digests count once."""
    distinct = {item.digest or index: item for index, item in enumerate(items)}.values()
    pages = _numbers(capacity.pages, sum(item.pages * item.count for item in distinct))
    slots = _numbers(capacity.slots, sum(item.count for item in distinct))
    num_groups = capacity.geometry.num_groups
    # At least one block of KV cache must fit beside them.
    fits = pages.needed + num_groups <= pages.total and slots.needed <= slots.total
    kv_tokens = pages.left // num_groups * capacity.geometry.page_tokens
    needs = (
        f"{_count(slots.needed, 'adapter')} need{'s' if slots.needed == 1 else ''} {pages.needed:,} of "
        f"{pages.total:,} pages and {slots.needed:,} of {slots.total:,} slots."
    )
    requests = (
        f"{_count(capacity.requests(pages.left), 'request')} of {capacity.max_model_len:,} tokens"
    )
    message = (
        f"All fit at once: {needs} Beside them {kv_tokens:,} tokens of KV cache fit, or {requests}."
        if fits
        else f"Not all fit at once: {needs} They can still be served: idle adapters give up their pages, so they take "
        "turns."
    )
    return AdapterFitView(
        fits=fits,
        pages=pages,
        slots=slots,
        kv_tokens_left=kv_tokens,
        adapters=list(items),
        message=message,
    )


def planned_item(
    rank: int, target_modules: Sequence[str], count: int, base: BaseShape, capacity: Capacity
) -> AdapterFitItem:
    """Adapters that are not there yet: of one rank on these modules of every layer.

    Args:
        rank: At least 1.
        target_modules: Names as of `ModuleShape.name`; empty means all.
        count: How many of them.
        base: Shape of the base model.
        capacity: Says how large pages are.
    """
    names = set(target_modules) or {module.name for module in base.modules}
    modules = [index for index, module in enumerate(base.modules) if module.name in names]
    pages = adapter_pages(
        {(layer, index): rank for layer in range(base.num_layers) for index in modules},
        base,
        capacity.geometry,
    )
    parameters = sum(
        base.modules[index].in_features + base.modules[index].out_features for index in modules
    )
    return AdapterFitItem(
        rank=rank,
        target_modules=[base.modules[index].name for index in modules],
        pages=pages,
        waste=waste(parameters * rank * base.num_layers, pages, capacity.geometry),
        count=count,
    )


def waste(parameters: int, pages: int, geometry: PageGeometry) -> float:
    """Share of an adapter's pages that holds no weights: ends of pages, padding of rows and of ranks."""
    return 1 - parameters * geometry.dtype_bytes / (pages * geometry.page_bytes)


def _numbers(total: int, needed: int) -> FitNumbers:
    return FitNumbers(total=total, needed=needed, left=max(total - needed, 0))


def _count(number: int, thing: str) -> str:
    return f"{number:,} {thing}{'' if number == 1 else 's'}"
