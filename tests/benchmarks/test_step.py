"""What the step benchmark makes of its timings; how fast steps are is for the benchmark to say."""

from __future__ import annotations

import argparse
import itertools
from collections import Counter
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from drive_core import run_all
from manylora.adapters.blobs.local import LocalBlobs
from manylora.benchmarks.engine import step
from manylora.benchmarks.engine.own_engine import OwnEngine
from manylora.benchmarks.engine.part_clock import PARTS, PartClock, timed_parts
from manylora.benchmarks.engine.step_work import PRODUCT_OF, StepLoad, step_work
from manylora.benchmarks.model_shapes import QWEN
from manylora.benchmarks.qwen_shape import VOCAB_SIZE
from manylora.config import Config, MemoryConfig, ModelConfig, SchedulerConfig, ServerConfig
from manylora.engine.build import build_engine
from manylora.engine.request import GenerationRequest
from manylora.engine.sampling_params import SamplingParams
from manylora.kernels.native.peaks import PRODUCTS, CpuPeaks
from stored_adapters import store_adapter
from tiny_models import ALL_LINEAR, make_adapter, make_model

SMALL: dict[str, Any] = {
    "dtype": "float32",
    "threads": 1,
    "memory_gib": 0.02,
    "host_gib": 0.01,
    "max_running": 4,
}


def test_a_part_is_charged_without_the_parts_that_it_calls() -> None:
    clock = PartClock(itertools.accumulate([0, 1, 10, 100]).__next__)
    clock.around("outer", clock.around("inner", lambda: None))()
    assert clock.seconds == {"outer": 1 + 100, "inner": 10}


def test_a_part_that_fails_is_charged_too_and_leaves_the_clock_sound() -> None:
    clock = PartClock(itertools.accumulate([0, 10, 100, 1]).__next__)
    with pytest.raises(ZeroDivisionError):
        clock.around("inner", lambda: 1 / 0)()
    clock.around("outer", lambda: None)()
    assert clock.seconds == {"inner": 10, "outer": 1}


def make_config(tmp_path: Path, **fields: Any) -> tuple[Config, Path]:
    """An engine's settings for a small model, and an adapter's folder."""
    model = make_model(tmp_path / "model", "qwen2", **fields)
    config = Config(
        model=ModelConfig(path=str(model), dtype="float32", threads=1),
        memory=MemoryConfig(gib=0.02, host_gib=0.01),
        scheduler=SchedulerConfig(max_running=4),
        server=ServerConfig(data_dir=tmp_path),
    )
    return config, make_adapter(model, tmp_path / "adapter", targets=ALL_LINEAR)


def test_every_part_of_a_step_is_timed_and_answers_stay_the_same(tmp_path: Path) -> None:
    config, folder = make_config(tmp_path)

    def answer() -> dict[str, list[int]]:
        parts = build_engine(config)
        try:
            ref = store_adapter(LocalBlobs(config.blob_dir), folder, parts.ready.base)
            params = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)
            request = GenerationRequest(
                request_id="a", prompt_token_ids=[5, 6, 7], params=params, adapter=ref
            )
            return run_all(parts.core, [request])
        finally:
            parts.core.close()

    expected = answer()
    with timed_parts() as clock:
        assert answer() == expected
    assert all(clock.seconds[part] > 0 for part in PARTS)
    assert set(clock.seconds) == set(PARTS)
    clock.seconds.clear()
    assert answer() == expected
    assert not clock.seconds, "the clock was taken away again"


def test_figures_are_medians_over_the_floor_and_means_of_parts() -> None:
    parts = Counter({"attention": 0.012, "linear layers": 0.036})
    timings = sum(
        [step.Timings([0.01, 0.02], parts, [1.0]), step.Timings([0.018, 0.012])], step.Timings()
    )
    figures = step.figures(timings, 0.011)
    result = step.make_result({"decode": figures})
    case = result["cases"]["decode"]
    assert case["step / floor"] == pytest.approx(0.015 / 0.011)
    assert case["part_ms"]["attention"] == pytest.approx(3.0)
    assert case["part_share"]["linear layers"] == pytest.approx(0.75)
    assert result["table"][0]["attention"] == pytest.approx(3.0)


@pytest.mark.parametrize("is_prefill", [False, True])
def test_steps_of_a_case_are_timed_with_all_its_requests_in_them(
    tmp_path: Path, is_prefill: bool
) -> None:
    config, folder = make_config(tmp_path, vocab_size=VOCAB_SIZE)
    with timed_parts() as clock, OwnEngine(config.model.path, **SMALL) as engine:
        adapters = engine.store_adapters([folder], 2)
        case = step.Case("", 4, prompt_tokens=8)
        step.timed_steps(engine, case, adapters, 1, clock, lambda: 0.0)
        first = engine.core.num_steps
        timed = replace(case, is_prefill=is_prefill)
        rates = itertools.count(1.0)
        found = step.timed_steps(engine, timed, adapters, 3, clock, rates.__next__)
        status = engine.core.status()
    assert len({adapter.digest for adapter in adapters}) == 2
    told = [each for each in status.last_steps if each.step > first]
    assert found.bytes_per_s == ([1.0] if is_prefill else [1.0, 2.0, 3.0])
    assert len(found.step_s) == len(found.bytes_per_s)
    assert [(each.requests, each.adapters) for each in told] == [(4, 2)] * len(told)
    assert [each.prefill_tokens for each in told][:1] == [32]
    assert 0 < sum(found.part_s.values()) <= sum(found.step_s)
    assert (status.running, status.waiting) == (0, 0)


def test_formats_of_weights_take_turns_at_a_case_and_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, _ = make_config(tmp_path, vocab_size=VOCAB_SIZE)
    options = argparse.Namespace(steps=2, repeats=3)
    order: list[str] = []
    timed_steps = step.timed_steps

    def timed(engine: OwnEngine, case: step.Case, *rest: Any) -> Any:
        order.append(engine.ready.number_format)
        return timed_steps(engine, case, *rest)

    slow = CpuPeaks(1e12, dict.fromkeys(PRODUCTS, 1e9))
    monkeypatch.setattr(step, "timed_steps", timed)
    monkeypatch.setattr(step, "product_rates", lambda _: slow.multiply_adds_per_s)
    with timed_parts() as clock, ExitStack() as stack:
        contenders: dict[str, step.Contender] = {}
        for name in step.formats("int8+kv8,bf16"):
            weights, kv_dtype = step.FORMATS[name]
            opened = OwnEngine(config.model.path, weights=weights, kv_dtype=kv_dtype, **SMALL)
            engine = stack.enter_context(opened)
            contenders[name] = step.Contender(engine, {step.BASE: []})
        case = step.Case("two", 2, prompt_tokens=8)
        found = step.measure_case(contenders, case, options, clock)
    assert order[2:] == [*order[:2], *order[1::-1], *order[:2]], "after two that warm up"
    assert list(found) == ["two", "two, int8+kv8"]
    for name, format_ in zip(found, contenders, strict=True):
        weights, kv_dtype = step.FORMATS[format_]
        load = StepLoad(requests=2, context=8)
        work = step_work(QWEN, VOCAB_SIZE, load, weights, is_kv_int8=kv_dtype == "int8")
        floor_s = slow.seconds(0, work.multiply_adds)
        assert found[name]["floor_ms"] == pytest.approx(1e3 * floor_s)
        assert found[name]["part_ms"]["linear layers"] > 0


NUM_LAYERS = 24
LAYER = 896 * (2 * 896 + 2 * 128 + 3 * 4864)
"""Numbers in the linear layers of one layer of the 0.5B shape."""
HEAD = VOCAB_SIZE * 896


def test_a_decode_step_reads_all_weights_once_and_multiplies_each_with_every_row() -> None:
    work = step_work(QWEN, VOCAB_SIZE, StepLoad(requests=3, context=10), "bf16")
    weights = NUM_LAYERS * LAYER + HEAD
    assert work.num_bytes == 2 * (weights + 3 * 10 * NUM_LAYERS * 2 * 128)
    assert work.multiply_adds == {"bfloat16": 3 * (weights + 10 * NUM_LAYERS * 2 * 896)}


def test_a_prompt_has_one_row_of_logits_and_reads_no_keys() -> None:
    load = StepLoad(requests=1, context=100, is_prompt=True)
    work = step_work(QWEN, VOCAB_SIZE, load, "bf16")
    pairs = 100 * 101 // 2
    assert work.num_bytes == 2 * (NUM_LAYERS * LAYER + HEAD)
    assert work.multiply_adds == {
        "bfloat16": 100 * NUM_LAYERS * LAYER + HEAD + pairs * NUM_LAYERS * 2 * 896
    }


def test_weights_of_few_bits_are_few_bytes_and_their_heads_have_8_bits() -> None:
    one = StepLoad(requests=1, context=1)
    found = {name: step_work(QWEN, VOCAB_SIZE, one, name) for name in PRODUCT_OF}
    assert found["int8"].num_bytes == pytest.approx(found["bf16"].num_bytes / 2, rel=0.02)
    in_four = NUM_LAYERS * LAYER * (0.5 + 2 / 32)
    assert found["int4"].num_bytes == pytest.approx(in_four + HEAD, rel=0.01)
    assert found["int4"].multiply_adds["int4"] == NUM_LAYERS * LAYER
    assert found["int4"].multiply_adds["int8"] == HEAD
    kept = step_work(QWEN, VOCAB_SIZE, one, "int8", is_kv_int8=True)
    assert found["int8"].num_bytes - kept.num_bytes == NUM_LAYERS * 2 * 2 * (64 - 4)


def test_adapters_are_read_once_and_multiplied_with_the_rows_that_have_them() -> None:
    of_rank = NUM_LAYERS * (2 * (896 + 896) + 2 * (896 + 128) + 3 * (896 + 4864))
    base = step_work(QWEN, VOCAB_SIZE, StepLoad(requests=4, context=5), "bf16")
    load = StepLoad(requests=4, context=5, ranks=[8, 16, 32])
    work = step_work(QWEN, VOCAB_SIZE, load, "bf16")
    assert work.num_bytes - base.num_bytes == 2 * (8 + 16 + 32) * of_rank
    more = work.multiply_adds["bfloat16"] - base.multiply_adds["bfloat16"]
    assert more == (8 + 16 + 32 + 8) * of_rank
