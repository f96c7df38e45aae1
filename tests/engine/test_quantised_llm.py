"""Quantised models in an engine: GGUF files as they are, and adapters that a checkpoint does not fit are refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from gguf import GGMLQuantizationType as Type

from gguf_writer import write_gguf
from manylora import LLM
from manylora.cli.doctor import _model as doctor_on
from manylora.engine.sampling_params import SamplingParams
from manylora.errors import AdapterIncompatibleError, ConfigError
from quantised_cases import CASES
from quantised_models import make_quantised
from tiny_models import make_adapter, make_model

SETTINGS = {"dtype": "float32", "memory_gib": 0.02, "host_gib": 0.01, "threads": 1}
GREEDY = SamplingParams(temperature=0.0, max_tokens=8)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), "llama", intermediate_size=128, head_dim=32)


@pytest.fixture
def gguf(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    write_gguf(
        model, tmp_path / "tiny.gguf", {}
    )  # in 32 bits, so that the answers are those of the model
    return tmp_path / "tiny.gguf"


def test_a_gguf_file_answers_as_its_model_does(model: Path, gguf: Path, tmp_path: Path) -> None:
    adapter = make_adapter(model, tmp_path / "adapter", targets=("q_proj", "k_proj", "down_proj"))
    prompts, answers = ["Hello", "Hello", "1 + 1 ="], []
    for path in (model, gguf):
        with LLM(path, **SETTINGS) as llm:
            found = llm.generate(prompts, GREEDY, [None, adapter, adapter])
            answers.append([done.token_ids for done in found])
            held = llm.generate("Say", GREEDY, grammar='start: "yes" | "no"')
            assert held[0].text in ("yes", "no")
    assert answers[0] == answers[1]
    assert answers[0][0] != answers[0][1]


def test_doctor_says_what_a_gguf_file_is(model: Path, tmp_path: Path, gguf: Path) -> None:
    write_gguf(model, tmp_path / "q8.gguf", {"": Type.Q8_0})
    found = {finding.check: finding for finding in doctor_on(str(tmp_path / "q8.gguf"))}
    assert found["model"].detail.endswith("M parameters, 8 bits (gguf)")
    assert found["tokenizer"].result == "ok"
    (tmp_path / "q8.gguf").write_bytes(b"GGUF")
    assert [finding.result for finding in doctor_on(str(tmp_path / "q8.gguf"))] == ["fail"]


@pytest.mark.parametrize("case", ["awq", "w8a8"])
def test_adapters_of_the_original_are_refused_on_a_checkpoint_with_scaled_inputs(
    case: str, model: Path, tmp_path: Path
) -> None:
    made = make_quantised(model, tmp_path, CASES[case].config, CASES[case].encode)
    adapter = make_adapter(made.decoded, tmp_path / "adapter")
    with LLM(made.stored, **SETTINGS) as llm:
        assert llm.generate("Hello", GREEDY)[0].token_ids
        with pytest.raises(AdapterIncompatibleError) as caught:
            llm.load_adapter(adapter)
    assert caught.value.code == "config.base_folds_scale"
    assert "model.adapters_trained_on_quantised: true" in caught.value.finding.hint
    with LLM(made.stored, adapters_trained_on_quantised=True, **SETTINGS) as llm:
        assert llm.generate("Hello", GREEDY, adapter)[0].token_ids


def test_a_checkpoint_without_scaled_inputs_takes_adapters(model: Path, tmp_path: Path) -> None:
    made = make_quantised(model, tmp_path, CASES["nf4"].config, CASES["nf4"].encode)
    with LLM(made.stored, **SETTINGS) as llm:
        assert llm.generate("Hello", GREEDY, make_adapter(made.decoded, tmp_path / "adapter"))[
            0
        ].token_ids


def test_a_rotated_checkpoint_does_not_start(model: Path, tmp_path: Path) -> None:
    config = {**CASES["gptq"].config, "rotation": "hadamard"}
    made = make_quantised(model, tmp_path, config, CASES["gptq"].encode)
    with pytest.raises(ConfigError, match="rotated"):
        LLM(made.stored, **SETTINGS)
