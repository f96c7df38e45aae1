from __future__ import annotations

import hashlib
import itertools
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future

import pytest

from manylora.engine.grammar import compiler
from manylora.engine.grammar.compiler import Grammars
from manylora.engine.grammar.matcher import MAX_SHARED_TOKENS, Matcher, Wear
from manylora.engine.request import ErrorInfo, FlowKey, GenerationRequest, Grammar
from manylora.engine.sampling_params import SamplingParams
from manylora.errors import InvalidRequestError


class Panic(BaseException):
    """What a fault of a library in Rust raises."""


class FakeMatcher(Matcher):
    """Takes the tokens below 10."""

    def __init__(self, text: str, wear: Wear | None = None) -> None:
        self.text = text
        self.taken: list[int] = []
        self.wear = wear or Wear()

    def copy(self, stop_token_ids: Sequence[int] = ()) -> FakeMatcher:  # noqa: ARG002
        if self.text == "no copies":
            raise Panic("the parser gave up")
        return FakeMatcher(self.text, self.wear)

    def take(self, token_ids: Sequence[int]) -> bool:
        self.taken += token_ids
        return max(token_ids) < 10


class Later:
    """Runs what it was given when it is told to."""

    def __init__(self) -> None:
        self.jobs: deque[Callable[[], None]] = deque()

    def submit(self, fn: Callable[[], None], /) -> Future[None]:
        self.jobs.append(fn)
        return Future()

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:  # noqa: ARG002
        self.jobs.clear()

    def run(self, count: int = 1000) -> None:
        for _ in range(min(count, len(self.jobs))):
            self.jobs.popleft()()


class Parts:
    def __init__(self) -> None:
        self.compiled: list[str] = []
        self.later = Later()
        self.grammars = Grammars(self._compile, self.later)

    def _compile(self, text: str) -> Matcher:
        self.compiled.append(text)
        if text == "wrong":
            raise InvalidRequestError("It is wrong.", code="grammar_too_complex")
        if text == "panic":
            raise Panic("the parser gave up")
        return FakeMatcher(text)

    def ask(
        self, name: str, text: str, tenant: str = "t", generated: list[int] | None = None
    ) -> object:
        return self.grammars.ask(request_for(name, text, tenant, generated))

    def done(self) -> dict[str, object]:
        self.later.run()
        return dict(self.grammars.take_done())


def request_for(
    name: str, text: str, tenant: str = "t", generated: list[int] | None = None
) -> GenerationRequest:
    return GenerationRequest(
        request_id=name,
        prompt_token_ids=[1],
        params=SamplingParams(),
        flow=FlowKey(tenant=tenant),
        grammar=Grammar(text=text, digest=hashlib.sha256(text.encode()).hexdigest()),
        generated_token_ids=generated or [],
    )


def test_a_grammar_is_compiled_once_and_every_request_has_a_matcher_of_its_own() -> None:
    parts = Parts()
    assert parts.ask("a", "one") is parts.ask("b", "one") is None
    done = parts.done()
    assert done.keys() == {"a", "b"}
    assert done["a"] is not done["b"]
    assert isinstance(parts.ask("c", "one"), FakeMatcher)
    assert parts.compiled == ["one"]


def test_tenants_take_turns_and_share_nothing() -> None:
    parts = Parts()
    for index in range(4):
        parts.ask(f"many-{index}", f"grammar {index}", "many")
    parts.ask("few-0", "grammar 0", "few")
    parts.later.run(2)
    assert parts.compiled == ["grammar 0", "grammar 0"]
    assert [name for name, _ in parts.grammars.take_done()] == ["many-0", "few-0"]


def test_what_goes_wrong_ends_those_that_asked_and_nobody_else(
    caplog: pytest.LogCaptureFixture,
) -> None:
    parts = Parts()
    for name in ("wrong", "panic", "no copies", "right"):
        parts.ask(name, name)
    done = parts.done()
    assert [type(result) for result in done.values()] == [
        ErrorInfo,
        ErrorInfo,
        ErrorInfo,
        FakeMatcher,
    ]
    assert done["wrong"] == ErrorInfo(
        code="grammar_too_complex", message="It is wrong.", kind="request"
    )
    assert isinstance(done["panic"], ErrorInfo)
    assert done["panic"].kind == "internal"
    assert "gave up" in caplog.text


def test_what_nobody_waits_for_any_more_is_not_compiled() -> None:
    parts = Parts()
    for name in ("gone", "left"):
        parts.ask(name, "shared" if name == "left" else "alone")
    parts.ask("gone too", "shared")
    parts.grammars.forget(request_for("gone", "alone"))
    parts.grammars.forget(request_for("gone too", "shared"))
    assert parts.done().keys() == {"left"}
    assert parts.compiled == ["shared"]
    assert parts.ask("again", "alone") is None
    assert parts.done().keys() == {"again"}


def test_who_joins_after_the_others_left_still_gets_a_matcher() -> None:
    parts = Parts()
    parts.ask("left", "one")
    parts.grammars.forget(request_for("left", "one"))
    parts.later.run()
    assert parts.ask("joined", "one") is None
    assert parts.done() == {}
    done = parts.done()
    assert done.keys() == {"joined"}
    assert isinstance(done["joined"], FakeMatcher)


def test_a_matcher_begins_after_what_was_generated_already() -> None:
    parts = Parts()
    parts.ask("fits", "one", generated=[1, 2])
    parts.ask("does not", "one", generated=[99])
    done = parts.done()
    assert isinstance(done["fits"], FakeMatcher)
    assert done["fits"].taken == [1, 2]
    assert isinstance(done["does not"], ErrorInfo)
    assert done["does not"].code == "grammar_mismatch"


def test_a_tenant_with_many_grammars_pushes_out_its_own_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(compiler, "MAX_KEPT", 4)
    parts = Parts()
    parts.ask("mine", "mine", "few")
    for index in range(10):
        parts.ask(f"many-{index}", f"grammar {index}", "many")
    parts.done()
    assert len(parts.grammars.kept) == 4
    assert parts.ask("again", "mine", "few") is not None
    assert parts.ask("newest", "grammar 9", "many") is not None
    assert parts.ask("oldest", "grammar 0", "many") is None


def test_what_is_kept_is_bounded_in_bytes_and_what_copies_add_counts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(compiler, "MAX_KEPT_BYTES", 3_500_000)
    monkeypatch.setattr(compiler, "BASE_BYTES", 0)
    clock = itertools.count()
    monkeypatch.setattr(time, "thread_time", lambda: next(clock) * 0.005)
    parts = Parts()
    for index in range(10):
        parts.ask(str(index), f"grammar {index}")
    parts.done()
    assert len(parts.grammars.kept) == 3
    copy = parts.ask("copy", "grammar 9")
    assert isinstance(copy, FakeMatcher)
    copy.wear.num_tokens += 300
    parts.ask("again", "grammar 9")
    assert len(parts.grammars.kept) == 1


@pytest.mark.parametrize("wear", [Wear(is_broken=True), Wear(num_tokens=MAX_SHARED_TOKENS)])
def test_what_its_copies_wore_out_is_compiled_again(wear: Wear) -> None:
    parts = Parts()
    parts.ask("first", "one")
    matcher = parts.done()["first"]
    assert isinstance(matcher, FakeMatcher)
    matcher.wear.is_broken, matcher.wear.num_tokens = wear.is_broken, wear.num_tokens
    assert parts.ask("second", "one") is None
    assert parts.done().keys() == {"second"}
    assert isinstance(parts.ask("third", "one"), FakeMatcher)
    assert parts.compiled == ["one", "one"]


def test_closing_drops_what_waits() -> None:
    parts = Parts()
    parts.ask("a", "one")
    parts.grammars.close()
    assert parts.done() == {}
