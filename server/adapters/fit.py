"""Would these adapters be on the device all at once, and how much KV cache is left beside them?

Answered from the memory plan and the layout planner alone: it does not matter what is resident now, and idle
adapters reserve nothing. Adapters that do not fit at once can still be served; they take turns. Knows neither HTTP nor
torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from weft.adapters.base_shape import BaseShape
from weft.adapters.lora.layout import adapter_pages
from weft.engine.status import EngineReady
from weft.memory.geometry import PageGeometry
from weft.server.adapters.schemas import AdapterFitItem, AdapterFitView, FitNumbers


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """What the adapters would share with the KV cache."""

    pages: int
    """Pages of the pool that can be handed out."""
    slots: int
    """Most adapters on the device at once."""
    geometry: PageGeometry
    max_model_len: int

    @classmethod
    def of(cls, ready: EngineReady) -> Room:
        """The room of a running engine."""
        return cls(
            pages=ready.memory.num_pages,
            slots=ready.memory.slots,
            geometry=ready.geometry,
            max_model_len=ready.max_model_len,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterFit:
    """The answer."""

    room: Room
    items: tuple[AdapterFitItem, ...]
    pages_needed: int
    slots_needed: int

    @property
    def fits(self) -> bool:
        """Whether all have pages and slots at once, beside at least one block of KV cache."""
        return self.pages_needed + self.room.geometry.num_groups <= self.room.pages and (
            self.slots_needed <= self.room.slots
        )

    @property
    def pages_left(self) -> int:
        """Pages for the KV cache while all are on the device."""
        return max(self.room.pages - self.pages_needed, 0)

    @property
    def slots_left(self) -> int:
        """Adapters that may join them, as far as slots go."""
        return max(self.room.slots - self.slots_needed, 0)

    @property
    def kv_tokens_left(self) -> int:
        """Tokens of KV cache that fit beside them."""
        return self.pages_left // self.room.geometry.num_groups * self.room.geometry.page_tokens

    @property
    def requests_left(self) -> int:
        """Requests of `max_model_len` tokens that fit beside them."""
        return self.pages_left // self.room.geometry.pages(self.room.max_model_len)

    @property
    def least_pages(self) -> int:
        """Pages of the smallest arena that would do, the zero page among them."""
        return 1 + self.pages_needed + self.room.geometry.num_groups

    @property
    def message(self) -> str:
        """The answer in words."""
        adapters = f"{_count(self.slots_needed, 'adapter')} need{'s' if self.slots_needed == 1 else ''}"
        numbers = (
            f"{adapters} {self.pages_needed:,} of {self.room.pages:,} pages "
            f"and {self.slots_needed:,} of {self.room.slots:,} slots"
        )
        if self.fits:
            return (
                f"All fit at once: {numbers}. Beside them {self.kv_tokens_left:,} tokens of KV cache fit, or "
                f"{_count(self.requests_left, 'request')} of {self.room.max_model_len:,} tokens."
            )
        return (
            f"Not all fit at once: {numbers}. They can still be served: idle adapters give up their pages,  "
            "so they take turns."
        )

    def view(self) -> AdapterFitView:
        """The answer as a body."""
        return AdapterFitView(
            fits=self.fits,
            pages=FitNumbers(total=self.room.pages, needed=self.pages_needed, left=self.pages_left),
            slots=FitNumbers(total=self.room.slots, needed=self.slots_needed, left=self.slots_left),
            kv_tokens_left=self.kv_tokens_left,
            adapters=list(self.items),
            message=self.message,
        )


def find_fit(items: Sequence[AdapterFitItem], room: Room) -> AdapterFit:
    """Add up what the adapters need; equal digests count once."""
    distinct = {item.digest or index: item for index, item in enumerate(items)}.values()
    return AdapterFit(
        room=room,
        items=tuple(items),
        pages_needed=sum(item.pages * item.count for item in distinct),
        slots_needed=sum(item.count for item in distinct),
    )


def planned_item(rank: int, target_modules: Sequence[str], count: int, base: BaseShape, room: Room) -> AdapterFitItem:
    """Adapters that are not there yet: of one rank on these modules of every layer.

    Args:
        rank: At least 1.
        target_modules: Names as of `ModuleShape.name`; empty means all.
        count: How many of them.
        base: Shape of the base model.
        room: Says how large pages are.
    """
    names = set(target_modules) or {module.name for module in base.modules}
    modules = [index for index, module in enumerate(base.modules) if module.name in names]
    pages = adapter_pages(
        {(layer, index): rank for layer in range(base.num_layers) for index in modules}, base, room.geometry
    )
    parameters = sum(base.modules[index].in_features + base.modules[index].out_features for index in modules)
    return AdapterFitItem(
        rank=rank,
        target_modules=[base.modules[index].name for index in modules],
        pages=pages,
        waste=waste(parameters * rank * base.num_layers, pages, room.geometry),
        count=count,
    )


def waste(parameters: int, pages: int, geometry: PageGeometry) -> float:
    """Share of an adapter's pages that holds no weights: ends of pages, padding of rows and of ranks."""
    return 1 - parameters * geometry.dtype_bytes / (pages * geometry.page_bytes)


def _count(number: int, thing: str) -> str:
    return f"{number:,} {thing}{'' if number == 1 else 's'}"
