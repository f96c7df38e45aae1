"""What only a device can show of the compiled Triton kernels; their contract is in the suite beside this file."""

import pytest
import torch

from implementations import BF16, TRITON
from manylora.kernels.attend import Rotation
from manylora.kernels.kv_layer import KvLayer
from manylora.kernels.sampling import RowSampling, sampling_words
from numerics import assert_rows_close
from oracles import ORACLES
from scattered_kv import listed_batch
from scattered_lora import ScatteredLora, SgmvCase

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CUDA = torch.device("cuda")


def test_a_captured_graph_serves_a_different_mix_of_adapters() -> None:
    case = SgmvCase(16, "uniform", 896, (896, 128, 128), BF16, ranks=(8, 16, 64, 0))
    worlds = [ScatteredLora(case, CUDA, seed) for seed in range(4)]
    room = ScatteredLora(case, CUDA, seed=4)
    arena = room.arena.new_zeros(max(len(world.arena) for world in worlds), room.arena.shape[1])
    x, y, sgmv = room.x, room.y, TRITON.make().sgmv
    worlds[0].copy_into(room.tables, room.tiles, arena)
    sgmv(x, y, room.operands()._replace(arena_elements=arena))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        sgmv(x, y, room.operands()._replace(arena_elements=arena))
    for world in worlds:
        world.copy_into(room.tables, room.tiles, arena)
        x.copy_(world.x)
        y.copy_(world.y)
        graph.replay()
        assert_rows_close(y.cpu(), world.expected())


def test_a_captured_graph_samples_as_is_asked_later() -> None:
    filters = [
        RowSampling(0.0),
        RowSampling(1.0, 40, 0.9, 0.05, 0.3),
        RowSampling(0.7, 0, 0.95, 0.0, 0.999),
    ]
    steps = [[filters[(row + step) % 3] for row in range(8)] for step in range(3)]
    logits, out = (
        torch.empty((8, 128_256), device=CUDA),
        torch.empty(8, dtype=torch.int32, device=CUDA),
    )
    words = torch.from_numpy(sampling_words(steps[0])).to(CUDA)
    sample, columns = TRITON.make().sample, words
    sample(logits.normal_(), columns, out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        sample(logits, columns, out)
    for step, rows in enumerate(steps):
        logits.normal_(std=3.0 + step)
        logits[step, 5] = torch.nan
        words.copy_(torch.from_numpy(sampling_words(rows)))
        graph.replay()
        assert torch.equal(out, sample(logits, columns))
        for row in range(8):
            alone = torch.from_numpy(sampling_words(rows[row : row + 1])).to(CUDA)
            assert torch.equal(out[row : row + 1], sample(logits[row : row + 1], alone))


def test_an_arena_beyond_two_to_the_31_elements_is_addressed_right() -> None:
    page_tokens, heads, head_dim, layers = 16, 8, 128, 32
    num_pages = (1 << 31) // (layers * 2 * heads * page_tokens * head_dim) + 8
    arena = torch.zeros(
        (num_pages, layers, 2, heads, page_tokens, head_dim), dtype=BF16, device=CUDA
    )
    kv = KvLayer(arena[:, -1, 0], arena[:, -1, 1])
    table = [num_pages - 1, num_pages - 2, num_pages - 3]
    slots = torch.tensor(
        [table[i // page_tokens] * page_tokens + i % page_tokens for i in range(40)], device=CUDA
    )
    qkv = TRITON.randn((40, 48 * head_dim), BF16)
    k = qkv.view(40, 48, head_dim)[:, 32:40].clone()
    angles = torch.zeros((1, head_dim // 2), device=CUDA)
    rotation = Rotation(
        angles.cos(), angles.sin(), torch.zeros(40, dtype=torch.int32, device=CUDA)
    )  # none at all
    batch = listed_batch([table], [40], [40], CUDA, page_tokens)
    TRITON.kernels.attend(qkv, None, rotation, kv, slots, batch, 0.1)
    assert torch.equal(kv.k[table].transpose(1, 2).flatten(0, 1)[:40], k)
    for rows in (1, 40):
        batch = listed_batch([table], [rows], [40], CUDA, page_tokens)
        q = TRITON.randn((rows, 32, head_dim), BF16, 2)
        assert_rows_close(
            TRITON.kernels.paged_attention(q, kv, batch, 0.1),
            ORACLES.paged_attention(q, kv, batch, 0.1),
        )
