from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from api_server import BASE, Api, Client
from manylora.engine.text.tokenizer import Tokenizer
from manylora.errors import ConfigError, InvalidRequestError
from manylora.server.tools import bounded_search
from manylora.server.tools.formats import format_of
from manylora.server.tools.reading import AnswerPlan, AnswerReader, plan_answer
from tool_models import HERMES, known_format, tokenizer_folder, tool, use_tokenizer

pytestmark = pytest.mark.anyio
SLOW = r"(?:a|aa)+(?:a|aa)+\Z|(?:a|aa)+!"
"""Takes time that doubles every second letter."""
LETTERS = "a" * 200 + "?"
CALL_TAGS = r"<(?P<key>\w+)>(?P<value>.*?)</\1>"
CALL = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}


def fields(*, closes: Mapping[str, Any] | None = None, **calls: Any) -> dict[str, Any]:
    about_calls: dict[str, Any] = {
        "open_pattern": r"<call (?P<name>\w+)>",
        "close": "</call>",
        "transform": CALL,
        "repeats": True,
    }
    about_calls = {
        name: value for name, value in {**about_calls, **calls}.items() if value is not None
    }
    return {"content": dict(closes or {}), "tool_calls": about_calls}


def tags(pattern: str) -> dict[str, Any]:
    return {"content": "xml-inline", "content_args": {"tag_pattern": pattern}}


def template(own: Mapping[str, Any], **more: Any) -> Any:
    return {"start_anchor": "<|assistant|>", "fields": own, **more}


def read_whole(reader: AnswerReader, text: str, size: int) -> None:
    for start in range(0, len(text), size):
        reader.read(text[start : start + size], [])
    reader.close(reader.read("", [])[0], is_cut=False)


def tokenizer_of(own: Any) -> Tokenizer:
    return Tokenizer(tokenizer_folder.__wrapped__(HERMES, response_template=own))


def plan(own: Any) -> AnswerPlan:
    answer = known_format(tokenizer_of(own))
    return plan_answer(
        answer, [tool("ping", x={"type": "string"})], "Hi <|assistant|>", shows_reasoning=True
    )


@pytest.fixture(autouse=True)
def _short_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded_search, "MAX_SEARCH_S", 0.05)


@pytest.mark.parametrize(
    ("own", "text"),
    [
        (fields(open_pattern=SLOW), LETTERS),
        (fields(close_pattern=SLOW, close=None), f"<call ping>{LETTERS}"),
        (fields(closes={"close_pattern": SLOW}), LETTERS),
        (fields(**tags(rf"(?P<key>{SLOW})(?P<value>)")), f"<call ping>{LETTERS}</call>"),
    ],
    ids=["open", "close", "end of content", "tags"],
)
@pytest.mark.parametrize("size", [1, 7, 10_000])
def test_expressions_that_take_for_ever_end_the_answer(
    own: dict[str, Any], text: str, size: int
) -> None:
    reader = plan(template(own)).reader()
    with pytest.raises(InvalidRequestError, match="computing time") as refusal:
        read_whole(reader, text, size)
    assert refusal.value.code == "response_template_unusable"


def test_all_searches_of_an_answer_share_the_time() -> None:
    budget = bounded_search.SearchBudget()
    with pytest.raises(InvalidRequestError):
        budget.try_tags(LETTERS, {"tag_pattern": SLOW})
    with pytest.raises(InvalidRequestError):
        budget.try_tags("", {"tag_pattern": CALL_TAGS})


def test_the_start_of_answers_is_looked_for_in_bounded_time() -> None:
    answer = known_format(tokenizer_of({"start_anchor_pattern": SLOW, "fields": fields()}))
    with pytest.raises(InvalidRequestError, match="computing time"):
        plan_answer(answer, (), LETTERS, shows_reasoning=True)


@pytest.mark.parametrize("size", [1, 5, 1000])
def test_sound_expressions_read_calls(size: int) -> None:
    text = "Look. <call ping><x>lamp</x></call>" * 20
    reader = plan(template(fields(**tags(CALL_TAGS)))).reader()
    readings = [
        reader.read(text[start : start + size], [])[0] for start in range(0, len(text), size)
    ]
    calls = [call for reading in readings for call in reading.calls]
    assert [(call.name, call.arguments) for call in calls] == [("ping", '{"x": "lamp"}')] * 20


@pytest.mark.parametrize(
    ("own", "words"),
    [
        ([], "must be a dict"),
        (template({}), "non-empty"),
        (template(fields(open_pattern="(")), "invalid open_pattern"),
        (template(fields(**tags("("))), "no regular expression"),
        (template(fields(content="xml-inline")), "no regular expression"),
        (
            template(fields(content="xml-inline", content_args={"tag_pattern": 5})),
            "no regular expression",
        ),
        (
            template(
                fields(
                    content="xml-inline",
                    content_args={"tag_pattern": CALL_TAGS, "value_parser": {"name": "xml-inline"}},
                )
            ),
            "value_parser",
        ),
    ],
)
def test_a_template_that_cannot_be_used_is_told_at_the_start(own: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as refusal:
        format_of(tokenizer_of(own))
    assert "model.tool_format" in str(refusal.value)
    assert format_of(tokenizer_of(own), "hermes") is not None


async def test_a_chat_that_is_given_up_is_answered_and_billed(api: Api, acme: Client) -> None:
    use_tokenizer(api, tokenizer_of(template(fields(closes={"close_pattern": SLOW}))))
    api.engine.write = lambda _: LETTERS
    asked = {"model": BASE, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 400}
    asked["tools"] = [
        {"type": "function", "function": {"name": "ping", "parameters": {"type": "object"}}}
    ]
    answer = await acme.post("/v1/chat/completions", json=asked)
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "response_template_unusable"
    streamed = await acme.post("/v1/chat/completions", json={**asked, "stream": True})
    assert "response_template_unusable" in streamed.text
