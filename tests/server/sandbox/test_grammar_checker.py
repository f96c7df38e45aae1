"""Checks of grammars in a real process with limits."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import psutil
import pytest

from fake_engine import DEMO_MODEL
from manylora.engine.grammar.json_schema import json_grammar
from manylora.engine.grammar.matcher import GrammarTokens
from manylora.engine.grammar.problems import TOO_COMPLEX
from manylora.engine.request import Grammar
from manylora.engine.text.tokenizer import Tokenizer
from manylora.errors import CapacityError
from manylora.server.sandbox import grammar_checker, processes
from manylora.server.sandbox.grammar_checker import GrammarChecker

pytestmark = pytest.mark.anyio
SMALL = Grammar.of('start: "a"')
DOUBLED = {
    **{f"d{index}": {"allOf": [{"$ref": f"#/$defs/d{index + 1}"}] * 2} for index in range(25)},
    "d25": {"type": "string", "pattern": "^a"},
}
Program = Callable[[str], None]


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
async def checker() -> AsyncIterator[GrammarChecker]:
    made = GrammarChecker(DEMO_MODEL)
    yield made
    await made.close()


@pytest.fixture
async def own() -> AsyncIterator[GrammarChecker]:
    made = GrammarChecker(DEMO_MODEL)
    yield made
    await made.close()


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Program:
    """Sets what a checker's process runs, in Python, once it has read the setup."""
    path = tmp_path / "python"
    interpreter = sys.executable

    def write(code: str) -> None:
        path.write_text(f"#!{interpreter}\nimport json, os, signal, sys, time\ninput()\n{code}\n")
        path.chmod(0o700)

    monkeypatch.setattr(sys, "executable", str(path))
    return write


def children() -> list[psutil.Process]:
    return [
        child
        for child in psutil.Process().children()
        if child.status() != psutil.STATUS_ZOMBIE
        and "manylora.server.sandbox.grammar_worker" in child.cmdline()
    ]


async def test_a_check_that_is_ended_is_remembered_and_the_next_one_is_made(
    checker: GrammarChecker,
) -> None:
    doubled = Grammar.of(json_grammar({"$ref": "#/$defs/d0", "$defs": DOUBLED}))
    for _ in range(2):
        assert await checker.problem(doubled, "t") == TOO_COMPLEX
    assert await checker.problem(SMALL, "t") is None


async def test_what_takes_the_engine_long_to_compile_is_refused(checker: GrammarChecker) -> None:
    rules = [
        f'r{index}: %json {{"type": "integer", "multipleOf": {9000 + index}}}'
        for index in range(20)
    ]
    text = "\n".join(["start: " + " ".join(f"r{index}" for index in range(20)), *rules])
    assert await checker.problem(Grammar.of(text), "t") == TOO_COMPLEX
    ambiguous = "start: a\na: /[a-z]/ | a a | a a a"
    assert await checker.problem(Grammar.of(ambiguous), "t") is None


def _optional(count: int) -> str:
    properties = {f"property_{index}": {"type": "string"} for index in range(count)}
    return json_grammar({"type": "object", "properties": properties, "additionalProperties": False})


async def test_what_breaks_only_while_an_answer_is_written_is_refused_and_what_does_not_is_taken(
    checker: GrammarChecker,
) -> None:
    assert "items" in (await checker.problem(Grammar.of(_optional(700)), "t") or "")
    text = _optional(400)
    assert await checker.problem(Grammar.of(text), "t") is None
    tokenizer = Tokenizer(DEMO_MODEL)
    matcher = GrammarTokens(DEMO_MODEL, tokenizer.eos_token_ids).compile(text)
    assert matcher.take(
        tokenizer.encode('{"property_7": "a", "property_399": "b"}', add_special_tokens=False)
    )
    assert matcher.parser.is_accepting()


async def test_a_tokenizer_that_grammars_do_not_know_is_left_to_the_engine(tmp_path: Path) -> None:
    checker = GrammarChecker(tmp_path)
    assert await checker.problem(SMALL, "t") is None
    assert "unknown name" in (await checker.problem(Grammar.of("start: b"), "t") or "")
    await checker.close()


async def test_checks_give_way_to_steps(checker: GrammarChecker) -> None:
    await checker.problem(Grammar.of('start: "first"'), "t")
    niceness = min(int(psutil.Process().nice()) + 10, 19)
    processes = [each for child in children() for each in (child, *child.children())]
    assert {int(each.nice()) for each in processes} == {niceness}


async def test_tenants_share_no_verdicts(own: GrammarChecker, program: Program) -> None:
    program(
        "for index, line in enumerate(sys.stdin):\n"
        "    print(json.dumps([json.loads(line)[0], f'check {index}']), flush=True)"
    )
    found = [await own.problem(SMALL, tenant) for tenant in ("one", "two", "one")]
    assert found == ["check 0", "check 1", "check 0"]


async def test_a_process_that_was_killed_says_nothing_of_the_grammar(
    own: GrammarChecker, program: Program
) -> None:
    program("input()\nos.kill(os.getpid(), signal.SIGKILL)")
    with pytest.raises(CapacityError, match="just now"):
        await own.problem(SMALL, "t")
    program("print(json.dumps([json.loads(input())[0], None]))")
    assert await own.problem(SMALL, "t") is None


async def test_a_check_that_gets_no_time_says_nothing_of_the_grammar(
    own: GrammarChecker, program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_checker, "WALL_S", 0.05)
    program("time.sleep(60)")
    with pytest.raises(CapacityError, match="just now"):
        await own.problem(SMALL, "t")
    monkeypatch.setattr(grammar_checker, "WALL_S", 60.0)
    program("print(json.dumps([json.loads(input())[0], 'verdict']))")
    assert await own.problem(SMALL, "t") == "verdict"


async def test_a_check_goes_on_when_its_process_was_stopped(
    own: GrammarChecker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "LOOK_S", 0.01)
    before = children()
    assert await own.problem(SMALL, "t") is None
    (stopped,) = set(children()) - set(before)
    stopped.suspend()
    assert await own.problem(Grammar.of('start: "b"'), "t") is None
