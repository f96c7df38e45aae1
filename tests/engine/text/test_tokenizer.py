from __future__ import annotations

import json
import sys
import unicodedata
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from manylora.engine.text.tokenizer import LONG, NFC_SHRINKS, Tokenizer, read_eos_token_ids
from manylora.errors import ConfigError, InvalidRequestError

DEMO = Path(__file__).resolve().parents[3] / "manylora" / "demo" / "manylora-demo"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(DEMO)


def test_text_comes_back(tokenizer: Tokenizer) -> None:
    assert tokenizer.decode(tokenizer.encode("naïve 叫, ok?")) == "naïve 叫, ok?"


def test_special_tokens_are_added_only_when_asked_for(tokenizer: Tokenizer) -> None:
    with_start = tokenizer.encode("Hello")
    assert with_start[1:] == tokenizer.encode("Hello", add_special_tokens=False)


def test_a_conversation_ends_where_the_assistant_speaks(tokenizer: Tokenizer) -> None:
    messages = [{"role": "user", "content": "hi"}]
    assert tokenizer.chat_template.render(messages) == "<|start|><|user|>hi<|end|><|assistant|>"
    assert tokenizer.chat_prompt(messages) == tokenizer.encode(
        "<|start|><|user|>hi<|end|><|assistant|>", add_special_tokens=False
    )


def test_messages_that_the_template_cannot_take_are_the_clients_mistake(
    tokenizer: Tokenizer,
) -> None:
    with pytest.raises(InvalidRequestError, match="chat template") as refusal:
        tokenizer.chat_template.render([{"role": "user", "content": None}])
    assert refusal.value.param == "messages"


def test_a_model_without_a_template_says_so(tmp_path: Path) -> None:
    for name in ("tokenizer.json", "config.json"):
        (tmp_path / name).write_bytes((DEMO / name).read_bytes())
    config = json.loads((DEMO / "tokenizer_config.json").read_text())
    del config["chat_template"]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = Tokenizer(tmp_path)
    assert not tokenizer.chat_template.source
    with pytest.raises(InvalidRequestError) as refusal:
        tokenizer.chat_prompt([{"role": "user", "content": "hi"}])
    assert refusal.value.code == "no_chat_template"


def test_a_folder_without_a_tokenizer_is_a_wrong_setting(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model\.path must have a tokenizer"):
        Tokenizer(tmp_path)


def test_token_texts_keep_spaces_and_spell_special_tokens(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("Hello, how are you", add_special_tokens=False)
    assert "".join(tokenizer.token_text(token_id) for token_id in ids) == "Hello, how are you"
    assert tokenizer.token_text(next(iter(tokenizer.eos_token_ids))) == "<|end|>"


def test_token_bytes_add_up_though_characters_are_split(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("ok 叫🙂", add_special_tokens=False)
    assert b"".join(tokenizer.token_bytes(token_id) for token_id in ids) == "ok 叫🙂".encode()


def test_threads_may_share_it(tokenizer: Tokenizer) -> None:
    texts = [f"Hello number {index}, how are you?" for index in range(200)]
    with ThreadPoolExecutor(4) as threads:
        encoded = list(threads.map(tokenizer.encode, texts))
    assert [tokenizer.decode(ids) for ids in encoded] == texts


@pytest.mark.parametrize(("named", "expected"), [(7, {7}), ([7, 8], {7, 8}), (None, set())])
def test_end_of_sequence_tokens_come_as_one_or_several(
    tmp_path: Path, named: object, expected: set[int]
) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": named}))
    assert read_eos_token_ids(tmp_path) == expected


@pytest.mark.parametrize(
    "content", ["{", "[" * 100_000, '{"eos_token_id": ' + "1" * 5000 + "}", "\ufeff{}"]
)
def test_a_broken_file_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "generation_config.json").write_text(content)
    with pytest.raises(ConfigError, match=r"cannot read .*generation_config\.json"):
        read_eos_token_ids(tmp_path)


def test_the_tokenizers_own_end_of_sequence_token_counts(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 3}))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "<end>"}}))
    (tmp_path / "tokenizer.json").write_text(
        json.dumps({"added_tokens": [{"id": 9, "content": "<end>"}]})
    )
    assert read_eos_token_ids(tmp_path) == {3, 9}


def test_the_demo_model_ends_with_its_end_token(tokenizer: Tokenizer) -> None:
    assert {tokenizer.token_text(token_id) for token_id in tokenizer.eos_token_ids} == {"<|end|>"}
    assert tokenizer.vocab_size == 640


def changed(folder: Path, **parts: object) -> Tokenizer:
    """The demo's tokenizer with other parts."""
    for name in ("tokenizer_config.json", "config.json"):
        (folder / name).write_bytes((DEMO / name).read_bytes())
    content = json.loads((DEMO / "tokenizer.json").read_text())
    (folder / "tokenizer.json").write_text(json.dumps(content | parts))
    return Tokenizer(folder)


@pytest.mark.parametrize("text", ["ab ", "a", "\n", "é🎉", "<|user|>", "12 "])
def test_long_texts_have_the_tokens_of_short_ones(tokenizer: Tokenizer, text: str) -> None:
    long = text * (LONG // len(text) + 1)
    expected = tokenizer._backend.encode(long).ids
    assert tokenizer.encode(long) == expected
    assert tokenizer.decode(expected * 8) == tokenizer._backend.decode(expected * 8)


def test_no_text_has_fewer_tokens_than_its_bytes_allow(tokenizer: Tokenizer) -> None:
    most = tokenizer.max_token_bytes
    assert most == max(
        len(token.encode()) for token in tokenizer.special_tokens | tokenizer.grammar_tokens
    )
    for text in ("</tool_response>" * 50, "  " * 99, "\n" * 99, "the shop " * 50, "\u0301" * 99):
        assert len(text.encode()) <= most * len(tokenizer.encode(text, add_special_tokens=False))


@pytest.mark.parametrize(
    "parts",
    [
        {"normalizer": {"type": "NFKC"}},
        {"normalizer": {"type": "Strip", "strip_left": True, "strip_right": True}},
        {"pre_tokenizer": {"type": "WhitespaceSplit"}},
        {
            "added_tokens": [
                {
                    "id": 0,
                    "content": "<|pad|>",
                    "single_word": False,
                    "lstrip": True,
                    "rstrip": False,
                }
                | {"normalized": False, "special": True}
            ]
        },
    ],
)
def test_where_text_may_be_left_out_no_bound_is_told(
    tmp_path: Path, parts: dict[str, object]
) -> None:
    assert changed(tmp_path, **parts).max_token_bytes is None


def test_a_normal_form_shrinks_no_text_further_than_is_reckoned_with(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    known = tokenizer.max_token_bytes
    assert known is not None
    assert changed(tmp_path, normalizer={"type": "NFC"}).max_token_bytes == NFC_SHRINKS * known
    letters = [chr(point) for point in range(sys.maxunicode + 1) if not 0xD800 <= point < 0xE000]
    apart = {letter: unicodedata.normalize("NFD", letter) for letter in letters}
    longest = {letter: len(letter.encode()) for letter in letters}  # what becomes this letter alone
    for letter, parts in apart.items():
        if len(parts) == 1:
            longest[parts] = max(longest[parts], len(letter.encode()))
    for letter, parts in apart.items():
        assert len(letter.encode()) <= sum(longest[part] for part in parts)
        if unicodedata.normalize("NFC", letter) == letter:
            assert sum(longest[part] for part in parts) <= NFC_SHRINKS * len(letter.encode())


@pytest.mark.parametrize("length", [60, LONG + 1])
@pytest.mark.parametrize("part", ["pre_tokenizer", "normalizer"])
def test_a_regular_expression_that_gives_up_refuses_the_text(
    tmp_path: Path, part: str, length: int
) -> None:
    slow = {"pattern": {"Regex": "(a|aa)+!"}}
    split = {"type": "Split", "behavior": "Isolated", "invert": False, **slow}
    found = changed(
        tmp_path,
        **{part: split if part == "pre_tokenizer" else {"type": "Replace", "content": "", **slow}},
    )
    assert found.encode("once, a!")
    for reads in (found.encode, found.text_offsets):
        with pytest.raises(InvalidRequestError, match="gives up on this text") as refusal:
            reads("a" * length)
        assert refusal.value.code == "tokenizer_unusable"


def test_a_text_that_grows_beyond_measure_is_noticed(tmp_path: Path, tokenizer: Tokenizer) -> None:
    compatible = changed(tmp_path, normalizer={"type": "NFKC"})
    assert compatible.swells("\ufdfa" * LONG)
    assert not compatible.swells("\ufdfa" * 10)
    assert not compatible.swells("ordinary text " * LONG)
    assert not tokenizer.swells("\ufdfa" * LONG)
