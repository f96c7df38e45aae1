"""FlashInfer's attention over the same strided pages as Manylora's, beside it, where FlashInfer is installed."""

from __future__ import annotations

import importlib
from dataclasses import replace
from functools import partial

import torch

from manylora.benchmarks.engine.kernels import DTYPE, relative_error
from manylora.benchmarks.gpu.case_log import Cases, Figures
from manylora.benchmarks.gpu.kernels import CLOSE, PROMPTS, result, timed
from manylora.benchmarks.gpu.setup import Setup
from manylora.errors import EngineError

WORKSPACE_BYTES = 256 << 20


def cases(setup: Setup) -> Cases:
    """Decode attention and prompts."""
    long = setup.sized(1024, 64)
    decodes = [(rows, context, 1) for context in (long, 4 * long) for rows in (32, 1, 64)]
    prompts = [(1, tokens + before, tokens) for tokens, before in PROMPTS[: setup.sized(3, 1)]]
    return {
        f"{rows} rows, {query} of {context:,} tokens": partial(_beside, setup, rows, context, query)
        for rows, context, query in decodes + prompts
    }


def _beside(setup: Setup, rows: int, context: int, query: int) -> Figures:
    """Manylora's time, with FlashInfer's as `yardstick`. Its kernels for prompts compute decode rows too."""
    try:
        flashinfer = importlib.import_module("flashinfer")
    except ImportError as error:
        return {"absent": f"FlashInfer cannot be imported: {error}"}
    bench, model, geometry = setup.bench, setup.model, setup.bench.geometry
    blocks = geometry.blocks(context)
    pages = range(1, 1 + rows * blocks)
    q = bench.queries(rows * query)
    starts = torch.arange(rows + 1, dtype=torch.int32, device=setup.device)
    indices = torch.tensor(pages, dtype=torch.int32, device=setup.device)
    last = torch.full_like(starts[1:], context - (blocks - 1) * geometry.page_tokens)
    workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=setup.device)
    sizes = (model.num_heads, model.num_kv_heads, model.head_dim, geometry.page_tokens)
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "HND")
    wrapper.plan(
        starts * query, starts * blocks, indices, last, *sizes, causal=True, q_data_type=DTYPE
    )
    ours = bench.attention(rows, context, query, pages=pages, q=q)
    theirs = replace(ours, run=lambda call: wrapper.run(q, bench.arena.kv(call % bench.num_layers)))
    difference = relative_error(result(theirs), result(ours))
    if not difference <= CLOSE:
        raise EngineError(f"FlashInfer's attention differs from Manylora's by {difference:.2%}")
    found, yardstick = (timed(setup, [work]) for work in (ours, theirs))
    return {**found, "yardstick": yardstick["measured"], "difference": difference}
