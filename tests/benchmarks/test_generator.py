"""Counting clients against a small OpenAI-shaped server over a real socket."""

from __future__ import annotations

import asyncio
import itertools
import operator
import time
from collections import Counter
from dataclasses import replace

import pytest

from manylora.benchmarks.http.generator import (
    Generator,
    Load,
    Target,
    check_replies,
    flood,
)
from manylora.benchmarks.http.runner import play, watch_delay
from manylora.benchmarks.metrics import Reply, tokens_per_s
from manylora.errors import ManyloraError
from shop_window import ShopWindow


def send(url: str, count: int, in_flight: int = 1, output_tokens: int = 4) -> list[Reply]:
    load = Load(
        targets=[Target(url, "key", "a", 64)],
        at_once=in_flight,
        prompt_tokens=3,
        output_tokens=output_tokens,
        count=count,
    )
    return load.run()


def test_items_are_acted_on_when_they_are_due_and_some_at_a_time() -> None:
    """Two clients, of which each needs 0.1 s: the third item is due before one is free."""
    began: list[tuple[str, float, float]] = []

    async def act(item: str, due_s: float) -> None:
        began.append((item, due_s - start_s, time.perf_counter() - start_s))
        await asyncio.sleep(0.1)

    start_s = time.perf_counter()
    asyncio.run(play("abcd", act, at_once=2, arrivals_s=[0.0, 0.02, 0.04, 0.3]))
    assert [item for item, _, _ in began] == ["a", "b", "c", "d"]
    due_s = [due for _, due, _ in began]
    assert [each - due_s[0] for each in due_s] == pytest.approx([0.0, 0.02, 0.04, 0.3], abs=1e-3)
    at_s = [at for _, _, at in began]
    assert all(at >= due for due, at in zip(due_s, at_s, strict=True))
    assert at_s[2] >= at_s[0] + 0.1, "both clients are busy until then"


def test_no_item_is_begun_after_the_end() -> None:
    begun = 0

    async def act(_item: int, _due_s: float) -> None:
        nonlocal begun
        begun += 1
        await asyncio.sleep(0.01)

    async def run() -> None:
        await play(range(10_000), act, at_once=1, until_s=time.perf_counter() + 0.1)

    asyncio.run(run())
    assert 1 <= begun <= 11


def test_every_token_is_counted_with_its_time(server: ShopWindow) -> None:
    replies = send(server.url, 6, in_flight=2)
    assert [len(reply.token_times_s) for reply in replies] == [4] * 6
    assert [reply.completion_tokens for reply in replies] == [4] * 6
    check_replies(replies)
    for reply in replies:
        assert (
            reply.due_s
            <= reply.sent_s
            <= reply.head_s
            <= reply.token_times_s[0]
            < reply.token_times_s[-1]
        )
        assert reply.token_times_s[-1] <= reply.done_s
    spans = (replies[0].sent_s, replies[-1].done_s)
    assert tokens_per_s(replies, *spans) == pytest.approx(24 / (spans[1] - spans[0]))


def test_a_refusal_is_no_failure_and_tells_when_to_come_again(server: ShopWindow) -> None:
    server.fault = "503"
    replies = send(server.url, 2)
    assert [(reply.status, reply.is_refused, reply.retry_after_s) for reply in replies] == [
        (503, True, 7.0)
    ] * 2
    check_replies(replies)
    assert server.connections == 1


def test_a_request_that_is_refused_is_sent_again_while_tries_are_left(server: ShopWindow) -> None:
    server.fault = "503"
    load = Load(targets=[Target(server.url, "key", "a", 64)], prompt_tokens=3, count=2, tries=3)
    replies = load.run()
    assert [reply.attempt for reply in replies] == [1, 2, 3, 1, 2, 3]
    assert len({str(body["prompt"]) for body in server.bodies}) == 2
    assert replies[1].due_s - replies[0].done_s < 1, "at once"
    assert all(reply.is_refused and not reply.is_answered for reply in replies)


def test_a_client_that_heeds_retry_after_waits_that_long(
    server: ShopWindow, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Reply, "retry_after_s", 0.3)
    server.fault = "503"
    load = Load(
        targets=[Target(server.url, "key", "a", 64)],
        prompt_tokens=3,
        count=1,
        tries=2,
        heeds_retry_after=True,
    )
    first, second = load.run()
    assert second.due_s - first.done_s >= 0.3


def test_a_client_pauses_before_each_request_and_is_not_late_for_it(server: ShopWindow) -> None:
    load = Load(
        targets=[Target(server.url, "key", "a", 64)],
        prompt_tokens=3,
        output_tokens=1,
        count=5,
        pause_s=0.05,
    )
    replies = load.run()
    assert all(reply.sent_s - reply.due_s < 0.01 for reply in replies)
    pauses_s = [later.due_s - one.done_s for one, later in itertools.pairwise(replies)]
    assert len({round(pause_s, 3) for pause_s in pauses_s}) > 1, "they are drawn"
    assert sum(pauses_s) > 0


@pytest.mark.parametrize("fault", ["close", "more", "no length"])
def test_a_connection_that_the_server_ends_or_talks_on_is_not_used_again(
    server: ShopWindow, fault: str
) -> None:
    server.fault = fault
    replies = send(server.url, 3)
    check_replies(replies)
    assert [len(reply.token_times_s) for reply in replies] == [4, 4, 4]
    assert server.connections == 3


def test_a_kept_connection_that_turns_out_to_be_closed_is_no_error_and_a_new_one_is(
    server: ShopWindow,
) -> None:
    server.fault = "one answer"
    replies = send(server.url, 3)
    check_replies(replies)
    assert [len(reply.token_times_s) for reply in replies] == [4, 4, 4]
    assert server.connections == 3
    server.fault = "unanswered"
    (reply,) = send(server.url, 1)
    assert (
        reply.error
        == "ConnectionError: the server closed the connection before the end of the answer"
    )
    assert server.connections == 4


def test_a_connection_with_half_an_answer_is_not_used_again(server: ShopWindow) -> None:
    async def run() -> list[Reply]:
        replies: list[Reply] = []
        target = Target(server.url, "key", "a", 64)
        with Generator() as made:
            await made.call(target, 3, 4).send(replies, 0.0)
            cut = asyncio.create_task(made.call(target, 3, 400).send(replies, 0.0))
            await asyncio.sleep(0.1)  # of 4 s
            cut.cancel()
            await asyncio.wait([cut])
            await made.call(target, 3, 4).send(replies, 0.0)
        return replies

    replies = asyncio.run(run())
    assert [len(reply.token_times_s) for reply in (replies[0], replies[2])] == [4, 4]
    assert replies[2].error is None
    assert server.connections == 2


def test_a_server_that_is_not_there_is_an_error() -> None:
    replies = send("http://127.0.0.1:9/v1", 1)
    with pytest.raises(ManyloraError, match="ConnectionRefusedError"):
        check_replies(replies)
    assert replies[0].status == 0


def test_the_clients_own_delay_is_seen() -> None:
    async def run() -> list[float]:
        delays_s: list[float] = []
        watch = asyncio.create_task(watch_delay(delays_s))
        await asyncio.sleep(0.01)
        time.sleep(0.1)  # noqa: ASYNC251 - what it must notice
        await asyncio.sleep(0.01)
        watch.cancel()
        return delays_s

    assert max(asyncio.run(run())) >= 0.09


def test_a_flood_keeps_its_streams_open_until_its_block_ends(server: ShopWindow) -> None:
    def group(key: str, models: list[str], count: int) -> Load:
        return Load(
            targets=[Target(server.url, key, model, 64) for model in models],
            at_once=count,
            prompt_tokens=3,
            output_tokens=50,
            seed=count,
        )

    groups = [group("one", ["a", "b"], 3), group("two", ["c"], 2)]
    with flood(groups) as flooded:
        start_s = time.perf_counter()
        while server.most_in_flight < 5 or time.perf_counter() < start_s + 0.7:
            time.sleep(0.01)
    assert server.most_in_flight == 5
    assert server.authorizations == {"Bearer one", "Bearer two"}
    assert {body["model"] for body in server.bodies} == {"a", "b", "c"}
    assert [
        len(replies) >= group.at_once for replies, group in zip(flooded, groups, strict=True)
    ] == [True] * 2
    assert all(tokens_per_s(replies, start_s, start_s + 0.5) > 0 for replies in flooded)
    deadline = time.monotonic() + 10
    while server.in_flight and time.monotonic() < deadline:
        time.sleep(0.01)
    assert server.in_flight == 0


def test_targets_are_asked_in_turn_or_by_their_popularity_for_lengths_of_a_range() -> None:
    targets = [Target("http://127.0.0.1:9/v1", "", name) for name in "abc"]
    in_turn = Load(targets=targets, at_once=1, prompt_tokens=5, output_tokens=range(50, 151))
    with Generator() as made:
        sent = list(itertools.islice(in_turn.calls(made), 400))
        drawn = replace(in_turn, popularity="zipf:1", count=400)
        popular = Counter(call.model for call in drawn.calls(made))
    assert [call.model for call in sent[:4]] == ["a", "b", "c", "a"]
    assert len({call.body for call in sent}) == 400, "no two prompts are the same"
    assert {call.prompt_tokens for call in sent} == {5}
    lengths = [call.output_tokens or 0 for call in sent]
    assert min(lengths) in range(50, 60)
    assert max(lengths) in range(141, 151)
    assert sum(lengths) / 400 == pytest.approx(100, rel=0.05)
    assert popular.total() == 400
    assert popular["a"] > popular["b"] > popular["c"] > 0


def test_a_client_of_a_flood_can_be_slowed_down(server: ShopWindow) -> None:
    slow = Load(
        targets=[Target(server.url, "", "a")],
        at_once=1,
        prompt_tokens=1,
        output_tokens=1,
        every_s=0.2,
    )
    with flood([slow]) as flooded:
        time.sleep(0.7)
    sent_s = [reply.sent_s for reply in flooded[0]]
    assert len(sent_s) >= 2
    assert all(later - earlier >= 0.19 for earlier, later in itertools.pairwise(sent_s))


def test_a_flood_whose_process_dies_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    # Dividing a pipe by a list raises a TypeError, of which the process dies.
    monkeypatch.setattr("manylora.benchmarks.http.generator.run_clients", operator.truediv)
    with pytest.raises(EOFError), flood([Load(targets=[], at_once=1)]):
        pass
