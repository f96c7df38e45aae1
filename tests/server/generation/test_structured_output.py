from __future__ import annotations

import json
import subprocess
import threading
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import httpx
import psutil
import pytest
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from api_server import BASE, Api, Client, eventually
from fake_engine import BASE_TEXT, DEMO_MODEL
from manylora.engine.grammar.json_schema import json_grammar
from manylora.engine.grammar.matcher import GrammarTokens
from manylora.engine.grammar.problems import TOO_COMPLEX
from manylora.engine.request import Grammar
from manylora.engine.text.tokenizer import Tokenizer
from manylora.errors import CapacityError, InvalidRequestError
from manylora.server.generation.grammar import checked_grammar
from manylora.server.process.long_work import MAX_WAITING
from manylora.server.sandbox import grammar_check
from manylora.server.sandbox.grammar_check import GrammarChecker, grammar_checker
from tool_models import tokenizer_with, use_tokenizer

pytestmark = pytest.mark.anyio
MESSAGES = [{"role": "user", "content": "When are you open?"}]
SCHEMA = {
    "type": "object",
    "properties": {"intent": {"enum": ["hours", "place"]}},
    "required": ["intent"],
}
NAMED = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA, "strict": True}}


class Bytes:
    eos_token_id = 256
    bos_token_id = None
    tokens = (*(bytes([byte]) for byte in range(256)), b"\xff<eos>")
    special_token_ids = (256,)

    def __call__(self, text: str | bytes) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)


def takes(grammar: Grammar | None, text: str) -> bool:
    assert grammar is not None
    matcher = LLMatcher(
        LLTokenizer(TokenizerWrapper(Bytes()), n_vocab=257), grammar.text, log_level=0
    )
    assert not matcher.is_error(), matcher.get_error()
    return (
        matcher.try_consume_tokens(list(text.encode())) == len(text.encode())
        and matcher.is_accepting()
    )


async def chat(client: Client, **fields: Any) -> httpx.Response:
    return await client.post(
        "/v1/chat/completions", json={"model": BASE, "messages": MESSAGES, **fields}
    )


async def complete(client: Client, **fields: Any) -> httpx.Response:
    return await client.post("/v1/completions", json={"model": BASE, "prompt": "x", **fields})


@pytest.mark.parametrize(
    ("fields", "good", "bad"),
    [
        ({"response_format": NAMED}, '{"intent": "hours"}', '{"intent": "x"}'),
        ({"response_format": {"type": "json_object"}}, '{\n  "a": [1, {"b": null}]\n}', "[1]"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "any"}}},
            '{"a":1}',
            "1",
        ),
        ({"structured_outputs": {"json": SCHEMA}}, '{"intent": "place"}', "{}"),
        ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, '{"intent": "place"}', "{}"),
        ({"structured_outputs": {"json_object": True}}, "{}", "1"),
        ({"structured_outputs": {"regex": r"^\d{2}/[a-z]+$"}}, "12/ab", "1/ab"),
        ({"structured_outputs": {"regex": "a\\\\"}}, "a\\", "a"),
        (
            {"structured_outputs": {"choice": ["yes", 'no "way"', "naïve", "a/b\n"]}},
            "naïve",
            "yesno",
        ),
        (
            {"structured_outputs": {"choice": ["yes", 'no "way"', "naïve", "a/b\n"]}},
            'no "way"',
            "no",
        ),
        ({"structured_outputs": {"grammar": 'start: "a" b+\nb: "b"'}}, "abb", "a"),
    ],
)
@pytest.mark.parametrize("route", [chat, complete])
async def test_the_engine_gets_the_grammar_that_a_body_means(
    api: Api, acme: Client, route: Any, fields: dict[str, Any], good: str, bad: str
) -> None:
    answer = await route(acme, n=2, **fields)
    assert answer.status_code == 200, answer.text
    first, second = (request.grammar for request in api.engine.requests)
    assert first == second
    assert takes(first, good)
    assert not takes(first, bad)


async def test_free_text_has_no_grammar(api: Api, acme: Client) -> None:
    assert (await chat(acme, response_format={"type": "text"})).json()["choices"][0]["message"][
        "content"
    ] == BASE_TEXT
    assert [request.grammar for request in api.engine.requests] == [None]


@pytest.mark.parametrize(
    ("fields", "param", "word"),
    [
        ({"response_format": {"type": "xml"}}, "response_format.type", "json_schema"),
        (
            {"response_format": {"type": "json_schema"}},
            "response_format.json_schema",
            "json_schema",
        ),
        (
            {"response_format": {**NAMED, "type": "text"}},
            "response_format.json_schema",
            "only then",
        ),
        ({"response_format": {**NAMED, "schema": {}}}, "response_format.schema", "not a parameter"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a b"}}},
            None,
            "json_schema.name",
        ),
        ({"structured_outputs": {}}, "structured_outputs", "one of json"),
        (
            {"structured_outputs": {"regex": "a", "choice": ["b"]}},
            "structured_outputs",
            "one of json",
        ),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex", "parenthesis"),
        ({"structured_outputs": {"regex": "(?=a)"}}, "structured_outputs.regex", "look-ahead"),
        ({"structured_outputs": {"regex": "a\\"}}, "structured_outputs.regex", "escapes nothing"),
        (
            {"structured_outputs": {"regex": "a\\\\\\"}},
            "structured_outputs.regex",
            "escapes nothing",
        ),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice", "at least 1"),
        ({"structured_outputs": {"choice": [""]}}, None, "choice.0"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs.json", "JSON schema"),
        (
            {"structured_outputs": {"json": "[]"}},
            "structured_outputs.json",
            "object, true or false",
        ),
        (
            {"structured_outputs": {"grammar": 'start: %json {"x-guidance": {}}'}},
            "structured_outputs.grammar",
            "%json",
        ),
        (
            {"structured_outputs": {"grammar": '{"grammars": []}'}},
            "structured_outputs.grammar",
            "Lark",
        ),
        (
            {"structured_outputs": {"grammar": "root ::= 1"}},
            "structured_outputs.grammar",
            "line 1, column 7",
        ),
        (
            {"structured_outputs": {"json": {"uniqueItems": True}}},
            "structured_outputs.json",
            "uniqueItems",
        ),
        (
            {"structured_outputs": {"json": {"multipleOf": 999983}}},
            "structured_outputs.json.multipleOf",
            "10000",
        ),
        (
            {"structured_outputs": {"json": {"multipleOf": 9.99983}}},
            "structured_outputs.json.multipleOf",
            "10000",
        ),
        (
            {"response_format": NAMED, "structured_outputs": {"regex": "a"}},
            "response_format",
            "structured_outputs",
        ),
        ({"response_format": NAMED, "use_beam_search": True}, "use_beam_search", "response_format"),
        ({"response_format": NAMED, "ignore_eos": True}, "ignore_eos", "response_format"),
        *(
            ({f"guided_{name}": "x"}, f"guided_{name}", "structured_outputs")
            for name in ("json", "regex", "grammar")
        ),
        ({"guided_decoding_backend": "outlines"}, "guided_decoding_backend", "structured_outputs"),
    ],
)
async def test_what_cannot_be_is_refused_by_its_name(
    api: Api, acme: Client, fields: dict[str, Any], param: str | None, word: str
) -> None:
    answer = await chat(acme, **fields)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert word in error["message"]
    assert param in (None, error["param"])
    assert api.engine.requests == []


async def test_null_of_an_old_field_passes(acme: Client) -> None:
    assert (
        await chat(acme, guided_json=None, structured_outputs=None, response_format=None)
    ).status_code == 200


async def test_a_grammar_of_the_clients_own_is_refused_with_tools(api: Api, acme: Client) -> None:
    use_tokenizer(api, tokenizer_with())
    tools = [{"type": "function", "function": {"name": "f"}}]
    asked = {"tools": tools, "structured_outputs": {"grammar": 'start: "a"'}}
    error = (await chat(acme, **asked)).json()["error"]
    assert (error["param"], "cannot be used with tools" in error["message"]) == (
        "structured_outputs",
        True,
    )
    assert (await chat(acme, **asked, tool_choice="none")).status_code == 200


@pytest.mark.parametrize("is_opened", [False, True])
async def test_reasoning_stays_free_before_an_answer_that_is_held(
    api: Api, acme: Client, is_opened: bool
) -> None:
    use_tokenizer(api, tokenizer_with())
    kwargs = {"enable_thinking": is_opened}
    assert (await chat(acme, response_format=NAMED, chat_template_kwargs=kwargs)).status_code == 200
    (request,) = api.engine.requests
    thought = 'Well: {"intent": "x"}.\nOr not?</think>\n\n'
    assert takes(
        request.grammar, ("" if is_opened else "<think>") + thought + '{"intent": "hours"}'
    )
    assert takes(request.grammar, '{"intent": "hours"}') != is_opened
    assert not takes(request.grammar, thought + '{"intent": "x"}')


def deep(count: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "null"}
    for _ in range(count):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return schema


def doubled(count: int) -> dict[str, Any]:
    places = {
        f"d{index}": {"allOf": [{"$ref": f"#/$defs/d{index + 1}"}] * 2} for index in range(count)
    }
    return {
        "$ref": "#/$defs/d0",
        "$defs": {**places, f"d{count}": {"type": "string", "pattern": "^a"}},
    }


HOSTILE: dict[str, Any] = {
    "a megabyte": {"const": "x" * (1 << 20)},
    "deep": deep(100),
    "doubled by references": doubled(25),
    "many required": {"type": "object", "required": [f"r{index}" for index in range(8_000)]},
    "many patterns at once": {
        "allOf": [{"type": "string", "pattern": f"^.*{index}.*$"} for index in range(300)]
    },
    "many properties": {
        "type": "object",
        "properties": {f"p{index}": {"type": "string"} for index in range(5_000)},
    },
    "large remainders": {"type": "integer", "multipleOf": 999_983},
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_schema_is_refused_at_once(name: str) -> None:
    checked_grammar('start: "the child runs"', "schema", DEMO_MODEL)
    with pytest.raises(InvalidRequestError) as refused:
        checked_grammar(json_grammar(HOSTILE[name]), "schema", DEMO_MODEL)
    assert refused.value.code in ("invalid_json_schema", "grammar_too_large")


def test_a_check_that_is_ended_is_remembered_and_the_next_one_is_made() -> None:
    text = json_grammar(HOSTILE["doubled by references"])
    grammar = Grammar.of(text)
    for _ in range(2):
        assert grammar_checker().problem(text, grammar.digest, DEMO_MODEL, "t") == TOO_COMPLEX
    assert grammar_checker().problem('start: "a"', "another digest", DEMO_MODEL, "t") is None


def test_what_takes_the_engine_long_to_compile_is_refused() -> None:
    rules = [
        f'r{index}: %json {{"type": "integer", "multipleOf": {9000 + index}}}'
        for index in range(20)
    ]
    text = "\n".join(["start: " + " ".join(f"r{index}" for index in range(20)), *rules])
    assert grammar_checker().problem(text, "remainders", DEMO_MODEL, "t") == TOO_COMPLEX
    ambiguous = "start: a\na: /[a-z]/ | a a | a a a"
    assert grammar_checker().problem(ambiguous, "ambiguous", DEMO_MODEL, "t") is None


def _optional(count: int) -> str:
    properties = {f"property_{index}": {"type": "string"} for index in range(count)}
    return json_grammar({"type": "object", "properties": properties, "additionalProperties": False})


def test_what_breaks_only_while_an_answer_is_written_is_refused_and_what_does_not_is_taken() -> (
    None
):
    assert "items" in (grammar_checker().problem(_optional(700), "700", DEMO_MODEL, "t") or "")
    text = _optional(400)
    assert grammar_checker().problem(text, "400", DEMO_MODEL, "t") is None
    tokenizer = Tokenizer(DEMO_MODEL)
    matcher = GrammarTokens(DEMO_MODEL, tokenizer.eos_token_ids).compile(text)
    assert matcher.take(
        tokenizer.encode('{"property_7": "a", "property_399": "b"}', add_special_tokens=False)
    )
    assert matcher.parser.is_accepting()


def test_a_tokenizer_that_grammars_do_not_know_is_left_to_the_engine(tmp_path: Path) -> None:
    assert grammar_checker().problem('start: "a"', "a", tmp_path, "t") is None
    assert "unknown name" in (grammar_checker().problem("start: b", "b", tmp_path, "t") or "")


@pytest.fixture
def child(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What a checker's child is, in Python; an answer is what it writes."""
    code = ["-c", ""]
    popen = subprocess.Popen
    monkeypatch.setattr(
        subprocess, "Popen", lambda args, **options: popen([args[0], *code], **options)
    )
    return code


def test_checks_give_way_to_steps() -> None:
    checker = GrammarChecker()
    assert checker.problem('start: "a"', "a", DEMO_MODEL, "t") is None
    own = psutil.Process()
    living = [each for each in own.children() if each.status() != psutil.STATUS_ZOMBIE]
    children = [
        each for each in living if "manylora.server.sandbox.grammar_check" in each.cmdline()
    ]
    assert {int(each.nice()) for each in children} == {min(int(own.nice()) + 10, 19)}
    checker.close()


def test_tenants_share_no_verdicts(child: list[str]) -> None:
    child[1] = (
        "import sys\nfor index, _ in enumerate(sys.stdin): print(f'\"check {index}\"', flush=True)"
    )
    checker = GrammarChecker()
    found = [
        checker.problem("text", "digest", DEMO_MODEL, tenant) for tenant in ("one", "two", "one")
    ]
    assert found == ["check 0", "check 1", "check 0"]
    checker.close()


async def test_a_tenant_with_many_schemas_holds_others_up_by_one_check(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked: list[str] = []
    may_go_on = threading.Event()

    def slow(self: GrammarChecker, text: str, digest: str, folder: Path, tenant: str) -> None:
        checked.append(tenant)
        assert may_go_on.wait(60)

    monkeypatch.setattr(GrammarChecker, "problem", slow)
    flood, quiet = await api.tenant("flood"), await api.tenant("quiet")
    quiet_id = (await api.services.registry.tenants.get_tenant("quiet")).id
    async with anyio.create_task_group() as group:
        for number in range(8):
            group.start_soon(partial(complete, flood, structured_outputs={"regex": f"a{number}"}))
        await anyio.sleep(0.3)  # these have time to come first
        group.start_soon(partial(complete, quiet, structured_outputs={"regex": "b"}))
        await eventually(lambda: quiet_id in checked)
        may_go_on.set()
    assert len(checked) == 9
    assert checked.index(quiet_id) <= 1


async def test_a_grammar_that_was_found_sound_waits_for_no_check_of_others(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    acme = await api.tenant("acme")
    assert (await complete(acme, structured_outputs={"regex": "a"})).status_code == 200
    problem = GrammarChecker.problem
    may_go_on = threading.Event()
    threads = list[str]()

    def slow(self: GrammarChecker, text: str, digest: str, folder: Path, tenant: str) -> str | None:
        if "slow" in text:
            threads.append(threading.current_thread().name)
            assert may_go_on.wait(60)
        return problem(self, text, digest, folder, tenant)

    monkeypatch.setattr(GrammarChecker, "problem", slow)
    others = [await api.tenant(f"tenant-{number}") for number in range(MAX_WAITING + 2)]
    async with anyio.create_task_group() as group:
        for each in others:
            group.start_soon(partial(complete, each, structured_outputs={"regex": "slow"}))
        await eventually(lambda: len(threads) == MAX_WAITING)
        with anyio.fail_after(60):
            answer = await complete(acme, structured_outputs={"regex": "a"})
        assert (answer.status_code, len(threads)) == (200, MAX_WAITING)
        may_go_on.set()
    assert len(threads) == len(others)
    assert all(name.startswith("waiting-work") for name in threads)


def test_a_child_that_was_killed_says_nothing_of_the_grammar(child: list[str]) -> None:
    child[1] = "import os, signal\ninput()\nos.kill(os.getpid(), signal.SIGKILL)"
    checker = GrammarChecker()
    with pytest.raises(CapacityError, match="just now"):
        checker.problem("text", "digest", DEMO_MODEL, "t")
    child[1] = "input()\nprint('null')"
    assert checker.problem("text", "digest", DEMO_MODEL, "t") is None
    checker.close()


def test_a_check_goes_on_when_its_child_was_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_check, "WALL_S", 600.0)
    checker, others = GrammarChecker(), set(psutil.Process().children())
    assert checker.problem('start: "a"', "a", DEMO_MODEL, "t") is None
    (stopped,) = set(psutil.Process().children()) - others
    stopped.suspend()
    assert checker.problem('start: "b"', "b", DEMO_MODEL, "t") is None
    checker.close()
