from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from manylora.errors import CapacityError, ManyloraError, NotFoundError
from manylora.registry import cache as recent_module
from manylora.registry.cache import (
    LOOK_S,
    MAX_AGE_S,
    MAX_CONFIRMED_S,
    MAX_OUTAGE_S,
    Changes,
    ReadThroughCache,
)
from registry_samples import StandingClock

pytestmark = pytest.mark.anyio


class Source:
    """Answers with what it is told to, and counts the questions."""

    def __init__(self, answer: int | ManyloraError = 1) -> None:
        self.answer = answer
        self.num_asked = 0
        self.meanwhile: Callable[[], None] = lambda: None

    async def __call__(self) -> int:
        self.num_asked += 1
        self.meanwhile()
        if isinstance(self.answer, ManyloraError):
            raise self.answer
        return self.answer


def made() -> tuple[ReadThroughCache[str, int], StandingClock]:
    clock = StandingClock()
    return ReadThroughCache(clock.monotonic), clock


async def answers(
    recent: ReadThroughCache[str, int], source: Callable[[], Awaitable[int]], count: int = 1
) -> list[int]:
    return [await recent.ask("a", source) for _ in range(count)]


async def test_an_answer_serves_for_a_second() -> None:
    (recent, clock), source = made(), Source()
    assert await answers(recent, source, 3) == [1, 1, 1]
    clock.advance(MAX_AGE_S * 0.99)
    source.answer = 2
    assert (await answers(recent, source), source.num_asked) == ([1], 1)
    clock.advance(MAX_AGE_S * 0.02)
    assert (await answers(recent, source), source.num_asked) == ([2], 2)


async def test_all_who_ask_at_once_wait_for_one_reading() -> None:
    (recent, clock), source = made(), Source()
    for count in (1, 2):
        assert await asyncio.gather(*(recent.ask("a", source) for _ in range(10))) == [1] * 10
        assert source.num_asked == count
        clock.advance(MAX_AGE_S)
    source.answer = NotFoundError("gone")
    ends = await asyncio.gather(
        *(recent.ask("a", source) for _ in range(10)), return_exceptions=True
    )
    assert [type(end) for end in ends] == [NotFoundError] * 10
    assert source.num_asked == 3


async def followed() -> tuple[ReadThroughCache[str, int], StandingClock, Source, Source]:
    """A map that follows a log of changes, after the first look."""
    clock, log, source = StandingClock(), Source(7), Source()
    recent: ReadThroughCache[str, int] = ReadThroughCache(
        clock.monotonic, Changes(log, clock.monotonic)
    )
    assert await answers(recent, source, 2) == [1, 1]
    await asyncio.sleep(0)
    assert (log.num_asked, source.num_asked) == (1, 1)
    assert await answers(recent, source) == [
        1
    ]  # what was read before the first look counts no more
    assert source.num_asked == 2
    return recent, clock, log, source


async def passes(
    recent: ReadThroughCache[str, int], clock: StandingClock, source: Source, seconds: float
) -> list[int]:
    """What who asks every tenth of a second is told."""
    told = []
    for _ in range(round(10 * seconds)):
        clock.advance(0.1)
        told += await answers(recent, source)
        await asyncio.sleep(0)
    return told


async def test_an_answer_serves_on_while_nothing_changes() -> None:
    recent, clock, log, source = await followed()
    source.answer = 2
    assert await passes(recent, clock, source, MAX_CONFIRMED_S - 1) == [1] * (
        10 * (round(MAX_CONFIRMED_S) - 1)
    )
    assert source.num_asked == 2
    assert log.num_asked < MAX_CONFIRMED_S / LOOK_S
    assert (await passes(recent, clock, source, 2))[
        -1
    ] == 2  # and not for ever, whatever the log says
    assert source.num_asked == 3


async def test_what_another_process_changed_is_seen_after_a_second() -> None:
    recent, clock, log, source = await followed()
    await passes(recent, clock, source, 3)
    source.answer, log.answer = 2, 8
    assert (await passes(recent, clock, source, MAX_AGE_S))[-1] == 2
    source.answer = 3
    clock.advance(MAX_AGE_S)  # who asks seldom reads again
    assert await answers(recent, source) == [3]


async def test_answers_get_old_while_the_log_cannot_be_read() -> None:
    recent, clock, log, source = await followed()
    await passes(recent, clock, source, 3)
    log.answer = CapacityError("away")
    source.answer = 2
    assert (await passes(recent, clock, source, MAX_AGE_S + 0.5))[-1] == 2
    log.answer = 7
    source.answer = 3
    told = await passes(recent, clock, source, 10)
    assert told[-1] in (2, 3)
    assert source.num_asked <= 4  # looks tell again that nothing has changed


async def test_who_asks_after_a_change_does_not_get_what_was_asked_before_it() -> None:
    (recent, _), source = made(), Source()
    changed = asyncio.Event()

    async def slow() -> int:
        await changed.wait()
        return 1

    early = asyncio.create_task(recent.ask("a", slow))
    await asyncio.sleep(0)
    recent.forget()
    source.answer = 2
    assert await answers(recent, source) == [2]
    changed.set()
    assert await early == 1
    assert (await answers(recent, source), source.num_asked) == ([2], 1)


async def test_one_who_leaves_does_not_take_the_reading_along() -> None:
    (recent, _), source = made(), Source()
    go_on = asyncio.Event()

    async def slow() -> int:
        await go_on.wait()
        return 1

    first, second = (asyncio.create_task(recent.ask("a", slow)) for _ in range(2))
    await asyncio.sleep(0)
    first.cancel()
    go_on.set()
    assert await second == 1
    assert await answers(recent, source) == [1]
    assert source.num_asked == 0


async def test_while_the_database_is_away_an_answer_serves_for_a_minute() -> None:
    (recent, clock), source = made(), Source()
    await answers(recent, source)
    source.answer = CapacityError("away")
    clock.advance(MAX_OUTAGE_S * 0.99)
    assert await answers(recent, source) == [1]
    clock.advance(MAX_OUTAGE_S * 0.02)
    with pytest.raises(CapacityError):
        await recent.ask("a", source)
    with pytest.raises(CapacityError):
        await recent.ask("unknown", source)


async def test_in_an_outage_one_at_a_time_asks_and_the_others_go_on() -> None:
    (recent, clock), source = made(), Source()
    await answers(recent, source)
    source.answer = CapacityError("away")
    for _ in range(3):
        clock.advance(MAX_AGE_S)
        before = source.num_asked
        assert await answers(recent, source, 5) == [1] * 5
        assert source.num_asked == before + 1
    source.answer = 2
    clock.advance(MAX_AGE_S)
    assert await answers(recent, source) == [2]


async def test_a_refusal_ends_an_outage_as_an_answer_does() -> None:
    """Else one who keeps asking for what does not exist would keep changes of another process unseen for a minute."""
    (recent, clock), source = made(), Source()
    await answers(recent, source)
    clock.advance(MAX_AGE_S)
    source.answer = CapacityError("away")
    assert await answers(recent, source) == [1]
    clock.advance(MAX_AGE_S)
    with pytest.raises(NotFoundError):
        await recent.ask("unknown", Source(NotFoundError("no such key")))
    source.answer = 2
    assert await answers(recent, source) == [2]


async def test_a_database_that_hangs_is_not_waited_for_by_who_has_an_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(recent_module, "PATIENCE_S", 0.05)
    (recent, clock), source = made(), Source()
    await answers(recent, source)
    clock.advance(MAX_AGE_S)
    hung = asyncio.Event()

    async def never() -> int:
        hung.set()
        await asyncio.Event().wait()
        return 0

    async def second() -> list[int]:
        await hung.wait()
        return await answers(recent, source)

    assert tuple(await asyncio.gather(answers(recent, never), answers(recent, never))) == ([1], [1])
    clock.advance(MAX_AGE_S)
    hung.clear()
    assert tuple(await asyncio.gather(answers(recent, never), second())) == ([1], [1])
    assert source.num_asked == 1


async def test_what_was_taken_back_does_not_return_in_an_outage() -> None:
    (recent, clock), source = made(), Source()
    await answers(recent, source)
    clock.advance(MAX_AGE_S)
    source.answer = NotFoundError("revoked elsewhere")
    with pytest.raises(NotFoundError):
        await recent.ask("a", source)
    source.answer = CapacityError("away")
    with pytest.raises(CapacityError):
        await recent.ask("a", source)


async def test_a_change_made_here_counts_in_an_outage_too() -> None:
    (recent, clock), source = made(), Source()
    await answers(recent, source)
    clock.advance(MAX_AGE_S)
    source.answer, source.meanwhile = CapacityError("away"), recent.forget
    with pytest.raises(CapacityError):
        await recent.ask("a", source)


async def test_it_never_grows_beyond_its_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recent_module, "MAX_ENTRIES", 3)
    (recent, _), source = made(), Source()
    for key in ("a", "b", "c", "d", "d"):
        await recent.ask(key, source)
    assert source.num_asked == 4
    await recent.ask("a", source)
    assert source.num_asked == 5
