"""How much of their pages do adapters leave empty?

    weft bench waste [--json benchmarks/results/page-waste.json]

Plans adapters of several ranks on the shapes of three models with the planner that the engine uses, and compares the
pages they get with the bytes of their rows: what is lost to padding of rows and ranks, and to ends of pages. Nothing
is measured, so the figures are the same on every machine. Prints a table and, last, one JSON line.
"""

from __future__ import annotations

import argparse
import itertools
from typing import Any

from weft.adapters.lora.layout import LAYOUT_VERSION, adapter_pages
from weft.benchmarks.model_shapes import ALL_LINEAR, DTYPE_BYTES, MODELS, QUERY_AND_VALUE, ModelShape

KINDS = ((QUERY_AND_VALUE, 8), *((ALL_LINEAR, rank) for rank in (8, 16, 32, 64, 128)))
"""Modules that an adapter changes in every layer, and its rank."""


def waste_of(model: ModelShape, modules: tuple[int, ...], rank: int) -> dict[str, Any]:
    """Plan one adapter and count.

    Returns:
        Among other figures, `least_pages`, which the bytes would fill if they could be cut anywhere; `content_bytes`
        of the rows themselves, without any padding; and `waste`, the share of the pages that holds no row.
    """
    base, geometry = model.base(), model.geometry()
    row_bytes = sum((base.modules[m].in_features + base.modules[m].out_features) * DTYPE_BYTES for m in modules)
    content_bytes = row_bytes * rank * base.num_layers
    ranks = dict.fromkeys(itertools.product(range(base.num_layers), modules), rank)
    pages = adapter_pages(ranks, base, geometry)
    return {
        "model": model.name,
        "adapter": f"{'all linear' if modules == ALL_LINEAR else 'q, v'}, rank {rank}",
        "page_bytes": geometry.page_bytes,
        "pages": pages,
        "least_pages": -(-content_bytes // geometry.page_bytes),
        "content_bytes": content_bytes,
        "waste": 1 - content_bytes / (pages * geometry.page_bytes),
    }


def measure(_options: argparse.Namespace) -> dict[str, Any]:
    """Plan every kind of adapter on every model."""
    found = [waste_of(model, modules, rank) for model, (modules, rank) in itertools.product(MODELS, KINDS)]
    table = [{name: each[name] for name in ("model", "adapter", "pages", "least_pages", "waste")} for each in found]
    return {"layout_version": LAYOUT_VERSION, "adapters": found, "table": table}
