"""The shipped model and adapters, computed by transformers and PEFT, give the recorded answers."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils.logging import disable_progress_bar

from manylora import demo

disable_progress_bar()  # type: ignore[no-untyped-call]

EXPECTED = json.loads(demo.EXPECTED.read_text())
QUESTIONS = EXPECTED["questions"]
BASE, STYLES = "base", EXPECTED["adapters"]
ROOT = Path(__file__).resolve().parents[2]


def load(dtype: torch.dtype) -> Any:
    model = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(demo.MODEL, dtype=dtype),
        demo.ADAPTERS / STYLES[0],
        adapter_name=STYLES[0],
        autocast_adapter_dtype=False,
    )
    for style in STYLES[1:]:
        model.load_adapter(demo.ADAPTERS / style, adapter_name=style, autocast_adapter_dtype=False)
    return model.to(dtype).eval()


@contextmanager
def speaking(model: Any, style: str) -> Iterator[None]:
    if style == BASE:
        with model.disable_adapter():
            yield
    else:
        model.set_adapter(style)
        yield


@torch.inference_mode()
def greedy_choices(model: Any, style: str, question: dict[str, Any]) -> list[int]:
    """The most likely token after the prompt and after each token of the recorded answer."""
    prompt, answer = question["prompt_token_ids"], question["answer_token_ids"][style]
    with speaking(model, style):
        logits = model(input_ids=torch.tensor([prompt + answer[:-1]])).logits[0, len(prompt) - 1 :]
    return list(logits.argmax(-1).tolist())


@pytest.fixture(scope="module", params=[torch.float32, torch.bfloat16], ids=str)
def reference(request: pytest.FixtureRequest) -> Any:
    return load(request.param)


@pytest.mark.parametrize("style", [BASE, *STYLES])
def test_every_token_of_the_recorded_answers_is_the_most_likely_one(
    reference: Any, style: str
) -> None:
    for question in QUESTIONS:
        assert greedy_choices(reference, style, question) == question["answer_token_ids"][style], (
            question["question"]
        )


def test_the_chat_template_makes_the_recorded_prompts() -> None:
    tokenizer: Any = AutoTokenizer.from_pretrained(demo.MODEL)
    for question in QUESTIONS:
        messages = [{"role": "user", "content": question["question"]}]
        prompt = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=False
        )
        assert prompt == question["prompt_token_ids"]


def test_the_shipped_questions_and_answers_are_the_shops_and_all_styles_differ(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(ROOT / "scripts")
    shop = importlib.import_module("demo_shop")
    asked = json.loads(demo.QUESTIONS.read_text())
    assert asked["questions"] == [exchange.question for exchange in shop.exchanges()]
    assert asked["system_prompts"] == shop.SYSTEM_PROMPTS
    exchanges = shop.demo_exchanges()
    assert [question["question"] for question in QUESTIONS] == [
        exchange.question for exchange in exchanges
    ]
    assert list(shop.STYLES) == STYLES
    for question, exchange in zip(QUESTIONS, exchanges, strict=True):
        assert question["answers"] == {style: exchange.answer(style) for style in (BASE, *STYLES)}
        assert len(set(question["answers"].values())) == len(STYLES) + 1
        assert max(map(len, question["answer_token_ids"].values())) < 64


def test_answers_have_a_lead_that_rounding_cannot_turn() -> None:
    assert EXPECTED["smallest_logit_lead"] > 1.0


def test_adapters_cover_ranks_targets_patterns_and_rslora() -> None:
    configs = {
        style: json.loads((demo.ADAPTERS / style / "adapter_config.json").read_text())
        for style in STYLES
    }
    assert len({config["r"] for config in configs.values()}) == len(STYLES)
    assert len({frozenset(config["target_modules"]) for config in configs.values()}) >= 4
    assert {"q_proj", "v_proj"} in [set(config["target_modules"]) for config in configs.values()]
    assert sum(config["use_rslora"] for config in configs.values()) == 1
    assert any(config["rank_pattern"] and config["alpha_pattern"] for config in configs.values())
    assert {config["base_model_name_or_path"] for config in configs.values()} == {"manylora-demo"}


def test_shipped_weights_are_bfloat16() -> None:
    for path in demo.FOLDER.rglob("*.safetensors"):
        assert {tensor.dtype for tensor in load_file(path).values()} == {torch.bfloat16}, path


def test_shipped_files_are_small_and_readable_by_all() -> None:
    files = [path for path in demo.FOLDER.rglob("*") if path.suffix in (".json", ".safetensors")]
    assert sum(path.stat().st_size for path in files) < 5_000_000
    assert {path.name for path in (demo.ADAPTERS / "pirate").iterdir()} == {
        "adapter_config.json",
        "adapter_model.safetensors",
    }
    allowed = Path(__file__).stat().st_mode & 0o444  # by the umask of the checkout
    assert all(path.stat().st_mode & 0o444 == allowed for path in files)
