"""Beam search gives the hypotheses of transformers' `generate`, token for token, with and without a PEFT adapter."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from peft import PeftModel

from drive_core import collect
from manylora.adapters.blobs.local import LocalBlobs
from manylora.adapters.ref import AdapterRef
from manylora.config import Config, MemoryConfig, ModelConfig, SchedulerConfig, ServerConfig
from manylora.engine.build import EngineParts, build_engine
from manylora.engine.request import GenerationRequest, RequestOutput
from manylora.engine.sampling_params import BeamParams, SamplingParams
from stored_adapters import store_adapter
from tiny_models import ALL_LINEAR, load_reference, make_adapter, make_model

pytestmark = pytest.mark.no_cover

MAX_TOKENS = 20
Stopping = bool | Literal["never"]


def prompt(length: int, seed: int) -> list[int]:
    return torch.randint(0, 250, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


PROMPTS = [prompt(5, 1), prompt(37, 2)]
"""The second one is longer than a step."""
PENALTIES = {"base": (1.0,), "adapter": (0.5, 1.0, 2.0)}
"""For lengths; the search that they decide on knows nothing of adapters."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), "qwen2")


@pytest.fixture(scope="module")
def adapter(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_adapter(model, tmp_path_factory.mktemp("adapter"), rank=8, targets=ALL_LINEAR)


@pytest.fixture(scope="module")
def references(model: Path, adapter: Path) -> dict[str, Any]:
    peft: Any = PeftModel.from_pretrained(load_reference(model), str(adapter)).eval()
    return {"base": load_reference(model), "adapter": peft}


def settings(model: Path, data_dir: Path, **memory: Any) -> Config:
    return Config(
        model=ModelConfig(path=str(model), threads=1, dtype="float32"),
        memory=MemoryConfig(gib=0.02, host_gib=0.01, poison=True, **memory),
        scheduler=SchedulerConfig(max_running=16, step_tokens=24),
        server=ServerConfig(data_dir=data_dir),
    )


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("data")


@pytest.fixture(scope="module", params=[True, False], ids=["prefix cache", "no prefix cache"])
def engine(model: Path, data_dir: Path, request: pytest.FixtureRequest) -> Iterator[EngineParts]:
    parts = build_engine(settings(model, data_dir, prefix_cache=request.param))
    yield parts
    parts.core.close()


@pytest.fixture(scope="module")
def refs(engine: EngineParts, adapter: Path, data_dir: Path) -> dict[str, AdapterRef | None]:
    return {
        "base": None,
        "adapter": store_adapter(LocalBlobs(data_dir / "blobs"), adapter, engine.ready.base),
    }


@cache
def expected(
    reference: Any, tokens: tuple[int, ...], beam: BeamParams, stops: tuple[int, ...]
) -> list[tuple[list[int], float]]:
    """The hypotheses of transformers with their scores, best first; with one beam it searches greedily, without."""
    with torch.inference_mode():
        found = reference.generate(
            input_ids=torch.tensor([tokens]),
            attention_mask=torch.ones(1, len(tokens), dtype=torch.long),
            max_new_tokens=MAX_TOKENS,
            num_beams=beam.width,
            num_return_sequences=beam.width,
            do_sample=False,
            length_penalty=beam.length_penalty,
            early_stopping=beam.early_stopping,
            eos_token_id=list(stops),
            pad_token_id=999_999,
            return_dict_in_generate=True,
            output_scores=True,
        )
    sequences = [
        [token for token in row.tolist()[len(tokens) :] if token != 999_999]
        for row in found.sequences
    ]
    return list(
        zip(sequences, found.sequences_scores.tolist() if beam.width > 1 else [0.0], strict=True)
    )


def request(
    request_id: str, tokens: list[int], beam: BeamParams, stops: list[int], ref: AdapterRef | None
) -> GenerationRequest:
    params = SamplingParams(
        max_tokens=MAX_TOKENS, ignore_eos=True, stop_token_ids=tuple(stops), logprobs=1
    )
    return GenerationRequest(
        request_id=request_id, prompt_token_ids=tokens, params=params, adapter=ref, beam=beam
    )


def hypotheses(engine: EngineParts, requests: list[GenerationRequest]) -> list[list[RequestOutput]]:
    outputs = collect(engine.core, requests)
    found = []
    for each in requests:
        (output,) = outputs[each.request_id]
        assert output.error is None, output.error
        assert output.hypotheses is not None
        assert output.finish_reason == output.hypotheses[0].finish_reason
        found.append(output.hypotheses)
    engine.core.check()
    return found


def score_of(hypothesis: RequestOutput, beam: BeamParams) -> float:
    total = sum(entry.logprob for entry in hypothesis.logprobs or ())
    return total / math.pow(len(hypothesis.token_ids), beam.length_penalty)


def common_tokens(reference: Any, tokens: list[int]) -> list[int]:
    """Tokens that end some sequences early and others late: the model's own favourites."""
    sequences = expected(reference, tuple(tokens), BeamParams(width=4), ())
    seen = [sequence[place] for sequence, _ in sequences for place in (2, 5, 9, 14)]
    return sorted(set(seen))


@pytest.mark.parametrize("who", ["base", "adapter"])
@pytest.mark.parametrize("early_stopping", [False, True, "never"])
def test_hypotheses_and_scores_are_those_of_transformers(
    engine: EngineParts,
    references: dict[str, Any],
    refs: dict[str, AdapterRef | None],
    who: str,
    early_stopping: Stopping,
) -> None:
    reference = references[who]
    cases = [
        (
            BeamParams(width=width, length_penalty=penalty, early_stopping=early_stopping),
            tokens,
            stops,
        )
        for tokens in PROMPTS
        for width, penalties in (
            (1, (1.0,)),
            (2, PENALTIES[who]),
            (4, PENALTIES[who]),
        )  # one beam has no scores
        for penalty in penalties
        for stops in ([], common_tokens(reference, tokens))
    ]
    requests = [
        request(f"{who}-{early_stopping}-{index}", tokens, beam, stops, refs[who])
        for index, (beam, tokens, stops) in enumerate(cases)
    ]

    found = hypotheses(engine, requests)  # all of them beside each other

    lengths = set()
    for (beam, tokens, stops), own in zip(cases, found, strict=True):
        wanted = expected(reference, tuple(tokens), beam, tuple(stops))
        assert [each.token_ids for each in own] == [sequence for sequence, _ in wanted], (
            beam,
            stops,
        )
        if beam.width > 1:
            scores = [score_of(each, beam) for each in own]
            assert scores == pytest.approx([score for _, score in wanted], rel=1e-4)
        for each in own:
            assert each.stop_token_id == (
                each.token_ids[-1] if each.token_ids[-1] in stops else None
            )
            assert each.finish_reason == ("stop" if each.stop_token_id is not None else "length")
            lengths.add(len(each.token_ids))
    assert len(lengths) > 4  # some end early, some late, some never


def test_logprobs_are_those_of_the_returned_tokens(
    engine: EngineParts, refs: dict[str, AdapterRef | None]
) -> None:
    beam = BeamParams(width=3, length_penalty=0.0)
    (found,) = hypotheses(engine, [request("logprobs", PROMPTS[1], beam, [], refs["adapter"])])
    for each in found:
        assert each.logprobs is not None
        assert [entry.token_id for entry in each.logprobs] == each.token_ids
        assert all(len(entry.top_ids) == 1 for entry in each.logprobs)
        assert all(
            (entry.rank == 1) == (entry.top_ids == [entry.token_id]) for entry in each.logprobs
        )
    assert any(entry.rank > 1 for each in found for entry in each.logprobs or ())


def test_the_models_own_end_ends_a_sequence(
    model: Path, references: dict[str, Any], tmp_path: Path
) -> None:
    stops = common_tokens(references["base"], PROMPTS[0])
    same = make_model(tmp_path / "model", "qwen2", eos_token_id=stops)
    parts = build_engine(settings(same, tmp_path / "data"))
    beam = BeamParams(width=4, length_penalty=0.0)
    requests = [
        GenerationRequest(
            request_id=f"ignores-{ignores}",
            prompt_token_ids=PROMPTS[0],
            params=SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=ignores),
            beam=beam,
        )
        for ignores in (False, True)
    ]

    ended, went_on = hypotheses(parts, requests)

    parts.core.close()
    wanted = expected(references["base"], tuple(PROMPTS[0]), beam, tuple(stops))
    assert [each.token_ids for each in ended] == [sequence for sequence, _ in wanted]
    assert "stop" in {each.finish_reason for each in ended}
    assert [len(each.token_ids) for each in went_on] == [MAX_TOKENS] * 4
