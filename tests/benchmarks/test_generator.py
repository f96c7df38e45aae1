"""Counting clients against a small OpenAI-shaped server over a real socket."""

from __future__ import annotations

import asyncio
import contextlib
import operator
import time

import pytest

from manylora.benchmarks.http.fairness import Streams, flood
from manylora.benchmarks.http.generator import (
    Calls,
    LoadSettings,
    Reply,
    check_replies,
    closed_loop,
    tokens_per_s,
    watch_delay,
)
from manylora.benchmarks.http.http_stream import EventClient
from manylora.benchmarks.http.own_server import Served
from manylora.errors import ManyloraError
from shop_window import ShopWindow


def ask(url: str, count: int, in_flight: int = 1, output_tokens: int = 4) -> list[Reply]:
    replies: list[Reply] = []

    async def run() -> None:
        with contextlib.closing(EventClient(url, "key")) as client:
            calls = Calls(client, LoadSettings(vocab_size=64))
            made = (calls.make("a", 3, output_tokens, index) for index in range(count))
            await closed_loop(made, in_flight, replies)

    asyncio.run(run())
    return replies


def test_every_token_is_counted_with_its_time(server: ShopWindow) -> None:
    replies = ask(server.url, 6, in_flight=2)
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
    replies = ask(server.url, 2)
    assert [(reply.status, reply.is_refused, reply.retry_after_s) for reply in replies] == [
        (503, True, 7.0)
    ] * 2
    check_replies(replies)
    assert server.connections == 1


@pytest.mark.parametrize("fault", ["close", "more", "no length"])
def test_a_connection_that_the_server_ends_or_talks_on_is_not_used_again(
    server: ShopWindow, fault: str
) -> None:
    server.fault = fault
    replies = ask(server.url, 3)
    check_replies(replies)
    assert [len(reply.token_times_s) for reply in replies] == [4, 4, 4]
    assert server.connections == 3


def test_a_kept_connection_that_turns_out_to_be_closed_is_no_error_and_a_new_one_is(
    server: ShopWindow,
) -> None:
    server.fault = "one answer"
    replies = ask(server.url, 3)
    check_replies(replies)
    assert [len(reply.token_times_s) for reply in replies] == [4, 4, 4]
    assert server.connections == 3
    server.fault = "unanswered"
    (reply,) = ask(server.url, 1)
    assert (
        reply.error
        == "ConnectionError: the server closed the connection before the end of the answer"
    )
    assert server.connections == 4


def test_a_connection_with_half_an_answer_is_not_used_again(server: ShopWindow) -> None:
    async def run() -> list[Reply]:
        replies = [Reply("a", due_s=0.0) for _ in range(3)]
        with contextlib.closing(EventClient(server.url, "key")) as client:
            calls = Calls(client, LoadSettings(vocab_size=64))
            await calls.make("a", 3, 4, 0).send(replies[0])
            cut = asyncio.create_task(calls.make("a", 3, 400, 1).send(replies[1]))
            await asyncio.sleep(0.1)  # of 4 s
            cut.cancel()
            await asyncio.wait([cut])
            await calls.make("a", 3, 4, 2).send(replies[2])
        return replies

    replies = asyncio.run(run())
    assert [len(reply.token_times_s) for reply in (replies[0], replies[2])] == [4, 4]
    assert replies[2].error is None
    assert server.connections == 2


def test_a_server_that_is_not_there_is_an_error() -> None:
    replies = ask("http://127.0.0.1:9/v1", 1)
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
    def group(key: str, models: list[str], count: int) -> Streams:
        return Streams(
            Served(server.url, key, models), count, 3, 50, LoadSettings(vocab_size=64, seed=count)
        )

    groups = [group("one", ["a", "b"], 3), group("two", ["c"], 2)]
    with flood(groups) as report:
        start_s = time.perf_counter()
        while server.most_in_flight < 5 or time.perf_counter() < start_s + 0.7:
            time.sleep(0.01)
    assert server.most_in_flight == 5
    assert server.authorizations == {"Bearer one", "Bearer two"}
    assert {body["model"] for body in server.bodies} == {"a", "b", "c"}
    assert [
        len(replies) >= group.count for replies, group in zip(report.replies, groups, strict=True)
    ] == [True] * 2
    assert all(tokens_per_s(replies, start_s, start_s + 0.5) > 0 for replies in report.replies)
    assert report.delays_s
    deadline = time.monotonic() + 10
    while server.in_flight and time.monotonic() < deadline:
        time.sleep(0.01)
    assert server.in_flight == 0


def test_a_flood_whose_process_dies_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    # Dividing a pipe by a list raises a TypeError, of which the process dies.
    monkeypatch.setattr("manylora.benchmarks.http.fairness.run_clients", operator.truediv)
    with pytest.raises(EOFError), flood([Streams(Served("", "", ["a"]), 1, 1, 1, LoadSettings())]):
        pass
