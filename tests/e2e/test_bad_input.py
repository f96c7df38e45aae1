"""What needs the real tokenizer to be refused: a 4xx in the error's shape, and the engine goes on unchanged."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from weft_server import WeftServer, expected_answers

COMPLETIONS: list[dict[str, Any]] = [
    {"prompt": [99_999_999]},
    {"prompt": [5] * 100_000},
    {"prompt": "hello " * 50_000},
    {"prompt": "\ud800"},
    {"prompt": [[]]},
    {"max_tokens": 10**30},
    {"n": 10_000},
    {"logit_bias": {"99999999": 1}},
    {"stop_token_ids": [-1]},
    {"model": "a\0b"},
    {"model": "../../etc/passwd"},
    {"model": "pirate", "adapter_id": "shout"},
]
CHATS: list[dict[str, Any]] = [
    {"messages": [{"role": "user", "content": "hello " * 50_000}]},
    {"messages": [{"role": "nobody", "content": "x"}]},
    {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x"}}]}]},
    {"chat_template": "{{ 1 }}"},
]


@pytest.fixture(autouse=True)
def unharmed(shop: WeftServer) -> Iterator[None]:
    """Each test must leave the engine as it was, and a good request right after must succeed."""
    before = shop.engine()["boot_id"]
    yield
    assert shop.process.poll() is None
    question = expected_answers()["questions"][0]
    good = shop.ask("shop", "pirate", question["question"])
    assert good["choices"][0]["message"]["content"] == question["answers"]["pirate"]
    assert shop.engine()["boot_id"] == before


@pytest.mark.parametrize("fields", [*COMPLETIONS, *CHATS], ids=lambda fields: str(fields)[:60])
def test_what_cannot_be_computed_is_refused(shop: WeftServer, fields: dict[str, Any]) -> None:
    is_chat = "messages" in fields or "chat_template" in fields
    asked = {"messages": [{"role": "user", "content": "hi"}]} if is_chat else {"prompt": "x"}
    path = "/v1/chat/completions" if is_chat else "/v1/completions"
    body = json.dumps({"model": "pirate", "max_tokens": 4, **asked, **fields})
    answer = shop.tenant("shop").post(path, content=body, headers={"content-type": "application/json"})
    assert 400 <= answer.status_code < 500, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert len(error["message"]) > 10
    assert not [leak for leak in ("Traceback", "/home", "0x", str(Path.cwd())) if leak in answer.text]
