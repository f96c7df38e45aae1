"""How far attention over int8 keys and values is from that over bfloat16; docs/quantisation.md has the figures."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from manylora.benchmarks.engine.kernels import relative_error
from manylora.benchmarks.model_shapes import QWEN
from manylora.config import KvDtype
from manylora.kernels.dispatch import kernels_for
from manylora.kernels.kv_layer import KvLayer
from manylora.kernels.plain.rows import kv_write
from manylora.memory.arena import Arena
from scattered_kv import listed_batch

CPU = torch.device("cpu")
PAGE = Path(__file__).resolve().parents[2] / "docs" / "quantisation.md"
HEADS = [QWEN.num_heads, QWEN.num_kv_heads, QWEN.num_kv_heads]


def decoded(context: int, kv_dtype: KvDtype) -> torch.Tensor:
    """Attention of one row over keys and values that are all normally distributed, [Hq, D]; the same for each dtype."""
    geometry = QWEN.geometry(kv_dtype=kv_dtype)
    arena = Arena(geometry, 1 + geometry.blocks(context), CPU, torch.bfloat16)
    numbers = torch.randn(
        (context, sum(HEADS), QWEN.head_dim), generator=torch.Generator().manual_seed(0)
    )
    q, k, v = torch.split(numbers.to(torch.bfloat16), HEADS, dim=1)
    slots = torch.arange(context) + geometry.page_tokens  # from page 1 on
    kv = KvLayer(*arena.kv(0), arena.kv_scales(0))
    kv_write(k, v, kv, slots)
    pages = list(range(1, arena.num_pages))
    batch = listed_batch([pages], [1], [context], CPU, geometry.page_tokens)
    attend = kernels_for(CPU, torch.bfloat16).paged_attention
    return attend(q[-1:], kv, batch, QWEN.head_dim**-0.5)[0]


@pytest.mark.parametrize(("context", "told"), [(1024, 0.83), (4096, 0.91)])
def test_int8_differs_from_bfloat16_by_what_the_page_says(context: int, told: float) -> None:
    error = relative_error(decoded(context, "int8"), decoded(context, "auto"))
    assert 100 * error == pytest.approx(told, abs=0.05)
    assert f"{told}%" in PAGE.read_text()
