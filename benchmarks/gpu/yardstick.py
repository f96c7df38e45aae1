"""FlashInfer's attention over the same strided pages as Weft's, beside it, where FlashInfer is installed."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from weft.benchmarks.engine.kernels import DTYPE, KernelBench, Work, relative_error
from weft.benchmarks.gpu.case_log import Case, Figures
from weft.benchmarks.gpu.kernels import PROMPTS, bench_of, timed
from weft.benchmarks.gpu.machine import Setup
from weft.errors import EngineError

WORKSPACE_BYTES = 256 << 20
CLOSE = 2**-7
"""Relative error within which both agree."""


def cases(setup: Setup) -> list[Case]:
    """Decode attention and prompts."""
    long = setup.sized(1024, 64)
    decodes = [(rows, long * times, 1) for times in (1, 4) for rows in (32, 1, 64)]
    prompts = [(1, tokens + before, tokens) for tokens, before in PROMPTS[: setup.sized(3, 1)]]
    return [
        Case(f"{rows} rows, {query} of {context:,} tokens", partial(_beside, setup, rows, context, query))
        for rows, context, query in decodes + prompts
    ]


def _beside(setup: Setup, rows: int, context: int, query: int, _: Mapping[str, Figures]) -> Figures:
    """Weft's time, with FlashInfer's as `yardstick`."""
    try:
        flashinfer = importlib.import_module("flashinfer")
    except ImportError as error:
        return {"absent": f"FlashInfer cannot be imported: {error}"}
    bench = bench_of(setup)
    q = bench.queries(rows * query)
    ours = bench.attention(rows, context, query, q=q)
    run = flashinfer_attention(flashinfer, bench, q, context, query)
    with torch.inference_mode():
        difference = relative_error(torch.as_tensor(run(0)), torch.as_tensor(ours.run(0)))
    if not difference <= CLOSE:
        raise EngineError(f"FlashInfer's attention differs from Weft's by {difference:.2%}")
    theirs = timed(setup, Work(ours.name, run, ours.num_bytes, ours.flops))["measured"]
    found = timed(setup, ours)
    return {**found, "yardstick": theirs, "ratio": found["measured"] / theirs, "difference": difference}


def flashinfer_attention(
    flashinfer: Any,  # noqa: ANN401 - an optional module
    bench: KernelBench,
    q: torch.Tensor,
    context: int,
    query: int,
) -> Callable[[int], object]:
    """The same attention as `KernelBench.attention` by FlashInfer; planned once, then only run."""
    model, geometry, device = bench.model, bench.geometry, q.device
    rows, blocks = len(q) // query, geometry.blocks(context)
    starts = torch.arange(rows + 1, dtype=torch.int32, device=device)
    pages = torch.arange(1, rows * blocks + 1, dtype=torch.int32, device=device) % (bench.arena.num_pages - 1) + 1
    last = torch.full_like(starts[1:], context - (blocks - 1) * geometry.page_tokens)
    workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
    sizes = (model.num_heads, model.num_kv_heads, model.head_dim, geometry.page_tokens)
    dtypes = {"q_data_type": DTYPE, "kv_data_type": DTYPE}
    if query == 1:
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "HND")
        wrapper.plan(starts * blocks, pages, last, *sizes, **dtypes)
    else:
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "HND")
        wrapper.plan(starts * query, starts * blocks, pages, last, *sizes, causal=True, **dtypes)
    return lambda call: wrapper.run(q, bench.arena.kv(call % bench.num_layers))
