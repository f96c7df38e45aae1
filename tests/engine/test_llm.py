from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from manylora import LLM
from manylora.engine.sampling_params import SamplingParams
from manylora.errors import AdapterFormatError, ConfigError, ContextLengthError, InvalidRequestError
from tiny_models import load_reference

DEMO = Path(__file__).resolve().parents[2] / "manylora" / "demo"
GREEDY = SamplingParams(max_tokens=64, temperature=0.0)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(
        DEMO / "manylora-demo",
        device="cpu",
        dtype="float32",
        memory_gib=0.05,
        host_gib=0.05,
        threads=1,
    ) as llm:
        yield llm


def test_adapters_answer_one_question_in_one_batch_each_in_its_way(llm: LLM) -> None:
    prompt = llm.tokenizer.chat_prompt([{"role": "user", "content": "Where are you?"}])
    adapters = [None, llm.load_adapter(DEMO / "adapters" / "pirate"), DEMO / "adapters" / "shout"]
    together = llm.generate([prompt] * 3, GREEDY, adapters)
    assert len({completion.text for completion in together}) == 3
    assert [completion.finish_reason for completion in together] == ["stop"] * 3
    for completion, chosen in zip(together, adapters, strict=True):
        assert llm.generate([prompt], GREEDY, chosen) == [completion]


def test_a_stop_string_cuts_text_and_tokens(llm: LLM) -> None:
    prompt = llm.tokenizer.chat_prompt([{"role": "user", "content": "Where are you?"}])
    (whole,) = llm.generate([prompt], GREEDY)
    stop = whole.text[8:12]
    (cut,) = llm.generate([prompt], SamplingParams(max_tokens=40, temperature=0.0, stop=(stop,)))
    assert cut.text == whole.text[: whole.text.index(stop)]
    assert (cut.finish_reason, cut.stop_reason) == ("stop", stop)
    assert 0 < len(cut.token_ids) < len(whole.token_ids)
    assert stop in llm.tokenizer.decode(cut.token_ids)


def test_seeded_sampling_repeats_itself(llm: LLM) -> None:
    params = SamplingParams(max_tokens=20, temperature=1.5, seed=11, ignore_eos=True)
    alone = llm.generate("Hello", params)
    beside = llm.generate(["Hello", "What", "Where is"], params)
    assert beside[0] == alone[0]
    assert (
        llm.generate(
            "Hello", SamplingParams(max_tokens=20, temperature=1.5, seed=12, ignore_eos=True)
        )
        != alone
    )


def test_chat_uses_the_models_template(llm: LLM) -> None:
    messages = [{"role": "user", "content": "Where are you?"}]
    assert [llm.chat(messages, GREEDY)] == llm.generate(
        [llm.tokenizer.chat_prompt(messages)], GREEDY
    )


def test_logprobs_are_there_when_asked_for(llm: LLM) -> None:
    params = SamplingParams(
        max_tokens=3, temperature=0.0, logprobs=2, prompt_logprobs=1, ignore_eos=True
    )
    (completion,) = llm.generate("Hello, how", params)
    assert completion.logprobs is not None
    assert [entry.token_id for entry in completion.logprobs] == completion.token_ids
    assert [entry.rank for entry in completion.logprobs] == [1, 1, 1]
    assert completion.prompt_logprobs is not None
    assert [entry and entry.token_id for entry in completion.prompt_logprobs] == [
        None,
        *completion.prompt_token_ids[1:],
    ]


def test_min_tokens_and_bad_words_give_the_tokens_of_transformers(llm: LLM) -> None:
    model = load_reference(DEMO / "manylora-demo")
    prompt = llm.tokenizer.chat_prompt([{"role": "user", "content": "Where are you?"}])
    eos = sorted(llm.tokenizer.eos_token_ids)
    (plain,) = llm.generate([prompt], GREEDY)
    words = [plain.token_ids[1:2], plain.token_ids[3:5]]
    for bad_words in ([], words):
        reference = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            do_sample=False,
            max_new_tokens=64,
            min_new_tokens=40,
            eos_token_id=eos,
            pad_token_id=eos[0],
            bad_words_ids=bad_words or None,
        )[0, len(prompt) :].tolist()
        asked = replace(GREEDY, min_tokens=40, bad_words=tuple(map(tuple, bad_words)))
        (found,) = llm.generate([prompt], asked)
        assert found.token_ids == reference
        assert len(plain.token_ids) < 40 <= len(reference)


def test_nothing_runs_on_after_a_prompt_is_refused(llm: LLM) -> None:
    with pytest.raises(ContextLengthError):
        llm.generate(["Hello", "Hello"], [GREEDY, SamplingParams(max_tokens=100_000)])
    assert not llm.engine.core.has_work()


def test_one_of_each_per_prompt_or_one_for_all(llm: LLM) -> None:
    with pytest.raises(InvalidRequestError, match="one for each of 2 prompts, got 3"):
        llm.generate(["a", "b"], [GREEDY] * 3)


def test_a_folder_that_is_no_adapter_is_refused(llm: LLM, tmp_path: Path) -> None:
    with pytest.raises(AdapterFormatError, match=r"adapter_config\.json"):
        llm.generate("Hello", GREEDY, tmp_path)


def test_an_unknown_setting_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no_such_thing"):
        LLM(tmp_path, no_such_thing=1)


def test_a_folder_that_was_trained_again_is_another_adapter(llm: LLM, tmp_path: Path) -> None:
    prompt = llm.tokenizer.chat_prompt([{"role": "user", "content": "Where are you?"}])
    expected = [
        llm.generate([prompt], GREEDY, DEMO / "adapters" / name)[0].text
        for name in ("pirate", "shout")
    ]
    answers = []
    for name in ("pirate", "shout"):
        shutil.copytree(DEMO / "adapters" / name, tmp_path / "mine", dirs_exist_ok=True)
        answers.append(llm.generate([prompt], GREEDY, tmp_path / "mine")[0].text)
    assert answers == expected
