from __future__ import annotations

import json
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import pytest

from manylora.errors import InvalidRequestError
from manylora.server.tools.reading import (
    MAX_HELD,
    AnswerPlan,
    CallPiece,
    Reading,
    joined_calls,
    plan_answer,
)
from tool_models import family, tool

TOOLS = (
    tool("where_is", item={"type": "string"}),
    tool(
        "add",
        a={"type": "integer"},
        b_={"type": "number"},
        tags_={"type": "array"},
        exact_={"type": "boolean"},
    ),
    tool("ping"),
)
LAMP: tuple[str, Any] = ("where_is", {"item": "lamp"})
ODD: tuple[str, Any] = ("where_is", {"item": 'a "}]}" \\ <b>\n{"name": 1} é叫'})
ADD: tuple[str, Any] = ("add", {"a": 1, "b": 2.5, "tags": ["x", {"y": None}], "exact": True})
PING: tuple[str, Any] = ("ping", {})


@dataclass(frozen=True)
class Row:
    family: str
    text: str
    calls: list[tuple[str, Any]] = field(default_factory=list)
    content: str = ""
    reasoning: str = ""
    prefix: str = ""


def hermes(*calls: tuple[str, Any]) -> str:
    return "\n".join(
        f'<tool_call>\n{{"name": "{name}", "arguments": {dumps(args)}}}\n</tool_call>'
        for name, args in calls
    )


def dumps(arguments: object) -> str:
    return json.dumps(arguments, ensure_ascii=False)


def objects(*calls: tuple[str, Any]) -> str:
    return ", ".join(
        f'{{"name": "{name}", "arguments": {dumps(arguments)}}}' for name, arguments in calls
    )


XML_ADD = (
    "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\n2.5\n</parameter>\n"
    '<parameter=tags>\n["x", {"y": null}]\n</parameter>\n<parameter=exact>\nTrue\n</parameter>\n'
    "</function>\n</tool_call>"
)
XML_ODD = (
    f"<tool_call>\n<function=where_is>\n<parameter=item>\n{ODD[1]['item']}\n</parameter>\n"
    "</function>\n</tool_call>"
)
HARMONY_CALL = (
    '<|channel|>commentary to=functions.where_is <|constrain|>json<|message|>{"item": "lamp"}'
)
GEMMA_ADD = '<|tool_call>call:add{a:1,b:2.5,tags:[<|"|>x<|"|>,{y:null}],exact:true}<tool_call|>'
ROWS = [
    Row("hermes", "Hello, world. ", content="Hello, world. "),
    Row("hermes", " Hi <tool> </tool_call>", content=" Hi <tool> </tool_call>"),
    Row("hermes", hermes(LAMP), [LAMP]),
    Row(
        "hermes",
        f"Let me see.\n\n{hermes(LAMP, ODD, ADD, PING)}\n",
        [LAMP, ODD, ADD, PING],
        "Let me see.",
    ),
    Row(
        "hermes",
        f"<think>\nThe <tool_call>\n</think>\n\n{hermes(ODD)}",
        [ODD],
        reasoning="The <tool_call>",
    ),
    Row(
        "hermes", f"hm\n</think>\n\nYes. {hermes(LAMP)} Bye", [LAMP], "Yes.  Bye", "hm", "<think>\n"
    ),
    Row("hermes", "Fine. ", content="Fine. ", prefix="<think>\n\n</think>\n\n"),
    Row("hermes", '<tool_call>{"name":"add","arguments":{"a":1}}</tool_call>', [("add", {"a": 1})]),
    Row(
        "hermes",
        '<tool_call>\n{"name": "drop_table", "arguments": {}}\n</tool_call>',
        [],
        '<tool_call>\n{"name": "drop_table", "arguments": {}}\n</tool_call>',
    ),
    Row("qwen_xml", XML_ADD, [ADD]),
    Row("qwen_xml", f"Look:\n\n{XML_ODD}\n{XML_ADD}", [ODD, ADD], "Look:"),
    Row("qwen_xml", f"so\n</think>\n\n{XML_ADD}", [ADD], reasoning="so", prefix="<think>\n"),
    Row("qwen_xml", "<tool_call>\n<function=ping>\n</function>\n</tool_call>", [PING]),
    Row("llama3", f'{{"name": "where_is", "parameters": {dumps(ODD[1])}}}', [ODD]),
    Row("llama3", '{"name": "ping", "parameters": {}}', [PING]),
    Row(
        "llama3",
        'As {"name": "ping", "parameters": {}} shows',
        content='As {"name": "ping", "parameters": {}} shows',
    ),
    Row("mistral_v3", f"[TOOL_CALLS] [{objects(LAMP, ODD, ADD)}]", [LAMP, ODD, ADD]),
    Row("mistral_v3", "[1] is a list", content="[1] is a list"),
    Row(
        "mistral",
        f"[TOOL_CALLS]where_is[ARGS]{dumps(ODD[1])}[TOOL_CALLS]ping[ARGS]{{}}",
        [ODD, PING],
    ),
    Row("mistral", "[THINK]why[/THINK]Because.", content="Because.", reasoning="why"),
    Row("mistral", '[TOOL_CALLS]where_is[CALL_ID]123456789[ARGS]{"item": "lamp"}', [LAMP]),
    Row("gemma4", GEMMA_ADD, [ADD]),
    Row("gemma4", f"<|channel>thought\nhm\n<channel|>Ok.{GEMMA_ADD}", [ADD], "Ok.", "hm"),
    Row("harmony", HARMONY_CALL, [LAMP]),
    Row(
        "harmony",
        f"<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant{HARMONY_CALL}",
        [LAMP],
        "",
        "Hm.",
    ),
    Row("harmony", "<|channel|>final<|message|>Hello {you}.", [], "Hello {you}."),
    Row(
        "harmony",
        ' to=functions.where_is<|channel|>commentary json<|message|>{"item": "lamp"}',
        [LAMP],
    ),
    Row("phi4_mini", f"functools[{objects(LAMP, ADD)}]", [LAMP, ADD]),
    Row("phi4_mini", "import functools[0]", content="import functools[0]"),
    Row("olmo3", '<function_calls>where_is(item="lamp")\nping()</function_calls>', [LAMP, PING]),
    Row(
        "olmo3",
        "<function_calls>add(a=1, b=2.5, tags=['x', {'y': None}], exact=True)</function_calls>",
        [ADD],
    ),
    Row(
        "olmo3",
        "<function_calls>add(1)</function_calls>",
        content="<function_calls>add(1)</function_calls>",
    ),
    Row(
        "olmo3",
        "<function_calls>add(**{})</function_calls>",
        content="<function_calls>add(**{})</function_calls>",
    ),
    Row(
        "lfm2",
        '<|tool_call_start|>[add(a=1, b=2.5, tags=["x", {"y": null}], exact=true)]<|tool_call_end|>Wait.',
        [ADD],
        "Wait.",
    ),
    Row("python", f"[where_is(item={ODD[1]['item']!r}), ping()]", [ODD, PING]),
    Row("python", "[1] is no call", content="[1] is no call"),
    Row("think", "hm</think>42", content="42", reasoning="hm", prefix="<think>\n"),
    Row("think", "<think>hm", reasoning="hm"),
]


def read(row: Row, *cuts: int) -> Reading:
    """What the row's text reads as, cut at these places."""
    reader = AnswerPlan(
        format=family(row.family),
        tools=TOOLS if "tool_calls" in family(row.family).template["fields"] else (),
        prefix=row.prefix,
    ).reader()
    whole = Reading()
    for start, end in pairwise((0, *cuts, len(row.text))):
        piece, _ = reader.read(row.text[start:end], [])
        whole.content += piece.content
        whole.reasoning += piece.reasoning
        whole.calls += piece.calls
    assert not reader.close(whole, is_cut=False)
    return whole


def shown(reading: Reading) -> tuple[str, str, list[tuple[str | None, Any]]]:
    calls = joined_calls(reading.calls)
    assert [call.index for call in calls] == list(range(len(calls)))
    return (
        reading.content,
        reading.reasoning,
        [(call.name, json.loads(call.arguments)) for call in calls],
    )


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.family}-{row.text[:20]!r}")
def test_every_family_is_read_in_pieces_of_any_size(row: Row) -> None:
    expected = (row.content, row.reasoning, row.calls)
    assert shown(read(row)) == expected
    for size in (1, 2, 3, 7):
        assert shown(read(row, *range(size, len(row.text), size))) == expected
    for cut in range(1, len(row.text)):
        assert shown(read(row, cut)) == expected


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", hermes(ODD)),
        ("mistral", f"[TOOL_CALLS]where_is[ARGS]{dumps(ODD[1])}"),
        ("harmony", HARMONY_CALL),
    ],
)
def test_the_raw_arguments_stream_while_they_grow(name: str, text: str) -> None:
    reader = AnswerPlan(format=family(name), tools=TOOLS).reader()
    pieces = [piece for letter in text for piece in reader.read(letter, [])[0].calls]
    assert [(piece.index, piece.name) for piece in pieces[:2]] == [(0, "where_is"), (0, None)]
    assert pieces[0].id is not None
    assert all(piece.id is None for piece in pieces[1:])
    assert len(pieces) > 10
    whole = "".join(piece.arguments for piece in pieces)
    assert text.count(whole) == 1


@pytest.mark.parametrize(
    ("name", "text", "calls"),
    [
        ("hermes", hermes(LAMP)[:57], [("where_is", '{"item": "l')]),
        ("hermes", hermes(LAMP)[:38], []),
        ("qwen_xml", XML_ADD[:-20], []),
        ("llama3", '{"name": "ping", "parameters": {}', [("ping", "{}")]),
        ("mistral_v3", f"[TOOL_CALLS] [{objects(LAMP)}", []),
    ],
)
def test_a_call_that_is_cut_is_given_as_far_as_it_came(
    name: str, text: str, calls: list[tuple[str, str]]
) -> None:
    reader = AnswerPlan(format=family(name), tools=TOOLS).reader()
    reading, _ = reader.read(text, [])
    assert reader.close(reading, is_cut=True)
    assert [(call.name, call.arguments) for call in joined_calls(reading.calls)] == calls


@pytest.mark.parametrize(
    ("name", "text", "is_cut"),
    [
        ("hermes", hermes(LAMP)[:57], True),
        ("llama3", '{"name": "ping", "parameters": {"a": ', True),
        ("qwen_xml", "<tool_call>\n<function=where_is>\n<parameter=item>\nlam", True),
        ("qwen_xml", XML_ADD[: -len("\n</function>\n</tool_call>")], True),
        ("qwen_xml", "<tool_call>\n<function=ping>\n</tool_call>", True),
        ("harmony", HARMONY_CALL[:-3], True),
        ("harmony", HARMONY_CALL, False),
    ],
)
def test_the_model_may_end_in_the_middle_of_a_call(name: str, text: str, is_cut: bool) -> None:
    reader = AnswerPlan(format=family(name), tools=TOOLS).reader()
    reading, _ = reader.read(text, [])
    assert reader.close(reading, is_cut=False) == is_cut


def test_text_that_breaks_the_format_stays_content() -> None:
    reader = AnswerPlan(format=family("gemma4"), tools=TOOLS).reader()
    reading, _ = reader.read("<|tool_call>call:add{a:", [])
    more, _ = reader.read("}<tool_call|> and more", [])
    last, _ = reader.read(" to come", [])
    assert not reader.close(last, is_cut=False)
    assert (reading.calls + more.calls + last.calls, reading.content) == ([], "")
    assert more.content + last.content == "<|tool_call>call:add{a:}<tool_call|> and more to come"


DEEP = "[" * 200_000
XML_TAGS: tuple[str, Any] = (
    "add",
    {"a": 1, "tags": ["</parameter></tool_call>", "<parameter=a>\n</function>\n</tool_call>"]},
)
XML_MARK = (
    "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n"
    f"<parameter=tags>\n{dumps(XML_TAGS[1]['tags'])}\n</parameter>\n</function>\n</tool_call>"
)
MARK: tuple[str, Any] = ("where_is", {"item": "</tool_call> <think> [TOOL_CALLS] <|call|>"})


GEMMA_MARK = '<|tool_call>call:where_is{item:<|"|>}<tool_call|> " {<|"|>}<tool_call|>'


@pytest.mark.parametrize(
    ("name", "text", "calls"),
    [
        ("hermes", hermes(MARK, LAMP), [MARK, LAMP]),
        ("hermes", hermes(MARK, LAMP).replace("<tool_call>\n", "<tool_call>"), [MARK, LAMP]),
        (
            "mistral",
            f"[TOOL_CALLS]where_is[ARGS]{dumps(MARK[1])}[TOOL_CALLS]ping[ARGS]{{}}",
            [MARK, PING],
        ),
        ("gemma4", f"{GEMMA_MARK}{GEMMA_ADD}", [("where_is", {"item": '}<tool_call|> " {'}), ADD]),
        ("qwen_xml", XML_MARK, [XML_TAGS]),
    ],
)
def test_a_mark_within_arguments_ends_nothing(
    name: str, text: str, calls: list[tuple[str, Any]]
) -> None:
    assert shown(read(Row(name, text))) == ("", "", calls)
    for size in (1, 2, 3, 7):
        assert shown(read(Row(name, text), *range(size, len(text), size))) == ("", "", calls)


def test_after_a_call_may_come_a_call_or_text() -> None:
    both = (
        '{"name": "ping", "parameters": {}}; {"name": "where_is", "parameters": {"item": "lamp"}}'
    )
    for text, content in (
        (both, ""),
        (f'{both}\n{{"name": "drop"}}', '{"name": "drop"}'),
        (f"{both} Bye", "Bye"),
    ):
        for cuts in ((), range(1, len(text))):
            assert shown(read(Row("llama3", text), *cuts)) == (content, "", [PING, LAMP])
    other = f'{both[:34]} {{"name": "drop", "parameters": {{}}}}'
    assert shown(read(Row("llama3", other), *range(1, len(other)))) == (other[35:], "", [PING])


@pytest.mark.parametrize(
    ("name", "text", "arguments"),
    [
        ("hermes", '<tool_call>{"name": "ping", "arguments": {a: 1}}</tool_call>', ["{a: 1}"]),
        ("hermes", '<tool_call>{"name": "ping", "arguments": {"a": 1', ['{"a": 1']),
        ("hermes", f'<tool_call>{{"name": "ping", "arguments": {{"a": {DEEP}', [f'{{"a": {DEEP}']),
        (
            "mistral",
            '[TOOL_CALLS]ping[ARGS]{"a": [1}}[TOOL_CALLS]ping[ARGS]{}',
            ['{"a": [1}}', "{}"],
        ),
        (
            "llama3",
            f'{{"name": "ping", "parameters": {{"a": {DEEP}{"]" * 3000}}}',
            [f'{{"a": {DEEP}{"]" * 3000}}}'],
        ),
    ],
)
def test_a_call_whose_arguments_are_no_json_counts_as_cut(
    name: str, text: str, arguments: list[str]
) -> None:
    reader = AnswerPlan(format=family(name), tools=TOOLS).reader()
    reading, _ = reader.read(text, [])
    assert reader.close(reading, is_cut=False)
    assert [call.arguments for call in joined_calls(reading.calls)] == arguments


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (
            "qwen_xml",
            f"<tool_call>\n<function=add>\n<parameter=tags>\n{DEEP}\n</parameter>\n</function>\n</tool_call>",
        ),
        ("mistral_v3", f"[TOOL_CALLS]{DEEP}"),
        ("phi4_mini", f"functools{DEEP}"),
        ("gemma4", f"<|tool_call>call:add{{tags:{DEEP}}}"),
        ("gemma4", f"Ok. {GEMMA_ADD[:-13]}"),
        ("gemma4", f"{GEMMA_ADD.replace('add', 'drop')[:-12]}"),
    ],
)
def test_what_is_no_whole_call_stays_content_as_it_was_written(name: str, text: str) -> None:
    for cuts in ((), range(1, len(text), 97), range(1, min(len(text), 60))):
        reading = read(Row(name, text), *cuts)
        assert (reading.content, reading.calls) == (text, [])


@pytest.mark.parametrize(
    "value", ['{"function": "ping"}', "[5]", '{"name": "ping", "arguments": 5}', "null"]
)
def test_json_that_is_no_call_is_content(value: str) -> None:
    reading = read(Row("mistral_v3", f"[TOOL_CALLS]{value}"))
    assert (reading.content, reading.calls) == (f"[TOOL_CALLS]{value}", [])


@pytest.mark.parametrize(
    ("prefix", "text", "content"),
    [
        (f"{hermes(LAMP)}\n", hermes(PING), ""),
        ("Look: \n", "here", "here"),
        ("a <tool", "s> b", "s> b"),
        ("a <tool", "_call>no</tool_call>", "_call>no</tool_call>"),
        (f"{hermes(('drop', {}))} and <", f" 3{hermes(PING)}", " 3"),
    ],
)
def test_what_the_prompt_has_begun_is_not_read_again(prefix: str, text: str, content: str) -> None:
    anchor = family("hermes").template["start_anchor"][0]
    plan = plan_answer(family("hermes"), TOOLS, f"Hi {anchor}{prefix}", shows_reasoning=True)
    calls = [PING] if "ping" in text else []
    for cuts in ((), range(1, len(text))):
        assert shown(read(Row("hermes", text, prefix=plan.prefix), *cuts)) == (content, "", calls)


@pytest.mark.parametrize(
    ("name", "begun"),
    [
        ("hermes", '<tool_call>\n{"name": '),
        ("hermes", '<tool_call>\n{"name": "ping", "arguments": {'),
        ("gemma4", "<|tool_call>call:add{a:"),
        ("llama3", '{"name": "pi'),
    ],
)
def test_a_prompt_that_ends_within_a_call_is_refused(name: str, begun: str) -> None:
    anchors = family(name).template["start_anchor"]
    anchor = anchors if isinstance(anchors, str) else anchors[0]
    with pytest.raises(InvalidRequestError, match="middle of a call") as refusal:
        plan_answer(family(name), TOOLS, f"Hi {anchor}{begun}", shows_reasoning=True)
    assert refusal.value.param == "messages"
    plan = plan_answer(family(name), (), f"Hi {anchor}{begun}", shows_reasoning=True)
    assert plan.prefix == begun


def test_white_space_waits_only_for_so_long() -> None:
    reader = AnswerPlan(format=family("hermes"), tools=TOOLS).reader()
    reading, _ = reader.read("x" + " " * 100, [])
    assert reading.content == "x" + " " * (100 - MAX_HELD)
    more, _ = reader.read("y", [])
    assert more.content == " " * MAX_HELD + "y"


@pytest.mark.parametrize(
    ("name", "opening", "filler"),
    [
        ("hermes", '<tool_call>{"name": "', "a"),
        ("hermes", '<tool_call>{"name": "ping", "arguments": ', " "),
        ("qwen_xml", "<tool_call>", " "),
        ("qwen_xml", "<tool_call><function=", "a"),
        ("llama3", "", " "),
        ("python", "", "\n"),
    ],
)
def test_a_call_that_does_not_begin_is_given_up(name: str, opening: str, filler: str) -> None:
    text = opening + filler * 2000 + 'ping", "arguments": {}}'
    reading = read(Row(name, text), *range(50, len(text), 50))
    assert reading.calls == []
    assert reading.content.strip() == text.strip()


def test_without_tools_a_call_is_text() -> None:
    reader = AnswerPlan(format=family("hermes")).reader()
    reading, _ = reader.read(hermes(LAMP), [])
    reader.close(reading, is_cut=False)
    assert (reading.content, reading.calls) == (hermes(LAMP), [])


def test_lone_surrogates_in_arguments_can_be_sent() -> None:
    reader = AnswerPlan(format=family("olmo3"), tools=TOOLS).reader()
    reading, _ = reader.read(
        '<function_calls>where_is(item="\\ud83d\\ude00 \\ud800")</function_calls>', []
    )
    assert reading.calls[0].arguments.encode() == b'{"item": "\\ud83d\\ude00 \\ud800"}'


def test_tokens_of_reasoning_are_counted_by_where_they_end() -> None:
    reader = AnswerPlan(format=family("hermes"), prefix="<think>").reader()
    _, count = reader.read("so it is</think>Yes.", [2, 5, 8, 16, 19, 20])
    assert count == 4


def test_ids_have_the_length_that_the_family_wants() -> None:
    reader = AnswerPlan(format=family("mistral"), tools=TOOLS).reader()
    (call, *_), _ = reader.read("[TOOL_CALLS]ping[ARGS]{}", [])[0].calls, None
    assert isinstance(call, CallPiece)
    assert call.id is not None
    assert len(call.id) == 9
