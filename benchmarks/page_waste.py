"""How much of their pages do adapters waste?

    python -P -m weft.benchmarks.page_waste [--json benchmarks/results/page-waste.json]

Plans adapters of several ranks on the shapes of three models with the planner that the engine uses, and compares the
pages they get with the bytes of their rows: what is lost to padding of rows and ranks, and to ends of pages. Nothing
is measured, so the figures are the same on every machine. Prints a table and, last, one JSON line.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from weft.adapters.base_shape import MODULE_PATHS, BaseShape
from weft.adapters.layout import LAYOUT_VERSION, adapter_pages
from weft.benchmarks.model_shapes import DTYPE_BYTES, MODELS, ModelShape
from weft.benchmarks.report import provenance, without_nan, write_result

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


def all_waste() -> list[Waste]:
    """Every kind on every model."""
    return [waste_of(model, kind) for model in MODELS for kind in KINDS]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run from the command line."""
    parser = argparse.ArgumentParser(
        prog="python -P -m weft.benchmarks.page_waste",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", type=Path, default=None, help="write the result here")
    options = parser.parse_args(arguments)
    found = all_waste()
    result = {"benchmark": "page-waste", **provenance(), "layout_version": LAYOUT_VERSION, "adapters": _rows(found)}
    if options.json:
        write_result(options.json, result)
    _print(found, result)
    return 0


def _rows(found: Sequence[Waste]) -> list[dict[str, Any]]:
    return [
        {
            "model": each.model,
            "adapter": each.adapter,
            "page_bytes": each.page_bytes,
            "pages": each.pages,
            "least_pages": each.least_pages,
            "content_bytes": each.content_bytes,
            "waste": each.waste,
        }
        for each in found
    ]


def _print(found: Sequence[Waste], result: dict[str, Any]) -> None:
    table = Table(title="pages of an adapter, and the share of them that holds no weights", title_justify="left")
    table.add_column("")
    for model in MODELS:
        kib = model.geometry().page_bytes // 1024
        table.add_column(f"{model.name}\n{kib:,} KiB pages", justify="right")
    by_place = {(each.model, each.adapter): each for each in found}
    for kind in KINDS:
        cells = (by_place[model.name, kind.name] for model in MODELS)
        table.add_row(kind.name, *(f"{each.pages}  {each.waste:6.1%}" for each in cells))
    Console().print(table)
    print(json.dumps(without_nan(result)))


if __name__ == "__main__":
    sys.exit(main())
