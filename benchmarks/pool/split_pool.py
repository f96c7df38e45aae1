"""An engine with its pages divided for good: one half for KV cache, the other for adapters.

What Weft does not do, built of the product's engine so that the one pool can be measured against it. Both halves lie in
one arena, each with a pool and an evictor of its own; neither side gives pages to the other, nor leaves some to it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

from weft.adapters.residency.residency import Residency
from weft.config import Config
from weft.engine import build
from weft.memory.eviction import Evictor, PageCosts, eviction_policy
from weft.memory.pool import PagePool


def build_split_engine(config: Config, *, notify: Callable[[], None], costs: PageCosts) -> build.EngineParts:
    """An engine as `build_engine` makes it, but for the two pools; without a prefix cache.

    Args:
        config: Of an engine that shares its pages; `memory.gib` and all else mean the same.
        notify: Called when a load is done.
        costs: What it takes to have a page again.
    """

    def kv_half(num_pages: int, *_: object, **__: object) -> PagePool:
        return PagePool(1 + (num_pages - 1) // 2)  # page 0 is never handed out

    class HalfResidency(Residency):
        """Adapters with pages of their own, which leave none for running requests to grow into."""

        def __init__(self, *parts: Any, **options: Any) -> None:  # noqa: ANN401 - whatever the residency takes
            loader, copier, kv_pool, images, tables, _, costs = parts
            first_page = 1 + kv_pool.capacity
            pool = PagePool(first_page + kv_pool.capacity, first_page=first_page)
            evictor = Evictor(pool, eviction_policy(config.memory.eviction))
            super().__init__(loader, copier, pool, images, tables, evictor, costs, **options)

        @property
        def reserve_pages(self) -> int:
            return 0

        @reserve_pages.setter
        def reserve_pages(self, value: int) -> None:
            pass

    with patch.object(build, "PagePool", kv_half), patch.object(build, "Residency", HalfResidency):
        return build.build_engine(config, notify=notify, costs=costs)
