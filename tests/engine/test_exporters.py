"""What training tools write is served as transformers with PEFT computes it, or refused by name with a hint."""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from exporters import PROMPT, REFUSED, SERVED, logits
from manylora import LLM
from manylora.adapters.base_shape import BaseShape
from manylora.adapters.checkpoint.folder import adapter_files
from manylora.adapters.checkpoint.reader import Checkpoint, read_checkpoint
from manylora.engine.model.spec import base_shape, read_spec
from manylora.engine.sampling_params import SamplingParams
from manylora.errors import AdapterError
from tiny_models import TINY_VOCAB_SIZE, load_reference, make_model

TOLERANCE = 1e-4
EVERY_LOGPROB = SamplingParams(
    max_tokens=1, temperature=0.0, prompt_logprobs=TINY_VOCAB_SIZE, ignore_eos=True
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("models") / "tiny", "llama")


@pytest.fixture(scope="module")
def own(model: Path) -> torch.Tensor:
    """The logits of the model itself."""
    return logits(load_reference(model))


@pytest.fixture(scope="module")
def base(model: Path) -> BaseShape:
    return base_shape(read_spec(model), "sha256:" + "0" * 64)


@pytest.fixture(scope="module")
def llm(model: Path) -> Iterator[LLM]:
    with LLM(
        model, device="cpu", dtype="float32", memory_gib=0.05, host_gib=0.05, threads=1
    ) as llm:
        yield llm


def read(folder: Path, base: BaseShape) -> Checkpoint:
    config, weights = adapter_files(folder)
    return read_checkpoint(config.read_bytes(), weights, base, 64, base_names=("shop", "tiny"))


def logprobs(llm: LLM, adapter: Path | None) -> torch.Tensor:
    """[len(PROMPT) - 1, vocab_size]: what Manylora thinks of every token after each of the prompt's."""
    (completion,) = llm.generate([PROMPT], EVERY_LOGPROB, adapter)
    assert completion.prompt_logprobs is not None
    rows = torch.full((len(PROMPT) - 1, TINY_VOCAB_SIZE), torch.nan)
    for row, entry in zip(rows, completion.prompt_logprobs[1:], strict=True):
        assert entry is not None
        row[torch.tensor(entry.top_ids)] = torch.tensor(entry.top_logprobs)
    return rows


@pytest.mark.parametrize("name", SERVED)
def test_what_is_served_equals_peft(
    name: str, model: Path, own: torch.Tensor, llm: LLM, base: BaseShape, tmp_path: Path
) -> None:
    case = SERVED[name]
    truth = case.make(load_reference(model), tmp_path)
    assert ((truth - own).abs().max() > 0.1) == (name != "untrained")
    torch.testing.assert_close(
        logprobs(llm, tmp_path), truth[:-1].log_softmax(dim=-1), rtol=TOLERANCE, atol=TOLERANCE
    )
    report = read(tmp_path, base).report
    assert report["dtype"] == ["F32"]
    assert report["layout"] == case.layout
    assert bool(report["renamed"]) == case.is_renamed
    warnings = report["warnings"]
    assert isinstance(warnings, list)
    assert len(warnings) == len(case.warnings)
    for warning, words in zip(warnings, case.warnings, strict=True):
        assert words in warning


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_served_is_refused_with_the_hint(
    name: str, model: Path, base: BaseShape, tmp_path: Path
) -> None:
    case = REFUSED[name]
    case.make(load_reference(model), tmp_path)
    with pytest.raises(AdapterError) as caught:
        read(tmp_path, base)
    assert caught.value.code == case.code
    for word in case.words:
        assert word in caught.value.message
    assert len(caught.value.message) < 800


def test_the_recipe_for_a_pickle_makes_an_adapter_that_is_served(
    model: Path, llm: LLM, base: BaseShape, tmp_path: Path
) -> None:
    REFUSED["a pickle"].make(load_reference(model), tmp_path)
    with pytest.raises(AdapterError) as caught:
        read_checkpoint(
            (tmp_path / "adapter_config.json").read_bytes(),
            tmp_path / "adapter_model.bin",
            base,
            64,
        )
    recipe = shlex.split(caught.value.message[caught.value.message.index("python -c") :])
    subprocess.run([sys.executable, *recipe[1:]], cwd=tmp_path, check=True)
    truth = SERVED["plain"].make(load_reference(model), tmp_path / "plain")
    torch.testing.assert_close(
        logprobs(llm, tmp_path), truth[:-1].log_softmax(dim=-1), rtol=TOLERANCE, atol=TOLERANCE
    )
