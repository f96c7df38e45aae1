"""How often Triton compiles its kernels while an engine serves: not again because of what a step has."""

from __future__ import annotations

import random

import pytest
import torch

from fake_triton import fake_triton
from implementations import BF16, CPU, INTERPRETS, TRITON
from manylora.kernels.kv_layer import KvLayer
from scattered_kv import listed_batch

pytestmark = pytest.mark.skipif(INTERPRETS, reason="the interpreter compiles nothing")
pytest.importorskip("triton", reason="needs Triton, which is there on Linux")
META = torch.device("meta")
PAGE_TOKENS = 16


def test_the_fake_counts_launches_and_what_they_are_compiled_for() -> None:
    kernels = TRITON.make()
    with fake_triton() as fake:
        for width in (4096, 4096, 512):
            kernels.silu_and_mul(torch.empty((3, 2 * width), dtype=BF16, device=META))
    assert fake.counts == {"silu_and_mul_kernel": 3}
    assert fake.variants == {"silu_and_mul_kernel": 2}
    with fake_triton() as again:
        assert not again.launches
        kernels.silu_and_mul(torch.empty((3, 1024), dtype=BF16, device=META))
    assert again.variants == {"silu_and_mul_kernel": 1}, "nothing is left of the fake before"
    assert len(fake.launches) == 3


def test_attention_is_compiled_once_for_all_batches_and_contexts() -> None:
    """As eager steps launch it: index tensors lie at any multiple of 4 bytes."""
    kernels, draw = TRITON.make(), random.Random(0)
    arena = torch.empty((1, 2, 2, 8, PAGE_TOKENS, 128), dtype=BF16)
    table = [0] * (131_072 // PAGE_TOKENS)
    with fake_triton() as fake:
        for size in range(1, 65):
            longest = draw.choice((1, 200, 257, 4_000, 131_072))
            contexts = [draw.randint(1, longest) for _ in range(size)]
            rows = [draw.choice((1, 1, 2, 8, 9, 100)) for _ in range(size)]
            contexts = [max(context, count) for context, count in zip(contexts, rows, strict=True)]
            batch = listed_batch([table] * size, rows, contexts, CPU, PAGE_TOKENS)
            q = torch.empty((sum(rows), 34, 128), dtype=BF16)[:, :32]
            kernels.paged_attention(q, KvLayer(arena[:, 1, 0], arena[:, 1, 1]), batch, 0.1)
    assert fake.variants == {"item_kernel": 1, "chunk_kernel": 1}
    assert fake.counts["item_kernel"] > 50
    assert len({launch.grid for launch in fake.launches if launch.kernel == "item_kernel"}) == 1
