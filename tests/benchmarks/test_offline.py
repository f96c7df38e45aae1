"""What the offline comparison makes of its timings; the timings themselves are made by hand here."""

from __future__ import annotations

import pytest
import torch
from transformers import Qwen2ForCausalLM

from manylora.benchmarks.engine.offline import make_cases, make_result
from manylora.benchmarks.qwen_shape import RANKS, VOCAB_SIZE, base_config


def test_cases_ask_for_every_adapter_equally_and_pad_nothing() -> None:
    cases = make_cases(8)
    (base, _), (mixed, adapters), (single, _) = (
        cases[name] for name in ("base", "mixed", "single")
    )
    assert {len(prompt) for prompt in base} == {64}
    assert max(max(prompt) for prompt in base) < VOCAB_SIZE
    assert [adapters.count(index) for index in range(8)] == [4] * 8
    assert mixed == base
    assert single == base[:1]
    assert cases == make_cases(8)


def test_rates_and_ratios_come_from_medians() -> None:
    seconds = {
        "manylora": {"base": [1.0, 9.0, 2.0], "mixed": [4.0, 4.0, 4.0], "single": [1.0, 1.0, 1.0]},
        "transformers": {"base": [4.0, 5.0, 4.0], "single": [2.0, 2.0, 2.0]},
        "transformers + PEFT": {"mixed": [8.0, 9.0, 8.0]},
    }
    first = {"manylora": 1, "transformers": 1, "transformers + PEFT": 2}
    made = make_result(
        {
            (case, name): [
                (taken_s, [[first[name]] * 5] * (1 if case == "single" else 2)) for taken_s in times
            ]
            for name, by_case in seconds.items()
            for case, times in by_case.items()
        },
    )
    assert made["output_tokens_per_s"] == {
        "manylora": {"base": 5.0, "mixed": 2.5, "single": 5.0},
        "transformers": {"base": 2.5, "single": 2.5},
        "transformers + PEFT": {"mixed": 1.25},
    }
    assert made["ratios"] == {
        "base: manylora / transformers": 2.0,
        "single: manylora / transformers": 2.0,
        "mixed: manylora / transformers + PEFT": 2.0,
        "manylora: mixed / base": 0.5,
    }
    assert made["first_tokens_equal"] == {"base": 1.0, "mixed": 0.0}


def test_the_compared_model_has_the_size_it_is_named_for() -> None:
    with torch.device("meta"):
        model = Qwen2ForCausalLM(base_config())
    assert model.num_parameters() == pytest.approx(386.6e6, rel=1e-3)
    assert sorted(RANKS) == [8, 8, 16, 16, 32, 32, 64, 64]
