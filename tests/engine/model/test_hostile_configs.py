"""A checkpoint whose configs hold any value starts, or is refused in one line, soon and in bounded memory."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import hostile_configs
from manylora import demo
from manylora.engine.model.spec import decoder_spec
from manylora.engine.text.tokenizer import read_eos_token_ids
from manylora.errors import ConfigError

MOST_CPU_S = 2.0
"""Of one case; each takes milliseconds."""


def test_no_value_of_a_config_raises_anything_but_one_line(tmp_path: Path) -> None:
    program = [sys.executable, "-P", hostile_configs.__file__, str(tmp_path)]
    subprocess.run(program, check=True, timeout=280, capture_output=True)
    results = json.loads((tmp_path / hostile_configs.RESULTS).read_text())
    assert len(results) > 2000
    told = [(place, value, problem) for place, value, problem, _ in results if problem is not None]
    assert [each for each in told if each[2].startswith("RAISED")] == []
    assert [
        each for each in told if "\n" in each[2] or "\x1b" in each[2] or len(each[2]) > 1000
    ] == []
    assert [result for result in results if result[3] > MOST_CPU_S] == []


@pytest.mark.parametrize(
    ("key", "fields"),
    [
        ("num_hidden_layers", {"num_hidden_layers": 10**9}),
        ("rope_parameters.factor", {"rope_parameters": {"rope_type": "yarn", "factor": 1e308}}),
        ("rope_parameters.factor", {"rope_parameters": {"rope_type": "yarn", "factor": 1e9}}),
        ("rope_parameters.rope_theta", {"rope_parameters": {"rope_theta": 1}}),
        (
            "rope_parameters.beta_fast",
            {"rope_parameters": {"rope_type": "yarn", "factor": 2, "beta_fast": 1e-320}},
        ),
        ("rms_norm_eps", {"rms_norm_eps": 10**400}),
        ("vocab_size", {"vocab_size": 2**63}),
        (
            "quantization_config.bits",
            {"quantization_config": {"quant_method": "gptq", "bits": 4.0, "group_size": 8}},
        ),
    ],
)
def test_the_key_is_named(key: str, fields: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as refused:
        decoder_spec({**json.loads((demo.MODEL / "config.json").read_text()), **fields})
    assert refused.value.param == key
    assert refused.value.message.startswith(f"{key}: ")


@pytest.mark.parametrize("value", ["5", [[5]], {"a": 1}, -1, 2**40, True, 1.5])
def test_ends_of_text_are_token_ids(tmp_path: Path, value: object) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": value}))
    with pytest.raises(
        ConfigError, match=r"^eos_token_id: expected token ids in .*generation_config\.json, got "
    ):
        read_eos_token_ids(tmp_path)


def test_a_file_that_is_no_json_is_named(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"generation_config\.json: it is no JSON$"):
        read_eos_token_ids(tmp_path)
