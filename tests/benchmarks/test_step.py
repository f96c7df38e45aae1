"""What the step benchmark makes of its timings; how fast steps are is for the benchmark to say."""

from __future__ import annotations

import argparse
import itertools
from collections import Counter
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from drive_core import run_all
from manylora.adapters.blobs.local import LocalBlobs
from manylora.benchmarks.engine import step
from manylora.benchmarks.engine.own_engine import OwnEngine
from manylora.benchmarks.engine.part_clock import PARTS, PartClock, timed_parts
from manylora.benchmarks.qwen_shape import VOCAB_SIZE
from manylora.config import Config, MemoryConfig, ModelConfig, SchedulerConfig, ServerConfig
from manylora.engine.build import build_engine
from manylora.engine.request import GenerationRequest
from manylora.engine.sampling_params import SamplingParams
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
    figures = step.figures([0.01, 0.02, 0.018, 0.012], [0.01, 0.012], parts)
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
        step.timed_steps(engine, case, adapters, 1, clock)
        first = engine.core.num_steps
        timed = replace(case, is_prefill=is_prefill)
        seconds, parts = step.timed_steps(engine, timed, adapters, 3, clock)
        status = engine.core.status()
    assert len({adapter.digest for adapter in adapters}) == 2
    told = [each for each in status.last_steps if each.step > first]
    assert len(seconds) == (1 if is_prefill else 3)
    assert [(each.requests, each.adapters) for each in told] == [(4, 2)] * len(told)
    assert [each.prefill_tokens for each in told][:1] == [32]
    assert 0 < sum(parts.values()) <= sum(seconds)
    assert (status.running, status.waiting) == (0, 0)


def test_formats_of_weights_take_turns_at_a_case_and_are_named(tmp_path: Path) -> None:
    config, _ = make_config(tmp_path, vocab_size=VOCAB_SIZE)
    options = argparse.Namespace(steps=2, repeats=3)
    order: list[str] = []

    def floor(weights: str) -> Any:
        def seconds(rows: int, head_rows: int) -> float:
            order.append(weights)
            return 0.5 * rows / head_rows

        return SimpleNamespace(seconds=seconds)

    with timed_parts() as clock, ExitStack() as stack:
        contenders: dict[str, step.Contender] = {}
        for name in step.formats("int8+kv8,bf16"):
            weights, kv_dtype = step.FORMATS[name]
            opened = OwnEngine(config.model.path, weights=weights, kv_dtype=kv_dtype, **SMALL)
            engine = stack.enter_context(opened)
            contenders[name] = step.Contender(engine, floor(weights), {step.BASE: []})
        case = step.Case("two", 2, prompt_tokens=8)
        found = step.measure_case(contenders, case, options, clock)
    assert order == ["bf16", "int8", "int8", "bf16", "bf16", "int8"]
    assert list(found) == ["two", "two, int8+kv8"]
    assert all(
        case["floor_ms"] == 500 and case["part_ms"]["linear layers"] > 0 for case in found.values()
    )
