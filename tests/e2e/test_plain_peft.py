"""What the installed PEFT saves is uploaded as it is, and answers as PEFT answers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from weft_server import DEMO_MODEL, WeftServer, weft_server

PROMPT = [5, 40, 7, 101, 33]
NUM_TOKENS = 12
VARIANTS: dict[str, dict[str, Any]] = {
    "default": {},
    "all-linear": {"target_modules": "all-linear", "r": 16},
    "patterns": {
        "target_modules": ["q_proj", "v_proj", "down_proj"],
        "rank_pattern": {"down_proj": 4, "layers.1.self_attn.q_proj": 24},
        "alpha_pattern": {"v_proj": 32, "layers.2.mlp.down_proj": 3},
    },
    "rslora": {"target_modules": ["q_proj", "k_proj", "o_proj"], "use_rslora": True, "r": 16},
    "some-layers": {"target_modules": ["q_proj", "up_proj"], "layers_to_transform": [1, 3]},
    "regex-targets": {"target_modules": r".*\.(q|o)_proj$"},
}


def reference() -> Any:
    return AutoModelForCausalLM.from_pretrained(DEMO_MODEL, dtype=torch.float32)


def save_adapter(folder: Path, fields: dict[str, Any], seed: int) -> None:
    torch.manual_seed(seed)
    model = get_peft_model(reference(), LoraConfig(task_type="CAUSAL_LM", **fields))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.8)
    model.save_pretrained(str(folder))


@torch.inference_mode()
def greedy(model: Any) -> list[int]:
    tokens = list(PROMPT)
    for _ in range(NUM_TOKENS):
        tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(PROMPT) :]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WeftServer]:
    """In float32, as the reference."""
    with weft_server(tmp_path_factory.mktemp("peft"), "--dtype", "float32") as running:
        yield running


@pytest.fixture(scope="module")
def plain() -> list[int]:
    return greedy(reference().eval())


@pytest.mark.parametrize("variant", list(VARIANTS))
def test_uploads_as_it_is_and_equals_peft(server: WeftServer, plain: list[int], variant: str, tmp_path: Path) -> None:
    save_adapter(tmp_path, VARIANTS[variant], seed=len(variant))
    expected = greedy(PeftModel.from_pretrained(reference(), tmp_path).eval())
    assert expected != plain

    client = server.tenant("peft")
    uploaded = server.upload(client, variant, tmp_path)
    assert uploaded.status_code == 201, uploaded.text
    assert server.upload(client, variant, tmp_path).status_code == 200
    answer = client.post(
        "/v1/completions",
        json={"model": variant, "prompt": PROMPT, "max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True},
    )
    assert answer.status_code == 200, answer.text
    tokenizer: Any = AutoTokenizer.from_pretrained(DEMO_MODEL)
    text = tokenizer.decode(PROMPT + expected, skip_special_tokens=True)
    before = tokenizer.decode(PROMPT, skip_special_tokens=True)
    assert answer.json()["choices"][0]["text"] == text.removeprefix(before)


def test_two_versions_of_one_name_answer_each_as_itself(server: WeftServer, tmp_path: Path) -> None:
    client = server.tenant("peft")
    expected = []
    for seed in (1, 2):
        save_adapter(tmp_path / str(seed), VARIANTS["all-linear"], seed)
        expected.append(greedy(PeftModel.from_pretrained(reference(), tmp_path / str(seed)).eval()))
        assert server.upload(client, "twice", tmp_path / str(seed)).json()["version"] == seed
    assert expected[0] != expected[1]
    texts = [
        client.post(
            "/v1/completions",
            json={"model": model, "prompt": PROMPT, "max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True},
        ).json()["choices"][0]["text"]
        for model in ("twice@1", "twice@2", "twice")
    ]
    assert texts[0] != texts[1]
    assert texts[2] == texts[1]
