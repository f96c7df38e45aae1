"""How much of their pages do adapters waste?

    weft bench waste [--json benchmarks/results/page-waste.json]

Plans adapters of several ranks on the shapes of three models with the planner that the engine uses, and compares the
pages they get with the bytes of their rows: what is lost to padding of rows and ranks, and to ends of pages. Nothing
is measured, so the figures are the same on every machine. Prints a table and, last, one JSON line.
"""

from __future__ import annotations

import argparse
import itertools
from dataclasses import asdict, dataclass
from typing import Any

from weft.adapters.base_shape import MODULE_PATHS, BaseShape
from weft.adapters.layout import LAYOUT_VERSION, adapter_pages
from weft.benchmarks.model_shapes import DTYPE_BYTES, MODELS, ModelShape

ALL_LINEAR = tuple(range(len(MODULE_PATHS)))
QUERY_AND_VALUE = (0, 2)
MAX_WASTE = 0.05
"""Of adapters on all linear layers, from rank 16 on."""
MAX_SMALL_WASTE = 0.20
"""Of adapters of rank 8 on queries and values alone."""


@dataclass(frozen=True, slots=True)
class Kind:
    """Adapters of one rank on one choice of modules, in every layer."""

    modules: tuple[int, ...]
    rank: int

    @property
    def name(self) -> str:
        """For tables."""
        return f"{'all linear' if self.modules == ALL_LINEAR else 'q, v'}, rank {self.rank}"

    def ranks(self, base: BaseShape) -> dict[tuple[int, int], int]:
        """Rank by (layer, module)."""
        return {(layer, module): self.rank for layer in range(base.num_layers) for module in self.modules}


KINDS = (Kind(QUERY_AND_VALUE, 8), *(Kind(ALL_LINEAR, rank) for rank in (8, 16, 32, 64, 128)))


@dataclass(frozen=True, slots=True)
class Waste:
    """One kind of adapter on one model."""

    model: str
    adapter: str
    page_bytes: int
    pages: int
    least_pages: int
    """Pages that the bytes would fill if they could be cut anywhere."""
    content_bytes: int
    """Of the rows themselves, without any padding."""

    @property
    def waste(self) -> float:
        """Share of the pages that holds no row."""
        return 1 - self.content_bytes / (self.pages * self.page_bytes)


def waste_of(model: ModelShape, kind: Kind) -> Waste:
    """Plan one adapter and count."""
    base, geometry = model.base(), model.geometry()
    row_bytes = sum((base.modules[m].in_features + base.modules[m].out_features) * DTYPE_BYTES for m in kind.modules)
    content = row_bytes * kind.rank * base.num_layers
    return Waste(
        model=model.name,
        adapter=kind.name,
        page_bytes=geometry.page_bytes,
        pages=adapter_pages(kind.ranks(base), base, geometry),
        least_pages=-(-content // geometry.page_bytes),
        content_bytes=content,
    )


def add_options(_parser: argparse.ArgumentParser) -> None:
    """It has none."""


def measure(_options: argparse.Namespace) -> dict[str, Any]:
    """Every kind of adapter on every model."""
    found = [
        asdict(each) | {"waste": each.waste} for each in itertools.starmap(waste_of, itertools.product(MODELS, KINDS))
    ]
    table = [{name: each[name] for name in ("model", "adapter", "pages", "least_pages", "waste")} for each in found]
    return {"layout_version": LAYOUT_VERSION, "adapters": found, "table": table}
