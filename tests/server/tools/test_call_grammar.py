from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

import pytest
from llguidance import LLMatcher

from bfcl import Item, items
from grammar_checks import checked_grammar
from manylora.engine.grammar.json_schema import json_rule
from manylora.errors import InvalidRequestError
from manylora.server.tools.call_grammar import CallGrammar
from manylora.server.tools.formats import rows
from manylora.server.tools.schemas import Tool, ToolChoice
from tool_models import family, family_llguidance, family_tokenizer, tool
from written_calls import Call, written

ANCHORED = ("llama3", "phi4_mini", "python")
"""Without a mark for calls: an answer that begins otherwise than a call of an offered tool is text."""
FAMILIES = [name for name, row in rows().items() if "calls" in row]
REQUIRED, AUTO = ToolChoice(mode="required"), ToolChoice(mode="auto")
TOOLS = (
    tool("where_is", strict=True, item={"type": "string"}),
    tool(
        "add",
        strict=True,
        a={"type": "integer"},
        b_={"type": "number"},
        how_={"enum": ["fast", "slow"]},
    ),
    tool("ping", strict=True),
)
LAMP: Call = ("where_is", {"item": "lamp"})
ADD: Call = ("add", {"a": 1, "b": 2.5, "how": "slow"})
PING: Call = ("ping", {})


def grammar(
    name: str,
    tools: Sequence[Tool] = TOOLS,
    choice: ToolChoice = AUTO,
    *,
    is_checked: bool = True,
    **fields: Any,
) -> LLMatcher:
    writer = CallGrammar(
        format=family(name),
        special_tokens=family_tokenizer(name).grammar_tokens,
        json_rule=json_rule,
    )
    text = writer.lark(tools=tools, choice=choice, **fields)
    if is_checked:
        text = checked_grammar(text, "tools", family_tokenizer(name).folder).text
    return matcher_of(name, text)


@lru_cache(maxsize=64)
def matcher_of(name: str, lark: str) -> LLMatcher:
    """A family's matcher of a grammar; neighbours in BFCL offer the same tools. `takes` resets it before each use."""
    matcher = LLMatcher(family_llguidance(name), lark)
    assert not matcher.is_error(), matcher.get_error()
    return matcher


def takes(name: str, matcher: LLMatcher, text: str) -> bool:
    """Whether the text is a whole answer of the grammar."""
    tokens = family_tokenizer(name).encode(text, add_special_tokens=False)
    matcher.reset()
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


@pytest.mark.parametrize("name", FAMILIES)
def test_required_forces_a_call_and_auto_allows_text(name: str) -> None:
    opening = family(name).calls["text"] if name == "harmony" else ""  # type: ignore[index]
    required, auto = grammar(name, choice=REQUIRED), grammar(name)
    for call in (LAMP, ADD, PING):
        assert takes(name, required, written(name, [call]))
        assert takes(name, auto, written(name, [call]))
    assert not takes(name, required, f"{opening}Hello")
    assert takes(name, auto, f"{opening}Hello {{you}} [1] <b>")
    assert takes(name, auto, written(name, [("drop_table", {})])) == (name in ANCHORED)
    assert not takes(name, required, written(name, [("drop_table", {})]))
    assert not takes(name, auto, written(name, [("add", {})]))
    assert not takes(name, auto, written(name, [("add", {"a": 1, "z": 1})]))
    assert not takes(name, auto, written(name, [("add", {"a": 1, "how": "so"})]))


@pytest.mark.parametrize("name", [name for name in FAMILIES if "between" in rows()[name]["calls"]])
def test_several_calls_only_where_the_client_takes_them(name: str) -> None:
    both = written(name, [LAMP, PING])
    assert takes(name, grammar(name), both)
    assert not takes(name, grammar(name, is_parallel=False), both)
    named = ToolChoice(mode="required", names=frozenset({"ping"}), is_single=True)
    ping = grammar(name, tools=TOOLS[2:], choice=named)
    assert takes(name, ping, written(name, [PING]))
    assert not takes(name, ping, written(name, [PING, PING]))
    assert not takes(name, ping, written(name, [LAMP]))


@pytest.mark.parametrize("name", FAMILIES)
def test_without_strict_auto_holds_the_name_and_the_notation_alone(name: str) -> None:
    loose = [
        Tool(type="function", function=each.function.model_copy(update={"strict": None}))
        for each in TOOLS
    ]
    auto = grammar(name, tools=loose)
    assert takes(name, auto, written(name, [("add", {"a": "one", "z": [1, {"y": None}]})]))
    assert takes(name, auto, written(name, [("add", {})]))
    assert takes(name, auto, written(name, [("drop_table", {})])) == (name in ANCHORED)
    required = grammar(name, tools=loose, choice=REQUIRED)
    assert not takes(name, required, written(name, [("add", {})]))


@pytest.mark.parametrize("name", [name for name in FAMILIES if "trigger" in rows()[name]["calls"]])
def test_text_may_stand_before_a_call_but_no_broken_call_in_text(name: str) -> None:
    auto = grammar(name)
    assert takes(name, auto, "Let me see." + written(name, [LAMP]))
    assert not takes(name, auto, "Let me see." + written(name, [LAMP])[:-3])
    assert not takes(name, auto, f"Let me see.{rows()[name]['calls']['trigger']} no")


@pytest.mark.parametrize("name", [name for name in FAMILIES if "reasoning" in rows()[name]])
def test_the_grammar_begins_after_the_reasoning(name: str) -> None:
    strings = rows()[name]["reasoning"]
    end = strings["close"] + strings.get("then", "")
    call = written(name, [LAMP])
    thought = "I might call it, or not: {}"
    if name == "olmo3":
        thought += rows()[name]["calls"]["trigger"]  # it is text there
    required = grammar(name, choice=REQUIRED, thinks=True)
    assert takes(name, required, f"{thought}{end}{call}")
    assert not takes(name, required, f"{thought}{end}Hello")
    assert not takes(name, required, thought)
    maybe = grammar(name, choice=REQUIRED, thinks=None)
    assert takes(name, maybe, f"{strings['open']}{thought}{end}{call}")
    assert takes(name, maybe, call)
    auto = grammar(name, thinks=None)
    assert takes(name, auto, f"{strings['open']}{thought}{end}{call}")
    answer = grammar(name, tools=(), thinks=None, answer='"yes" | "no"')
    opening = rows()[name]["calls"].get("text", "")
    assert takes(name, answer, f"{strings['open']}{thought}{end}{opening}yes")
    assert not takes(name, answer, f"{opening}maybe")


def test_a_call_or_the_answer_that_the_client_wants() -> None:
    both = grammar("hermes", answer=json_rule({"type": "array", "items": {"type": "integer"}}))
    assert takes("hermes", both, "[1, 2]")
    assert takes("hermes", both, written("hermes", [LAMP]))
    assert not takes("hermes", both, "Hello")
    assert not takes("hermes", both, "Hello" + written("hermes", [LAMP]))


def test_a_schema_that_cannot_be_held_to_is_refused_by_its_place() -> None:
    odd = tool("odd", strict=True, a={"type": "string", "propertyNames": {}})
    with pytest.raises(InvalidRequestError) as refusal:
        grammar("hermes", tools=[*TOOLS, odd])
    assert refusal.value.param == "tools.3.function.parameters.properties.a"
    assert refusal.value.code == "invalid_json_schema"
    loose = Tool(type="function", function=odd.function.model_copy(update={"strict": False}))
    grammar("hermes", tools=[loose], choice=REQUIRED)


@pytest.mark.parametrize("kind", ["string", ["array", "null"], ["object", "null"]])
def test_arguments_are_an_object_whatever_else_a_schema_allows(kind: Any) -> None:
    odd = tool("odd", strict=True)
    parameters = {"type": kind, "properties": {"a": {"type": "integer"}}}
    odd = Tool(type="function", function=odd.function.model_copy(update={"parameters": parameters}))
    if "object" in kind:
        matcher = grammar("hermes", tools=[odd], choice=REQUIRED)
        assert takes("hermes", matcher, written("hermes", [("odd", {"a": 1})]))
        assert not takes(
            "hermes", matcher, written("hermes", [("odd", {"a": 1})]).replace('{"a": 1}', "null")
        )
        return
    with pytest.raises(InvalidRequestError) as refusal:
        grammar("hermes", tools=[odd], choice=REQUIRED)
    assert refusal.value.param == "tools.0.function.parameters.type"


@pytest.mark.parametrize("choice", [AUTO, REQUIRED], ids=["auto", "required"])
def test_values_in_tags_hold_no_mark_that_would_end_them(choice: ToolChoice) -> None:
    tools = [tool("f", strict=choice is REQUIRED, a={"type": "string"})]
    matcher = grammar("qwen_xml", tools=tools, choice=choice)
    for value in ("", "x", "a\n</b>\n<function=f>", "<parameter </tool>"):
        assert takes("qwen_xml", matcher, written("qwen_xml", [("f", {"a": value})])), value
    for value in ("a </tool_call> b", "</parameter> b", "a\n<parameter=b>"):
        assert not takes("qwen_xml", matcher, written("qwen_xml", [("f", {"a": value})])), value


@pytest.mark.parametrize(
    ("name", "key"), [("gemma4", "user-id"), ("gemma4", "b.c"), ("olmo3", "class"), ("lfm2", "a-b")]
)
def test_keys_that_the_parser_cannot_read_are_refused(name: str, key: str) -> None:
    fields: dict[str, Any] = {key: {"type": "integer"}}
    with pytest.raises(InvalidRequestError) as refusal:
        grammar(name, tools=[tool("f", strict=True, **fields)])
    assert refusal.value.param == f"tools.0.function.parameters.properties.{key}"
    optional = grammar(name, tools=[tool("f", strict=True, **{f"{key}_": {}})])
    assert takes(name, optional, written(name, [("f", {})]))
    loose = grammar(name, tools=[tool("f", **fields)])
    assert takes(name, loose, written(name, [("f", {"a_b1": 1})]))
    if key != "class":
        assert not takes(name, loose, written(name, [("f", {key: 1})]))


def test_optional_parameters_may_be_left_out_in_any_combination() -> None:
    tools = [
        tool("f", strict=True, **{key: {"type": "integer"} for key in ("a_", "b_", "c", "d_")})
    ]
    for name in ("hermes", "qwen_xml", "gemma4", "olmo3"):
        matcher = grammar(name, tools=tools)
        for keys in ("c", "ac", "bc", "abc", "cd", "abcd", "acd"):
            assert takes(name, matcher, written(name, [("f", dict.fromkeys(keys, 1))])), (
                name,
                keys,
            )
        for keys in ("", "a", "ab", "abd", "ca"):
            assert not takes(name, matcher, written(name, [("f", dict.fromkeys(keys, 1))])), (
                name,
                keys,
            )


def mutations(item: Item) -> Iterator[tuple[str, list[Call]]]:
    """Calls that must be refused, and why."""
    (name, arguments), *others = item.calls
    function = next(each.function for each in item.tools if each.function.name == name)
    schema = function.parameters or {}
    yield "wrong name", [(f"{name}x", arguments), *others]
    yield "extra key", [(name, {**arguments, "zz": 1}), *others]
    for key in schema["required"][:1]:
        yield (
            "missing required",
            [(name, {each: arguments[each] for each in arguments if each != key}), *others],
        )
    typed = [
        key for key in arguments if schema["properties"][key].get("type") not in (None, "string")
    ]
    for key in typed[:1]:
        yield "wrong type", [(name, {**arguments, key: "x"}), *others]


def check(name: str, item: Item, *, is_checked: bool = True) -> int:
    """Hold an item's calls and their mutations to its grammar; returns how many."""
    calls = item.calls if "between" in rows()[name]["calls"] else item.calls[:1]
    matcher = grammar(name, tools=item.tools, choice=REQUIRED, is_checked=is_checked)
    assert takes(name, matcher, written(name, calls)), (name, item.id, written(name, calls))
    num = 1
    for why, mutated in mutations(Item(item.id, item.tools, calls)):
        assert not takes(name, matcher, written(name, mutated)), (name, item.id, why)
        num += 1
    if len(calls) > 1:
        single = grammar(
            name, tools=item.tools, choice=REQUIRED, is_checked=is_checked, is_parallel=False
        )
        assert not takes(name, single, written(name, calls)), (name, item.id, "parallel")
        num += 1
    return num


@pytest.mark.parametrize("name", FAMILIES)
def test_a_share_of_bfcl_is_held_by_every_family(name: str) -> None:
    share = items(step=7)[FAMILIES.index(name) :: len(FAMILIES)]
    counts = [check(name, item) for item in share]
    assert len(counts) >= 358 // len(FAMILIES)
    assert sum(counts) > 4 * len(counts)


UNWRITABLE = {
    "gemma": {"simple_java_68", "live_multiple_189-83-0"},  # keys with slashes and hyphens
    "python": {"simple_java_62", "simple_java_63"},  # keys that are keywords
}
"""Items with keys that the notation has not, by style."""


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_all_of_bfcl_is_held(name: str) -> None:
    """Each family holds a third, which begins at another place than its neighbour's: together they hold every item."""
    unwritable = UNWRITABLE.get(rows()[name]["calls"]["style"], set())
    # The server's check was met by a share of them above; here it would double the time.
    share = items()[FAMILIES.index(name) % 3 :: 3]
    counts = [check(name, item, is_checked=False) for item in share if item.id not in unwritable]
    assert len(counts) >= 833 - len(unwritable)
    assert sum(counts) > 4 * len(counts)
