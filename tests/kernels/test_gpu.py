"""What only a device can show of the compiled Triton kernels; their contract is in the suite beside this file."""

import pytest
import torch

from implementations import BF16, F16, F32, TRITON
from numerics import assert_rows_close
from oracles import ORACLES
from scattered_lora import LAYER, ScatteredLora, SgmvCase
from weft.kernels.attention_batch import AttentionBatch, KvSlots
from weft.kernels.sampling import SamplingTensors

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
CUDA = torch.device("cuda")


def test_a_captured_graph_serves_a_different_mix_of_adapters() -> None:
    case = SgmvCase(16, "uniform", 896, (896, 128, 128), BF16, ranks=(8, 16, 64, 0))
    worlds = [ScatteredLora(case, CUDA, seed) for seed in range(4)]
    room = ScatteredLora(case, CUDA, seed=4)
    arena = room.arena.new_zeros(max(len(world.arena) for world in worlds), room.arena.shape[1])
    x, y, sgmv = room.x, room.y, TRITON.make().sgmv
    worlds[0].copy_into(room.tables, room.tiles, arena)
    sgmv(x, y, arena, room.tables, room.tiles, room.site, LAYER)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        sgmv(x, y, arena, room.tables, room.tiles, room.site, LAYER)
    for world in worlds:
        world.copy_into(room.tables, room.tiles, arena)
        x.copy_(world.x)
        y.copy_(world.y)
        graph.replay()
        assert_rows_close(y.cpu(), world.expected())


def test_an_arena_beyond_two_to_the_31_elements_is_addressed_right() -> None:
    page_tokens, heads, head_dim, layers = 16, 8, 128, 32
    num_pages = (1 << 31) // (layers * 2 * heads * page_tokens * head_dim) + 8
    arena = torch.zeros((num_pages, layers, 2, heads, page_tokens, head_dim), dtype=BF16, device=CUDA)
    k, v = TRITON.randn((40, heads, head_dim), BF16), TRITON.randn((40, heads, head_dim), BF16, 1)
    k_pages, v_pages = arena[:, -1, 0], arena[:, -1, 1]
    table = [num_pages - 1, num_pages - 2, num_pages - 3]
    slots = [table[i // page_tokens] * page_tokens + i % page_tokens for i in range(40)]
    TRITON.kernels.kv_write(k, v, k_pages, v_pages, KvSlots.build(slots, page_tokens, CUDA))
    assert torch.equal(k_pages[table].transpose(1, 2).flatten(0, 1)[:40], k)
    for rows in (1, 40):
        batch = AttentionBatch.build([table], [rows], [40], CUDA, page_tokens)
        q = TRITON.randn((rows, 32, head_dim), BF16, 2)
        assert_rows_close(
            TRITON.kernels.paged_attention(q, k_pages, v_pages, batch, 0.1, None),
            ORACLES.paged_attention(q, k_pages, v_pages, batch, 0.1, None),
        )


@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=str)
@pytest.mark.parametrize("shape", [(133, 4096), (7, 14336), (17, 8, 128)], ids=str)
def test_large_norms_and_gates_equal_the_oracle(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, weight = TRITON.randn(shape, dtype), TRITON.randn(shape[-1:], dtype, 1)
    assert_rows_close(TRITON.kernels.rms_norm(x, weight, 1e-6), ORACLES.rms_norm(x, weight, 1e-6))
    gate_up = x.flatten(1)
    assert_rows_close(TRITON.kernels.silu_and_mul(gate_up), ORACLES.silu_and_mul(gate_up))


def test_greedy_takes_the_first_of_equals_of_a_large_vocabulary() -> None:
    logits = torch.randint(-3, 3, (40, 151_936), generator=torch.Generator().manual_seed(0)).float()
    rows = ([0.0] * 40, [0] * 40, [1.0] * 40, [0.0] * 40, [0.0] * 40)
    sampling = SamplingTensors.build(*rows, CUDA)
    assert torch.equal(TRITON.kernels.sample(logits.to(CUDA), sampling).cpu(), logits.argmax(-1))
