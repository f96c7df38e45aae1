"""The compiled Triton kernels on a device, over the full matrix of cases."""

import pytest
import torch

import scattered_kv
import scattered_lora
from kernel_numerics import assert_rows_close, assert_rows_match
from oracles import reference_kernels
from oracles.sampling_reference import probabilities
from poison import poisoned_memory
from sampling_rows import GREEDY, Parameters, sampling_of
from scattered_kv import AttentionCase, ScatteredKv
from scattered_lora import BF16, F16, F32, LAYER, ScatteredLora, SgmvCase, make_tiles
from silu_rows import extreme_gates
from weft.kernels.attention_batch import AttentionBatch
from weft.kernels.dispatch import Kernels, kernels_for
from weft.kernels.kv_slots import KvSlots
from weft.kernels.plain.rows import both_halves

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
CUDA = torch.device("cuda")
REFERENCE = reference_kernels()
DTYPES = [F32, F16, BF16]


@pytest.fixture(scope="module")
def kernels() -> Kernels:
    return kernels_for(CUDA, BF16)


def apply_lora(kernels: Kernels, operands: ScatteredLora) -> torch.Tensor:
    with poisoned_memory():
        return operands.apply(kernels.sgmv)


def attend(kernels: Kernels, operands: ScatteredKv) -> torch.Tensor:
    with poisoned_memory():
        return operands.attend(kernels.paged_attention)


def randn(shape: tuple[int, ...], dtype: torch.dtype = F32, seed: int = 0) -> torch.Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 2).to(dtype).to(CUDA)


@pytest.mark.parametrize("case", [*scattered_lora.FULL_CASES, *scattered_lora.INTERPRETER_CASES], ids=str)
def test_sgmv_equals_dense_products(kernels: Kernels, case: SgmvCase) -> None:
    operands = ScatteredLora(case, CUDA)
    assert_rows_close(apply_lora(kernels, operands).cpu(), operands.expected())


def test_sgmv_repeats_bit_by_bit(kernels: Kernels) -> None:
    operands = ScatteredLora(SgmvCase(133, "zipf", 4096, (4096, 1024, 1024), BF16), CUDA)
    first = apply_lora(kernels, operands)
    assert all(torch.equal(apply_lora(kernels, operands), first) for _ in range(20))


def test_sgmv_rows_do_not_depend_on_the_other_adapters(kernels: Kernels) -> None:
    operands = ScatteredLora(SgmvCase(32, "identical", 4096, (512,), BF16, ranks=(24, 64, 16)), CUDA)
    alone = apply_lora(kernels, operands)[16:]
    operands.tiles = make_tiles([-1] * 3 + [0] * 5 + [1] * 8 + [2] * 16, 16, 3, CUDA)
    assert torch.equal(apply_lora(kernels, operands)[16:], alone)


def test_a_captured_graph_serves_a_different_mix_of_adapters(kernels: Kernels) -> None:
    case = SgmvCase(16, "uniform", 896, (896, 128, 128), BF16, ranks=(8, 16, 64, 0))
    worlds = [ScatteredLora(case, CUDA, seed) for seed in range(4)]
    room = ScatteredLora(case, CUDA, seed=4)
    arena = room.arena.new_zeros(max(len(world.arena) for world in worlds), room.arena.shape[1])
    x, y = room.x, room.y
    worlds[0].copy_into(room.tables, room.tiles, arena)
    kernels.sgmv(x, y, arena, room.tables, room.tiles, room.site, LAYER)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kernels.sgmv(x, y, arena, room.tables, room.tiles, room.site, LAYER)
    for world in worlds:
        world.copy_into(room.tables, room.tiles, arena)
        x.copy_(world.x)
        y.copy_(world.y)
        graph.replay()
        assert_rows_close(y.cpu(), world.expected())


@pytest.mark.parametrize("case", [*scattered_kv.FULL_CASES, *scattered_kv.INTERPRETER_CASES], ids=str)
def test_attention_equals_the_reference(kernels: Kernels, case: AttentionCase) -> None:
    operands = ScatteredKv(case, CUDA)
    assert_rows_close(attend(kernels, operands), operands.attend(REFERENCE.paged_attention))


def test_attention_repeats_bit_by_bit(kernels: Kernels) -> None:
    operands = ScatteredKv(AttentionCase(((1, 1500), (64, 512), (1, 40)), 32, 8, 128, 16, BF16), CUDA)
    first = attend(kernels, operands)
    assert all(torch.equal(attend(kernels, operands), first) for _ in range(20))


def test_an_arena_beyond_two_to_the_31_elements_is_addressed_right(kernels: Kernels) -> None:
    page_tokens, heads, head_dim, layers = 16, 8, 128, 32
    num_pages = (1 << 31) // (layers * 2 * heads * page_tokens * head_dim) + 8
    arena = torch.zeros((num_pages, layers, 2, heads, page_tokens, head_dim), dtype=BF16, device=CUDA)
    k, v = randn((40, heads, head_dim), BF16), randn((40, heads, head_dim), BF16, 1)
    k_pages, v_pages = arena[:, -1, 0], arena[:, -1, 1]
    table = [num_pages - 1, num_pages - 2, num_pages - 3]
    slots = [table[i // page_tokens] * page_tokens + i % page_tokens for i in range(40)]
    kernels.kv_write(k, v, k_pages, v_pages, KvSlots.build(slots, page_tokens, CUDA))
    assert torch.equal(k_pages[table].transpose(1, 2).flatten(0, 1)[:40], k)
    for rows in (1, 40):
        batch = AttentionBatch.build([table], [rows], [40], CUDA, page_tokens)
        q = randn((rows, 32, head_dim), BF16, 2)
        assert_rows_close(
            kernels.paged_attention(q, k_pages, v_pages, batch, 0.1),
            REFERENCE.paged_attention(q, k_pages, v_pages, batch, 0.1),
        )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 896), (133, 4096), (3, 2049), (7, 14336), (17, 8, 128)], ids=str)
def test_rms_norm_equals_the_reference(kernels: Kernels, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, weight = randn(shape, dtype), randn(shape[-1:], dtype, 1)
    with poisoned_memory():
        actual = kernels.rms_norm(x, weight, 1e-6)
    assert_rows_close(actual, REFERENCE.rms_norm(x, weight, 1e-6))
    if len(shape) == 2:
        normed, stream = kernels.fused_add_rms_norm(x, x.flip(0), weight, 1e-6)
        assert torch.equal(stream, x + x.flip(0))
        assert_rows_close(normed, REFERENCE.rms_norm(stream, weight, 1e-6))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [64, 96, 128])
def test_rope_equals_the_reference(kernels: Kernels, dtype: torch.dtype, head_dim: int) -> None:
    angles = torch.arange(4096.0)[:, None] * torch.logspace(0, -4, head_dim // 2)
    positions = torch.randint(0, 4096, (77,), generator=torch.Generator().manual_seed(0))
    cos, sin = both_halves(angles.cos()[positions].to(CUDA), angles.sin()[positions].to(CUDA))
    fused = randn((77, 48, head_dim), dtype)
    expected = fused.clone()
    kernels.rope(fused[:, :32], fused[:, 32:40], cos, sin)
    REFERENCE.rope(expected[:, :32], expected[:, 32:40], cos, sin)
    assert_rows_close(fused, expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [64, 2049, 14336])
def test_silu_and_mul_equals_the_reference(kernels: Kernels, width: int, dtype: torch.dtype) -> None:
    gate_up = randn((133, 2 * width), dtype) * 4
    with poisoned_memory():
        actual = kernels.silu_and_mul(gate_up)
    assert_rows_close(actual, REFERENCE.silu_and_mul(gate_up))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_large_gates_let_all_through_or_nothing(kernels: Kernels, dtype: torch.dtype) -> None:
    gate_up = extreme_gates(dtype).to(CUDA)
    assert_rows_match(kernels.silu_and_mul(gate_up), REFERENCE.silu_and_mul(gate_up))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_kv_write_stores_exact_bits(kernels: Kernels, dtype: torch.dtype) -> None:
    mapping = torch.randperm(60 * 16, generator=torch.Generator().manual_seed(0))[:100]
    mapping[::7] = -1
    slots = KvSlots.build(mapping.numpy(), 16, CUDA)
    fused = randn((100, 16, 128), dtype)
    actual = torch.zeros((60, 4, 2, 8, 16, 128), dtype=dtype, device=CUDA)
    expected = actual.clone()
    kernels.kv_write(fused[:, :8], fused[:, 8:], actual[:, 2, 0], actual[:, 2, 1], slots)
    REFERENCE.kv_write(fused[:, :8], fused[:, 8:], expected[:, 2, 0], expected[:, 2, 1], slots)
    assert torch.equal(actual, expected)


@pytest.mark.parametrize("vocab_size", [640, 32_000, 151_936])
@pytest.mark.parametrize(
    "parameters",
    [(1.0, 0, 1.0, 0.0), (1.3, 20, 1.0, 0.0), (1.0, 0, 0.9, 0.0), (1.0, 0, 1.0, 0.1), (0.8, 40, 0.9, 0.05)],
    ids=str,
)
def test_draws_follow_the_exact_distribution(kernels: Kernels, parameters: Parameters, vocab_size: int) -> None:
    logits = randn((1, vocab_size)).expand(64, -1)
    uniforms = [(i + 0.5) / 64 for i in range(64)]
    sampling = sampling_of([(parameters, uniform) for uniform in uniforms], CUDA)
    tokens = kernels.sample(logits, sampling)
    assert torch.equal(tokens, kernels.sample(logits, sampling))
    p = probabilities(logits[0].cpu(), *parameters)
    ends, tokens = p.cumsum(0)[tokens.cpu()], tokens.cpu()
    u = torch.tensor(uniforms, dtype=torch.float64)
    assert (u < ends + 1e-4).all()
    assert (u > ends - p[tokens] - 1e-4).all()
    assert (p[tokens] > 0).float().mean() > 0.98  # a bound may round to either side of a token at its very edge


def test_greedy_takes_the_first_of_equals(kernels: Kernels) -> None:
    logits = torch.randint(-3, 3, (40, 151_936), generator=torch.Generator().manual_seed(0)).float()
    sampling = sampling_of([(GREEDY, 0.0)] * 40, CUDA)
    assert torch.equal(kernels.sample(logits.to(CUDA), sampling).cpu(), logits.argmax(-1))


def test_logprobs_equal_the_reference(kernels: Kernels) -> None:
    logits, tokens = randn((9, 32_000)), torch.arange(9, device=CUDA)
    for actual, expected in zip(
        kernels.logprobs(logits, tokens, 5), REFERENCE.logprobs(logits, tokens, 5), strict=True
    ):
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
