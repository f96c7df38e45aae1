"""Memory is divided by what is free, and a machine that is too small is told with the numbers."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fake_engine import DEMO_MODEL, demo_ready
from manylora.adapters.base_shape import BaseShape
from manylora.adapters.lora.layout import adapter_pages, slot_bytes
from manylora.adapters.lora.step import AdapterTables
from manylora.config import (
    GIB,
    MAX_SLOTS,
    AdapterConfig,
    Config,
    MemoryConfig,
    ModelConfig,
    SchedulerConfig,
    Weights,
)
from manylora.engine.execution import memory_plan
from manylora.engine.execution.memory_plan import (
    MIN_SLOTS,
    TABLE_DIVISOR,
    FreeMemory,
    check_start,
    format_plan,
    free_memory,
    max_model_len,
    plan_memory,
)
from manylora.engine.model.spec import (
    DecoderSpec,
    base_shape,
    decoder_spec,
    model_geometry,
    read_spec,
)
from manylora.engine.status import MemoryPlan
from manylora.errors import ConfigError
from manylora.memory.geometry import PageGeometry, page_geometry
from real_models import real_config

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
QWEN_05B = {
    "architectures": ["Qwen2ForCausalLM"],
    "vocab_size": 32_000,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32_768,
    "tie_word_embeddings": True,
}
SPEC: DecoderSpec = decoder_spec(QWEN_05B)
BASE: BaseShape = base_shape(SPEC, "sha256:" + "0" * 64)
GEOMETRY: PageGeometry = page_geometry(
    num_layers=SPEC.num_layers,
    num_kv_heads=SPEC.num_kv_heads,
    head_dim=SPEC.head_dim,
    dtype_bytes=2,
    largest_row_features=BASE.largest_row_features,
)
WEIGHT_BYTES = 2 * SPEC.num_parameters
PACKED_HEAD_BYTES = 2 * 32_000 * 896


def plan(
    device: torch.device,
    free_gib: float,
    *,
    max_len: int | None = None,
    weights: Weights = "auto",
    adapter: AdapterConfig = AdapterConfig(),  # noqa: B008 - it is frozen
    scheduler: SchedulerConfig = SchedulerConfig(),  # noqa: B008 - it is frozen
    cuda_graphs: bool = True,
    **memory: float,
) -> MemoryPlan:
    model = ModelConfig(path="m", weights=weights, max_model_len=max_len, cuda_graphs=cuda_graphs)
    own = MemoryConfig(**memory)  # type: ignore[arg-type]
    config = Config(model=model, memory=own, adapter=adapter, scheduler=scheduler)
    free = FreeMemory(int(free_gib * GIB), int(free_gib * GIB))
    return plan_memory(config, SPEC, BASE, GEOMETRY, free, on_cpu=device.type == "cpu")


def plan_llama_8b(free_gib: float, gib: float | None = None) -> MemoryPlan:
    """The plan of a GPU with the model that most people would try first."""
    spec = decoder_spec(real_config("Llama-3-8B"))
    base = base_shape(spec, "")
    config = Config(model=ModelConfig(path="m"), memory=MemoryConfig(gib=gib))
    free = FreeMemory(int(free_gib * GIB), 64 * GIB)
    return plan_memory(
        config, spec, base, model_geometry(spec, base, 2, "auto"), free, on_cpu=False
    )


def test_a_cpu_gives_a_quarter_of_what_the_weights_leave() -> None:
    planned = plan(CPU, 8)
    left = 8 * GIB - WEIGHT_BYTES - PACKED_HEAD_BYTES
    assert planned.weight_bytes == WEIGHT_BYTES + PACKED_HEAD_BYTES
    assert left // 4 - GEOMETRY.page_bytes < planned.arena_bytes <= left // 4
    assert planned.num_pages == planned.arena_bytes // GEOMETRY.page_bytes - 1
    assert planned.kv_tokens == planned.num_pages * GEOMETRY.page_tokens
    assert planned.host_pages == left // 8 // GEOMETRY.page_bytes
    assert planned.rank16_adapters == planned.num_pages // planned.rank16_pages


def test_there_are_slots_for_as_many_small_adapters_as_the_pool_may_hold() -> None:
    ranks = {(layer, module): 8 for layer in range(24) for module in (0, 2)}
    planned = plan(CPU, 256)
    assert [BASE.modules[module].name for module in (0, 2)] == ["q_proj", "v_proj"]
    assert planned.slots == planned.num_pages // adapter_pages(ranks, BASE, GEOMETRY) > 256
    assert planned.table_bytes <= planned.arena_bytes // TABLE_DIVISOR


def test_a_small_pool_has_the_least_number_of_slots_and_a_huge_one_the_most() -> None:
    assert plan(CPU, 8, gib=0.1).slots == MIN_SLOTS
    assert plan(CUDA, 4000).slots == MAX_SLOTS


def test_tables_of_large_ranks_bound_the_slots() -> None:
    planned = plan(CPU, 256, adapter=AdapterConfig(max_rank=256))
    assert MIN_SLOTS < planned.slots < plan(CPU, 256).slots
    assert (
        planned.table_bytes
        == planned.slots * slot_bytes(BASE, 256)
        <= planned.arena_bytes // TABLE_DIVISOR
    )


def test_slots_that_are_asked_for_are_given_and_tables_that_do_not_fit_are_refused() -> None:
    planned = plan(CPU, 256, adapter=AdapterConfig(slots=100))
    assert (planned.slots, planned.rank16_adapters) == (100, 100)  # pages would do for more
    tables = AdapterTables(100, BASE, 64, GEOMETRY, CPU)
    assert planned.table_bytes == sum(
        part.nbytes for part in (tables.offsets, tables.ranks, tables.scalings)
    )
    with pytest.raises(ConfigError, match="are free"):
        plan(CPU, 5.7, gib=4, host_gib=0.5, adapter=AdapterConfig(slots=MAX_SLOTS))


@pytest.mark.parametrize("dtype_bytes", [2, 4])
def test_the_size_that_a_plan_has_gives_the_same_plan_again(dtype_bytes: int) -> None:
    spec, free = read_spec(DEMO_MODEL), FreeMemory(GIB, GIB)
    base = base_shape(spec, "")
    geometry = model_geometry(spec, base, dtype_bytes, "auto")

    def plan_of(gib: float) -> MemoryPlan:
        config = Config(model=ModelConfig(path="m"), memory=MemoryConfig(gib=gib))
        return plan_memory(config, spec, base, geometry, free, on_cpu=True)

    for hundredths in range(2, 50):
        planned = plan_of(hundredths / 100)
        assert planned.arena_bytes % geometry.page_bytes == 0
        assert plan_of(planned.arena_bytes / GIB) == planned


def test_a_large_cpu_gives_no_more_than_the_cap() -> None:
    planned = plan(CPU, 256)
    assert planned.arena_bytes <= 4 * GIB < planned.arena_bytes + GEOMETRY.page_bytes
    assert planned.host_pages == 2 * GIB // GEOMETRY.page_bytes


def test_a_gpu_gives_what_weights_reserve_and_tables_leave() -> None:
    planned = plan(CUDA, 80)
    assert planned.weight_bytes == WEIGHT_BYTES
    left = 80 * GIB - WEIGHT_BYTES - planned.reserved.total - planned.table_bytes
    assert 0.9999 * left < planned.arena_bytes <= left
    assert planned.host_pages == 80 * GIB // 4 // GEOMETRY.page_bytes
    assert plan(CUDA, 1000).host_pages == 64 * GIB // GEOMETRY.page_bytes
    assert plan(CPU, 80).reserved.total == 0


def test_a_gpu_reserves_what_graphs_workspaces_and_the_largest_step_take() -> None:
    reserved = plan(CUDA, 80).reserved
    row = 4 * 896 + (14 + 2 + 2 + 14) * 64 + 3 * 4864  # hidden rows, attention, feed-forward
    logits, positions = 64 * 32_000 * (2 + 3 * 4), 32_768 * 64 * 4
    partials = 64 * 64 * 14 * (64 + 4) * 4  # 64 requests of at most 64 splits
    assert (reserved.graphs, reserved.workspaces) == (
        GIB + 64 * (row + 3 * 32_000) * 2 + partials,
        GIB // 2,
    )
    assert reserved.activations == 2048 * row * 2 + logits + partials + positions
    fewer = SchedulerConfig(step_tokens=128, max_running=128)
    assert (
        plan(CUDA, 80, scheduler=fewer).reserved.activations
        == 128 * row * 2 + 2 * (logits + partials) + positions
    )
    assert plan(CUDA, 80, cuda_graphs=False).reserved.graphs == 0
    graphs = plan(CUDA, 80).reserved.graphs
    assert plan(CUDA, 80, cuda_graphs=False).arena_bytes == pytest.approx(
        plan(CUDA, 80).arena_bytes + graphs, rel=1e-3
    )


@pytest.mark.parametrize("free_gib", [23.5, 17.2])
def test_a_model_of_8b_fits_on_a_small_gpu(free_gib: float) -> None:
    planned = plan_llama_8b(free_gib)
    assert (
        planned.weight_bytes + planned.reserved.total + planned.arena_bytes + planned.table_bytes
        <= free_gib * GIB
    )
    assert planned.kv_tokens >= (40_000 if free_gib > 20 else 1_000)


@pytest.mark.parametrize(
    ("free_gib", "gib", "said"),
    [
        (
            15.7,
            None,
            r"model\.path: weights of 14\.96 GiB, a reserve of 2\.00 GiB \(1\.09 GiB for CUDA graphs, 0\.50 GiB for "
            r"workspaces, 0\.41 GiB for a step of 2,048 tokens\) and .* need 16\.9\d GiB, but only 15\.70 GiB are free",
        ),
        (
            23.5,
            8,
            r"memory\.gib: weights of .* pages and buffers of 8\.\d\d GiB need 24\.\d\d GiB, but only 23\.50 GiB",
        ),
    ],
)
def test_a_model_that_does_not_fit_beside_the_reserve_is_refused_with_the_numbers(
    free_gib: float, gib: float | None, said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        plan_llama_8b(free_gib, gib)


def test_more_host_memory_than_is_free_is_refused() -> None:
    with pytest.raises(
        ConfigError,
        match=r"memory\.host_gib: 90\.00 GiB are asked for, but only 80\.00 GiB are free",
    ):
        plan(CUDA, 80, host_gib=90)


@pytest.mark.parametrize(("weights", "share"), [("int8", 0.54), ("int4", 0.34)])
def test_rounded_weights_leave_the_pool_more_memory(weights: Weights, share: float) -> None:
    whole, planned = plan(CPU, 8), plan(CPU, 8, weights=weights)
    assert (whole.weights, planned.weights) == ("bf16", weights)
    linears = WEIGHT_BYTES - PACKED_HEAD_BYTES
    assert planned.weight_bytes < share * linears + 2 * PACKED_HEAD_BYTES
    assert planned.num_pages > whole.num_pages
    assert f"in float32 with {weights} weights" in format_plan(
        planned, replace(demo_ready(), memory=planned)
    )


def test_a_gpu_computes_no_rounded_weights() -> None:
    assert plan(CUDA, 80, weights="bf16").weights == "bf16"
    with pytest.raises(
        ConfigError, match=r"model\.weights: int8 is computed on a CPU only; take auto or bf16"
    ):
        plan(CUDA, 80, weights="int8")


def test_a_start_with_rounded_weights_on_a_gpu_is_refused_before_the_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("manylora.engine.execution.memory_plan.count_cuda_devices", lambda: 1)
    check_start(Config(model=ModelConfig(path=str(DEMO_MODEL), weights="bf16")))
    with pytest.raises(ConfigError, match="int8 is computed on a CPU only"):
        check_start(Config(model=ModelConfig(path=str(DEMO_MODEL), weights="int8")))


def test_what_is_asked_for_is_given() -> None:
    planned = plan(CPU, 16, gib=1.5, host_gib=0.5)
    assert planned.arena_bytes == int(1.5 * GIB) // GEOMETRY.page_bytes * GEOMETRY.page_bytes
    assert planned.host_pages == GIB // 2 // GEOMETRY.page_bytes


@pytest.mark.parametrize(
    ("free_gib", "asked", "said"),
    [
        (
            0.25,
            {},
            r"model\.path: weights of 0\.\d\d GiB and .* need 0\.\d\d GiB, but only 0\.25 GiB",
        ),
        (8, {"gib": 9}, r"memory\.gib.*only 8\.00 GiB are free"),
        (8, {"gib": 0.1, "max_len": 32_768}, "one request of 32,768 tokens needs"),
        (8, {"gib": 0.0001}, "are the least"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_numbers(
    free_gib: float, asked: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        plan(CPU, free_gib, **asked)


@pytest.mark.parametrize(
    ("free_gib", "weights", "said"),
    [
        (14, "bf16", "; weights fit with model.weights int8 (7.98 GiB) or int4 (5.13 GiB)"),
        (7, "bf16", "; weights fit with model.weights int4 (5.13 GiB)"),
        (7, "int8", "; weights fit with model.weights int4 (5.13 GiB)"),
        (4, "bf16", "only 4.00 GiB are free on the device"),
    ],
)
def test_weights_that_do_not_fit_are_refused_with_the_formats_that_do(
    free_gib: float, weights: Weights, said: str
) -> None:
    spec = decoder_spec(real_config("Llama-3-8B"))
    base = base_shape(spec, "")
    config = Config(model=ModelConfig(path="m", weights=weights))
    free = FreeMemory(int(free_gib * GIB), int(free_gib * GIB))
    geometry = model_geometry(spec, base, 2, "auto")
    with pytest.raises(ConfigError) as refused:
        plan_memory(config, spec, base, geometry, free, on_cpu=True)
    assert refused.value.message.endswith(said)


@pytest.mark.parametrize(
    ("dtype", "dtype_bytes"), [("bfloat16", 2), ("float16", 2), ("float32", 4)]
)
def test_a_start_counts_the_bytes_that_a_cpu_will_take(
    dtype: str, dtype_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**QWEN_05B, "dtype": dtype}))
    counted: list[int] = []
    monkeypatch.setattr(
        memory_plan,
        "plan_memory",
        lambda _config, _spec, _base, geometry, *_, **_named: counted.append(geometry.dtype_bytes),
    )
    check_start(Config(model=ModelConfig(path=str(tmp_path), device="cpu")))
    assert counted == [dtype_bytes]


def test_the_longest_request_is_bounded_by_the_model_and_by_the_pool() -> None:
    config = Config(model=ModelConfig(path="m"))
    large, small = plan(CPU, 256), plan(CPU, 8, gib=0.1)
    assert max_model_len(config, SPEC, large) == 32_768
    assert max_model_len(config, SPEC, small) == small.kv_tokens < 32_768


@pytest.mark.parametrize(
    ("device", "scheduler", "step_tokens"),
    [
        (CPU, SchedulerConfig(), 512),
        (CUDA, SchedulerConfig(), 2048),
        (CPU, SchedulerConfig(max_running=600), 600),
        (CUDA, SchedulerConfig(step_tokens=100), 100),
    ],
)
def test_a_step_is_as_large_as_asked_for_or_as_suits_the_device(
    device: torch.device, scheduler: SchedulerConfig, step_tokens: int
) -> None:
    assert plan(device, 16, scheduler=scheduler).step_tokens == step_tokens


def test_a_longer_request_than_the_model_was_made_for_is_refused() -> None:
    config = Config(model=ModelConfig(path="m", max_model_len=32_769))
    with pytest.raises(ConfigError, match="32768 positions"):
        max_model_len(config, SPEC, plan(CPU, 256))


def test_the_plan_is_told_in_numbers_that_people_ask_for() -> None:
    planned = plan(CPU, 256)
    ready = dataclasses.replace(
        demo_ready(max_model_len=32_768),
        model_path="some/model",
        dtype="bfloat16",
        geometry=GEOMETRY,
    )
    text = format_plan(planned, ready)
    assert "some/model on cpu in bfloat16, at most 32,768 tokens" in text
    assert f"at most {planned.slots:,} adapters of any size on the device at once" in text
    assert f"{planned.host_pages // planned.rank16_pages:,} adapters of rank 16 kept ready" in text
    assert (
        f"{planned.kv_tokens:,} tokens, or {planned.rank16_adapters:,} adapters of rank 16" in text
    )
    assert "layers" not in text
    grouped = dataclasses.replace(
        ready, geometry=dataclasses.replace(GEOMETRY, num_groups=2, layers_per_group=12)
    )
    assert "of 12 layers" in format_plan(planned, grouped)
    assert "reserve" not in text
    parts = "1.03 GiB for CUDA graphs, 0.50 GiB for workspaces, 0.13 GiB for a step of 2,048 tokens"
    assert f"  reserve  1.65 GiB ({parts})\n" in format_plan(plan(CUDA, 80), ready)


def test_int8_holds_about_twice_the_tokens_in_the_same_memory_and_the_plan_says_so() -> None:
    geometry = model_geometry(SPEC, BASE, 2, "int8")
    config = Config(model=ModelConfig(path="m"), memory=MemoryConfig(gib=4, kv_dtype="int8"))
    planned = plan_memory(
        config, SPEC, BASE, geometry, FreeMemory(256 * GIB, 256 * GIB), on_cpu=True
    )
    assert planned.kv_tokens == pytest.approx(
        plan(CPU, 256, gib=4).kv_tokens * 128 / 68, rel=0.005
    )  # heads of 64
    ready = dataclasses.replace(demo_ready(), dtype="bfloat16", geometry=geometry)
    text = format_plan(planned, ready)
    assert "on cpu in bfloat16 with int8 KV cache, at most" in text
    assert "each 128 tokens of KV cache" in text
    assert f"{planned.kv_tokens:,} tokens" in text


def test_free_memory_of_this_machine_is_measured() -> None:
    free = free_memory(CPU)
    assert free.device == free.host > 0
