"""Whatever a client sends: a 4xx with the error shape, no 5xx, engine unchanged, and the next good request works."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from weft_server import DEMO_ADAPTERS, WeftServer, expected_answers, upload_bytes

ANSWERS = expected_answers()
CONFIG = (DEMO_ADAPTERS / "pirate" / "adapter_config.json").read_bytes()
WEIGHTS = (DEMO_ADAPTERS / "pirate" / "adapter_model.safetensors").read_bytes()


def files_below(folder: Path) -> set[str]:
    """Files that grow with stored adapters: blobs and temporary files."""
    return {str(path) for path in (folder / "blobs").rglob("*") if path.is_file()}


@pytest.fixture(autouse=True)
def unharmed(shop: WeftServer) -> Iterator[None]:
    """Each test must leave engine and disk as they were, and a good request right after must succeed."""
    before = (shop.engine()["boot_id"], files_below(shop.data_dir))
    yield
    assert shop.process.poll() is None
    question = ANSWERS["questions"][0]
    good = shop.ask("shop", "pirate", question["question"])
    assert good["choices"][0]["message"]["content"] == question["answers"]["pirate"]
    assert (shop.engine()["boot_id"], files_below(shop.data_dir)) == before


def assert_refused(answer: httpx.Response, status: int | None = None, code: str | None = None) -> None:
    assert 400 <= answer.status_code < 500, answer.text
    error = answer.json()["error"]
    fields = {"message", "type", "param", "code"}
    assert set(error) - ({"findings"} if error["type"] == "adapter_error" else set()) == fields
    assert len(error["message"]) > 10
    for leak in ("Traceback", "/home", "0x", str(Path.cwd())):
        assert leak not in answer.text
    if status is not None:
        assert answer.status_code == status, answer.text
    if code is not None:
        assert error["code"] == code, answer.text


BAD_BODIES: list[tuple[str, bytes, int]] = [
    ("empty", b"", 400),
    ("not JSON", b"{", 400),
    ("a list", b"[]", 400),
    ("a scalar", b"3", 400),
    ("not UTF-8", b'{"model": "\xff"}', 400),
    ("NaN", b'{"model": "base", "prompt": "x", "temperature": NaN}', 400),
    ("infinity", b'{"model": "base", "prompt": "x", "temperature": Infinity}', 400),
    ("duplicate key", b'{"model": "base", "model": "pirate", "prompt": "x"}', 400),
    ("nesting bomb", b'{"model": ' + b"[" * 50_000 + b"]" * 50_000 + b"}", 400),
    ("too large", b'{"model": "base", "prompt": "' + b"x" * (2 << 20) + b'"}', 413),
    ("NUL in a name", b'{"model": "a\\u0000b", "prompt": "x"}', 404),
    ("lone surrogate", b'{"model": "base", "prompt": "\\ud800"}', 400),
]


@pytest.mark.parametrize(("body", "status"), [pytest.param(b, s, id=name) for name, b, s in BAD_BODIES])
def test_broken_bodies(shop: WeftServer, body: bytes, status: int) -> None:
    answer = shop.tenant("shop").post("/v1/completions", content=body, headers={"content-type": "application/json"})
    assert_refused(answer)
    assert answer.status_code in (status, 400)


BAD_FIELDS: list[dict[str, Any]] = [
    {"no_such_field": 1},
    {"temperature": -0.1},
    {"temperature": "hot"},
    {"temperature": True},
    {"temperature": 1e300},
    {"top_p": -0.1},
    {"top_p": 1.5},
    {"top_k": -2},
    {"min_p": 2},
    {"max_tokens": -1},
    {"max_tokens": 1.5},
    {"max_tokens": "5"},
    {"max_tokens": 10**30},
    {"n": 0},
    {"n": True},
    {"n": 10_000},
    {"best_of": 129},
    {"best_of": 2, "n": 3},
    {"best_of": 2, "stream": True},
    {"use_beam_search": True, "n": 2, "stream": True},
    {"use_beam_search": True, "n": 2, "temperature": 0.5},
    {"length_penalty": 2.0},
    {"seed": 1 << 70},
    {"stop": ["a"] * 33},
    {"stop": 5},
    {"logprobs": -1},
    {"logprobs": 1000},
    {"logit_bias": {"x": 1}},
    {"logit_bias": {"5": 1000}},
    {"logit_bias": {"99999999": 1}},
    {"presence_penalty": 3},
    {"frequency_penalty": -3},
    {"repetition_penalty": 0},
    {"stop_token_ids": [-1]},
    {"prompt": []},
    {"prompt": [[]]},
    {"prompt": [-1]},
    {"prompt": [99_999_999]},
    {"prompt": [1, "a"]},
    {"prompt": None},
    {"prompt": {"a": 1}},
    {"prompt": [5] * 100_000},
    {"stream": "yes"},
    {"stream_options": {"include_usage": True}},
    {"model": None},
    {"model": 3},
    {"model": "no-such-model"},
    {"model": "x" * 10_000},
    {"model": "../../etc/passwd"},
    {"adapter_id": "no-such-adapter"},
    {"model": "pirate", "adapter_id": "shout"},
]


@pytest.mark.parametrize("fields", BAD_FIELDS, ids=lambda fields: str(fields)[:60])
def test_bad_fields(shop: WeftServer, fields: dict[str, Any]) -> None:
    body = {"model": "pirate", "prompt": "x", "max_tokens": 4, **fields}
    assert_refused(shop.tenant("shop").post("/v1/completions", json=body))


BAD_CHATS: list[dict[str, Any]] = [
    {"messages": []},
    {"messages": "hi"},
    {"messages": [{}]},
    {"messages": [{"role": "user"}]},
    {"messages": [{"role": "nobody", "content": "x"}]},
    {"messages": [{"role": "user", "content": 5}]},
    {"messages": [{"role": "user", "content": "x", "extra": 1}]},
    {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x"}}]}]},
    {"messages": [{"role": "user", "content": "hello " * 50_000}]},
    {"tools": [{"type": "function", "function": {"name": "f"}}]},
    {"response_format": {"type": "json_schema"}},
    {"chat_template": "{{ 1 }}"},
    {"top_logprobs": 5},
    {"logprobs": True, "top_logprobs": 1000},
    {"max_tokens": 5, "max_completion_tokens": 6},
]


@pytest.mark.parametrize("fields", BAD_CHATS, ids=lambda fields: str(fields)[:60])
def test_bad_chats(shop: WeftServer, fields: dict[str, Any]) -> None:
    body = {"model": "pirate", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, **fields}
    assert_refused(shop.tenant("shop").post("/v1/chat/completions", json=body))


@pytest.mark.parametrize(
    ("key", "status"),
    [(None, 401), ("Bearer", 401), ("Bearer weft_wrong", 401), ("Bearer " + "x" * 10_000, 401), ("Bearer \u00e9", 401)],
)
def test_wrong_keys(shop: WeftServer, key: str | None, status: int) -> None:
    headers = [] if key is None else [(b"Authorization", key.encode())]
    with httpx.Client(base_url=shop.url, trust_env=False) as client:
        for method, path in (("GET", "/v1/models"), ("POST", "/v1/completions"), ("POST", "/v1/adapters")):
            assert_refused(client.request(method, path, headers=headers, content=b""), status)


def test_another_tenants_adapter_looks_like_a_missing_one(shop: WeftServer) -> None:
    stranger = shop.tenant("stranger")
    for model in ("pirate", "shop/pirate", "pirate@1"):
        foreign = stranger.post("/v1/completions", json={"model": model, "prompt": "x"})
        missing = stranger.post("/v1/completions", json={"model": "n" + model[1:], "prompt": "x"})
        assert_refused(foreign, 404, "model_not_found")
        assert foreign.text.replace(model, "*") == missing.text.replace("n" + model[1:], "*")
    assert_refused(stranger.get("/v1/adapters/pirate"), 404)
    assert_refused(stranger.delete("/v1/adapters/pirate"), 404)
    assert [card["id"] for card in stranger.get("/v1/models").json()["data"] if card["parent"]] == []


def test_tenants_cannot_do_what_admins_do(shop: WeftServer) -> None:
    client = shop.tenant("shop")
    for method, path in (
        ("GET", "/v1/tenants"),
        ("POST", "/v1/tenants"),
        ("DELETE", "/v1/tenants/shop"),
        ("POST", "/v1/tenants/shop/keys"),
        ("GET", "/v1/engine"),
        ("GET", "/metrics"),
    ):
        answer = client.request(method, path, json={"name": "x"} if method == "POST" else None)
        assert answer.status_code in (403, 404), f"{method} {path}: {answer.status_code}"


def safetensors_header_length() -> int:
    return int.from_bytes(WEIGHTS[:8], "little")


def with_tensor_renamed(old: bytes, new: bytes) -> bytes:
    header = WEIGHTS[8 : 8 + safetensors_header_length()].replace(old, new, 1)
    return len(header).to_bytes(8, "little") + header + WEIGHTS[8 + safetensors_header_length() :]


BAD_ADAPTERS: list[tuple[str, bytes, bytes]] = [
    ("empty weights", CONFIG, b""),
    ("truncated", CONFIG, WEIGHTS[: len(WEIGHTS) // 2]),
    ("trailing bytes", CONFIG, WEIGHTS + b"x"),
    ("huge header length", CONFIG, b"\xff" * 8 + WEIGHTS[8:]),
    ("pickle", CONFIG, b"\x80\x04\x95" + b"x" * 100),
    ("zip", CONFIG, b"PK\x03\x04" + b"x" * 100),
    (
        "base tensor",
        CONFIG,
        with_tensor_renamed(b"base_model.model.model.layers.0", b"base_model.model.model.layers.9"),
    ),
    ("config is not JSON", b"{", WEIGHTS),
    ("config is a list", b"[]", WEIGHTS),
    ("rank 0", CONFIG.replace(b'"r": ', b'"r": -'), WEIGHTS),
    ("DoRA", CONFIG.replace(b'"use_dora": false', b'"use_dora": true'), WEIGHTS),
    ("IA3", CONFIG.replace(b'"LORA"', b'"IA3"'), WEIGHTS),
    ("NaN alpha", CONFIG.replace(b'"lora_alpha": ', b'"lora_alpha": NaN, "x": '), WEIGHTS),
]


@pytest.mark.parametrize(("config", "weights"), [pytest.param(c, w, id=name) for name, c, w in BAD_ADAPTERS])
def test_bad_adapters(shop: WeftServer, config: bytes, weights: bytes) -> None:
    client = shop.tenant("shop")
    assert_refused(upload_bytes(client, "bad", config, weights), 422)
    assert_refused(client.get("/v1/adapters/bad"), 404)


def test_an_adapter_that_would_overwrite_the_base_is_refused(shop: WeftServer) -> None:
    header = b'{"base_model.model.model.embed_tokens.weight":{"dtype":"F32","shape":[2,2],"data_offsets":[0,16]}}'
    weights = len(header).to_bytes(8, "little") + header + b"\x00" * 16
    assert_refused(upload_bytes(shop.tenant("shop"), "bad", CONFIG, weights), 422, "weights.tensor_not_allowed")


@pytest.mark.parametrize("name", ["../x", "a/b", ".", "..", "a\0b", "x" * 300, "\u00e9", "", "Upper", "-x", "a..b"])
def test_bad_adapter_names(shop: WeftServer, name: str) -> None:
    assert_refused(upload_bytes(shop.tenant("shop"), name, CONFIG, WEIGHTS))


def test_unknown_routes_and_methods_have_the_error_shape(shop: WeftServer) -> None:
    client = shop.tenant("shop")
    assert_refused(client.get("/v1/nothing"), 404)
    assert_refused(client.put("/v1/completions"), 405)
