"""Fit: if these adapters can be on the device all at once, and the KV cache that is left beside them.

Answered from the memory plan and the layout planner alone: it does not matter what is resident now, and idle
adapters reserve nothing. Adapters that do not fit at once can still be served; they take turns. Knows neither HTTP nor
torch.
"""

from __future__ import annotations

from collections.abc import Sequence

from manylora.adapters.lora.layout import adapter_pages
from manylora.engine.status import EngineReady
from manylora.memory.geometry import PageGeometry
from manylora.server.adapters.schemas import (
    AdapterFitItem,
    AdapterFitView,
    FitNumbers,
    PlannedAdapters,
)


def find_fit(items: Sequence[AdapterFitItem], ready: EngineReady) -> AdapterFitView:
    """Add up what the adapters need; equal digests count once."""
    distinct = {item.digest or index: item for index, item in enumerate(items)}.values()
    pages = _numbers(ready.memory.num_pages, sum(item.pages * item.count for item in distinct))
    slots = _numbers(ready.memory.slots, sum(item.count for item in distinct))
    geometry = ready.geometry
    # At least one block of KV cache must fit beside them.
    fits = pages.needed + geometry.num_groups <= pages.total and slots.needed <= slots.total
    kv_tokens = pages.left // geometry.num_groups * geometry.page_tokens
    needs = (
        f"{_count(slots.needed, 'adapter')} need{'s' if slots.needed == 1 else ''} {pages.needed:,} of "
        f"{pages.total:,} pages and {slots.needed:,} of {slots.total:,} slots."
    )
    requests = (
        f"{_count(requests_in(pages.left, ready), 'request')} of {ready.max_model_len:,} tokens"
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


def planned_item(plan: PlannedAdapters, ready: EngineReady) -> AdapterFitItem:
    """Adapters that are not there yet."""
    base = ready.base
    modules = {
        index: module
        for index, module in enumerate(base.modules)
        if module.name in plan.target_modules
    }
    ranks = {(layer, index): plan.rank for layer in range(base.num_layers) for index in modules}
    pages = adapter_pages(ranks, base, ready.geometry)
    columns = sum(module.in_features + module.out_features for module in modules.values())
    return AdapterFitItem(
        rank=plan.rank,
        target_modules=[module.name for module in modules.values()],
        pages=pages,
        waste=waste(columns * plan.rank * base.num_layers, pages, ready.geometry),
        count=plan.count,
    )


def requests_in(pages: int, ready: EngineReady) -> int:
    """Requests of `max_model_len` tokens that fit into `pages`."""
    return pages // ready.geometry.pages(ready.max_model_len)


def waste(parameters: int, pages: int, geometry: PageGeometry) -> float:
    """Share of an adapter's pages that holds no weights: ends of pages, padding of rows and of ranks."""
    return 1 - parameters * geometry.dtype_bytes / (pages * geometry.page_bytes)


def _numbers(total: int, needed: int) -> FitNumbers:
    return FitNumbers(total=total, needed=needed, left=max(total - needed, 0))


def _count(number: int, thing: str) -> str:
    return f"{number:,} {thing}{'' if number == 1 else 's'}"
