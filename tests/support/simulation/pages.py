"""Pages that know what was written into them, on the device and on the host."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple

from manylora.memory.arena import HostSlab
from manylora.memory.pool import PagePool

Fail = Callable[[str], None]
"""Takes note of something that must not happen."""


class Weights(NamedTuple):
    """One page of an adapter."""

    digest: str
    number: int


@cache
def weights_of(digest: str, num_pages: int) -> list[Weights]:
    """All pages of an adapter."""
    return [Weights(digest, number) for number in range(num_pages)]


@dataclass(slots=True)
class Keys:
    """One KV block of a layer group; all zeros behind `cells`."""

    group: int = -1
    """-1 before the first write."""
    cells: list[int] = field(default_factory=list)

    def copy(self) -> Keys:
        return Keys(self.group, list(self.cells))


Content = Weights | Keys | None
"""None is poison: a page that was freed and not written since."""


@dataclass(slots=True, eq=False)
class HostPage:
    """Stands in for a tensor of the slab."""

    content: Content = None


class SimulatedSlab(HostSlab):
    """The real slab, over pages that lose their content when freed."""

    def __init__(self, num_pages: int) -> None:
        super().__init__(num_pages, 1, pinned=False)
        pages: Any = [HostPage() for _ in range(num_pages)]
        self.pages = pages
        self.host_pages: list[HostPage] = pages
        self._pool = PagePool(num_pages, self._lose, first_page=0)

    def _lose(self, pages: Sequence[int]) -> None:
        for page in pages:
            self.host_pages[page].content = None


class DevicePages:
    """The arena."""

    def __init__(self, num_pages: int) -> None:
        self.contents: list[Content] = [None] * num_pages
        self.contents[0] = Keys()

    def poison(self, pages: Iterable[int]) -> None:
        """Pages became free."""
        for page in pages:
            self.contents[page] = None
