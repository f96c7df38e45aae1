"""Limits as arithmetic, on a clock that stands until it is told to move."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from weft.errors import QuotaExceededError, RateLimitError
from weft.registry.limits import UNLIMITED, Limits
from weft.server.errors import error_headers
from weft.server.limits.reservation import LimitReservation, Share
from weft.server.limits.windows import Account, Accounts, Window, month_after, month_of

NOON = datetime(2026, 5, 4, 12, tzinfo=UTC)
MAY = datetime(2026, 5, 1, tzinfo=UTC)


@dataclass
class Desk:
    """Admits requests of one tenant and one key."""

    tenant: Limits = UNLIMITED
    key: Limits = UNLIMITED
    now_s: float = 1000.0
    accounts: tuple[Account, Account] = field(default_factory=lambda: (Account(), Account()))
    refused: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        for account in self.accounts:
            account.month = MAY

    def admit(self, least: int = 0) -> LimitReservation:
        lease = LimitReservation()
        shares = [
            Share("tenant", "ten_1", self.accounts[0], self.tenant),
            Share("key", "key_1", self.accounts[1], self.key),
        ]
        lease.admit(shares, lambda: self.now_s, self.refused.append, least)
        return lease

    def run(self, tokens: int, used: int) -> None:
        lease = self.admit()
        lease.reserve(tokens, tokens, is_open=False)
        lease.settle(f"use_{self.now_s}", used, NOON)
        lease.end()

    def refusal(self, act: Callable[[], object]) -> RateLimitError:
        with pytest.raises(RateLimitError) as refused:
            act()
        return refused.value


def test_a_window_counts_for_sixty_to_sixty_one_seconds() -> None:
    for start in (1000.0, 1000.5, 1000.999):
        window = Window()
        window.take(start, 3)
        assert window.total(start + 60) == 3
        assert window.wait_s(start, 3) <= 61
        assert window.total(start + window.wait_s(start, 3)) == 0
        assert window.total(start + 61) == 0


def test_the_wait_is_as_long_as_needed_for_what_is_asked() -> None:
    window = Window()
    for second in range(5):
        window.take(1000 + second, 10)
    assert [window.wait_s(1004, amount) for amount in (0, 1, 10, 11, 50)] == [0, 57, 57, 58, 61]


def test_the_tighter_of_tenant_and_key_answers() -> None:
    desk = Desk(tenant=Limits(requests_per_minute=3, tokens_per_minute=50), key=Limits(requests_per_minute=1))
    lease = desk.admit()
    assert lease.headers()["x-ratelimit-limit-requests"] == "1"
    assert lease.headers()["x-ratelimit-remaining-requests"] == "0"
    assert lease.headers()["x-ratelimit-limit-tokens"] == "50"
    assert "key's" in desk.refusal(desk.admit).message
    desk = Desk(tenant=Limits(requests_per_minute=1), key=Limits(requests_per_minute=3))
    assert desk.admit().headers()["x-ratelimit-limit-requests"] == "1"
    assert "tenant's" in desk.refusal(desk.admit).message


def test_a_refused_request_takes_nothing_of_any_limit() -> None:
    desk = Desk(tenant=Limits(requests_per_minute=9, tokens_per_minute=10), key=Limits(concurrent_requests=0))
    desk.refusal(desk.admit)
    desk.key = Limits()
    lease = desk.admit()
    desk.refusal(lambda: lease.reserve(11, 11, is_open=False))
    lease.end()
    for account in desk.accounts:
        assert set(account.used(desk.now_s).values()) == {0}


@pytest.mark.parametrize("limits", [{"requests_per_minute": 0}, {"concurrent_requests": 0}, {"tokens_per_minute": 0}])
def test_a_limit_of_nothing_lets_nothing_pass_and_says_not_to_retry(limits: dict[str, int]) -> None:
    desk = Desk(tenant=Limits(**limits))
    error = desk.refusal(lambda: desk.admit(least=1))
    assert error_headers(error) == {"x-should-retry": "false"}
    assert error.code == "rate_limit_exceeded"


def test_an_answer_without_a_bound_reserves_no_more_than_the_limits_allow() -> None:
    desk = Desk(tenant=Limits(tokens_per_minute=100), key=Limits(tokens_per_month=80))
    lease = desk.admit()
    lease.reserve(11, 1034, is_open=True)
    assert desk.accounts[0].reserved == 80
    lease.settle("use_1", 20, NOON)
    lease.end()
    assert desk.accounts[0].used(desk.now_s) == {
        "requests_per_minute": 1,
        "tokens_per_minute": 20,
        "concurrent_requests": 0,
        "tokens_per_month": 20,
    }
    assert error_headers(desk.refusal(lambda: desk.admit().reserve(101, 1124, is_open=True))) == {
        "x-should-retry": "false"
    }


def test_what_grows_beyond_a_reservation_counts_at_once_from_then_on() -> None:
    desk = Desk(tenant=Limits(tokens_per_minute=100, tokens_per_month=400))
    lease = desk.admit()
    lease.reserve(11, 40, is_open=True)
    desk.now_s += 30
    assert lease.grow(40)
    assert desk.accounts[0].tokens.total(desk.now_s) == 40
    assert lease.grow(70)
    assert lease.headers()["x-ratelimit-remaining-tokens"] == "30"
    assert desk.accounts[0].used(desk.now_s)["tokens_per_month"] == 70
    desk.now_s += 31
    assert desk.accounts[0].tokens.total(desk.now_s) == 30
    lease.settle("use_1", 60, NOON)
    lease.end()
    assert desk.accounts[0].used(desk.now_s) == {
        "requests_per_minute": 0,
        "tokens_per_minute": 20,
        "concurrent_requests": 0,
        "tokens_per_month": 60,
    }
    assert not lease.grow(71)
    assert desk.accounts[0].reserved == 0


@pytest.mark.parametrize("limits", [{"tokens_per_minute": 100}, {"tokens_per_month": 100}])
def test_a_request_does_not_grow_beyond_a_limit(limits: dict[str, int]) -> None:
    desk = Desk(key=Limits(**limits))
    lease, other = desk.admit(), desk.admit()
    lease.reserve(2, 50, is_open=True)
    other.reserve(2, 30, is_open=True)
    assert lease.grow(70)
    assert not lease.grow(71)
    assert desk.refused == list(limits)
    assert [account.used(desk.now_s)[name] for account in desk.accounts for name in limits] == [100, 100]
    other.settle("use_1", 3, NOON)
    assert lease.grow(97)
    lease.end()
    assert [account.reserved for account in desk.accounts] == [0, 0]


def test_settling_after_the_minute_takes_nothing_from_those_that_came_later() -> None:
    desk = Desk(tenant=Limits(tokens_per_minute=100))
    long = desk.admit()
    long.reserve(90, 90, is_open=False)
    desk.now_s += 61
    desk.run(60, 60)
    long.settle("use_1", 5, NOON)
    long.end()
    assert desk.accounts[0].tokens.total(desk.now_s) == 60


def test_the_month_is_used_up_for_good_but_not_what_running_requests_reserve() -> None:
    desk = Desk(tenant=Limits(tokens_per_month=100))
    desk.run(60, 50)
    running = desk.admit()
    running.reserve(40, 40, is_open=False)
    error = desk.refusal(lambda: desk.admit(least=11))
    assert (error.code, error_headers(error)["retry-after"]) == ("rate_limit_exceeded", "1")
    assert "40 are reserved" in error.message
    error = desk.refusal(lambda: desk.admit(least=51))
    assert isinstance(error, QuotaExceededError)
    assert (error.code, error_headers(error)) == ("insufficient_quota", {"x-should-retry": "false"})
    running.settle("use_2", 1, NOON)
    desk.admit(least=49)


def test_headers_are_there_only_where_something_limits() -> None:
    assert LimitReservation().headers() == {}
    assert Desk(tenant=Limits(concurrent_requests=9, tokens_per_month=9)).admit().headers() == {}
    desk = Desk(tenant=Limits(requests_per_minute=7), now_s=1000.25)
    assert desk.admit().headers() == {
        "x-ratelimit-limit-requests": "7",
        "x-ratelimit-remaining-requests": "6",
        "x-ratelimit-reset-requests": "1m1s",
    }
    desk.now_s += 59
    lease = desk.admit()
    desk.now_s += 60.74
    assert lease.headers()["x-ratelimit-reset-requests"] == "10ms"
    assert lease.headers()["x-ratelimit-remaining-requests"] == "6"
    desk.now_s += 1
    assert lease.headers()["x-ratelimit-reset-requests"] == "0ms"


@pytest.mark.parametrize(
    ("moment", "first", "following"),
    [
        ("2026-05-31T23:59:59.999999+00:00", "2026-05-01", "2026-06-01"),
        ("2026-06-01T00:30:00+01:00", "2026-05-01", "2026-06-01"),
        ("2024-02-29T12:00:00+00:00", "2024-02-01", "2024-03-01"),
        ("2038-12-31T00:00:00+00:00", "2038-12-01", "2039-01-01"),
    ],
)
def test_months_are_those_of_utc(moment: str, first: str, following: str) -> None:
    month = month_of(datetime.fromisoformat(moment))
    assert month == datetime.fromisoformat(first).replace(tzinfo=UTC)
    assert month_after(month) == datetime.fromisoformat(following).replace(tzinfo=UTC)


def test_accounts_of_those_who_left_are_forgotten_and_no_others() -> None:
    accounts = Accounts(max_accounts=10)
    kept = accounts.of("key_kept", 0.0)
    kept.in_flight = 1
    for index in range(1000):
        accounts.of(f"key_{index}", float(index)).requests.take(index, 1)
    assert accounts.of("key_kept", 1000.0) is kept
    assert len(accounts) < 250
    assert accounts.of("key_999", 1000.0).requests.total(1000.0) == 1


COUNTS = st.one_of(st.none(), st.integers(0, 12))
TOKENS = st.one_of(st.none(), st.integers(0, 300))
LIMITS = st.builds(
    Limits,
    requests_per_minute=COUNTS,
    concurrent_requests=COUNTS,
    tokens_per_minute=TOKENS,
    tokens_per_month=st.one_of(st.none(), st.integers(0, 3000)),
)


class LimitsMachine(RuleBasedStateMachine):
    """Against a model that remembers every admission with its moment."""

    @initialize(tenant=LIMITS, key=LIMITS)
    def begin(self, tenant: Limits, key: Limits) -> None:
        self.desk = Desk(tenant=tenant, key=key)
        self.admitted: list[float] = []
        self.taken: dict[LimitReservation, list[tuple[float, int]]] = {}
        """When each reserved how much, and what of it counts: what was reserved or, once settled, used."""
        self.running: list[LimitReservation] = []
        self.reserved: dict[LimitReservation, int] = {}
        self.billed = 0
        self.ends = 0

    @rule(seconds=st.one_of(st.floats(0, 3), st.floats(0, 90)))
    def wait(self, seconds: float) -> None:
        self.desk.now_s += seconds

    @rule(tokens=st.integers(1, 120), is_open=st.booleans())
    def ask(self, tokens: int, is_open: bool) -> None:
        try:
            lease = self.desk.admit(least=1)
        except RateLimitError as error:
            self._come_again(error.retry_after_s)
            return
        before = self.desk.accounts[0].reserved
        try:
            lease.reserve(1, tokens, is_open=is_open)
        except RateLimitError:
            lease.end()
            return
        self.running.append(lease)
        self.reserved[lease] = self.desk.accounts[0].reserved - before
        assert 1 <= self.reserved[lease] <= tokens
        self.admitted.append(self.desk.now_s)
        self.taken[lease] = [(self.desk.now_s, self.reserved[lease])]

    @precondition(lambda self: self.running)
    @rule(data=st.data(), more=st.integers(0, 60))
    def grow(self, data: Any, more: int) -> None:
        lease = self.running[data.draw(st.integers(0, len(self.running) - 1))]
        used = [account.used(self.desk.now_s) for account in self.desk.accounts]
        has_room = all(
            getattr(limits, name) is None or counts[name] + more <= getattr(limits, name)
            for counts, limits in zip(used, (self.desk.tenant, self.desk.key), strict=True)
            for name in ("tokens_per_minute", "tokens_per_month")
        )
        assert lease.grow(self.reserved[lease] + more) == (has_room or more == 0)
        if has_room:
            self.reserved[lease] += more
            self.taken[lease].append((self.desk.now_s, more))

    def _come_again(self, wait_s: float | None) -> None:
        """Whoever comes after the time told is let in by the rates; whoever is told not to, never is."""
        self.desk.now_s += 1e6 if wait_s is None else wait_s
        try:
            lease = self.desk.admit(least=1)
        except RateLimitError:
            lasting = {"concurrent_requests", "tokens_per_month"}
            assert self.desk.refused[-1] in lasting or wait_s is None
        else:
            assert wait_s is not None
            self.admitted.append(self.desk.now_s)
            lease.end()

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def settle(self, data: Any) -> None:
        lease = self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))
        used = data.draw(st.integers(0, self.reserved[lease]))
        self.ends += 1
        for _ in range(2):
            lease.settle(f"use_{self.ends}", used, NOON)
        left = used
        for place, (moment, reserved) in enumerate(self.taken[lease]):
            self.taken[lease][place] = (moment, min(left, reserved))
            left -= min(left, reserved)
        self.billed += used
        for _ in range(2):
            lease.end()

    @precondition(lambda self: self.running)
    @rule()
    def fail(self) -> None:
        lease = self.running.pop()
        lease.end()
        self.taken[lease] = []

    @invariant()
    def never_more_than_the_limit(self) -> None:
        now_s = self.desk.now_s
        requests = sum(now_s - moment < 60 for moment in self.admitted)
        taken = [each for takes in self.taken.values() for each in takes]
        tokens = sum(count for moment, count in taken if now_s - moment < 60)
        for account, limits in zip(self.desk.accounts, (self.desk.tenant, self.desk.key), strict=True):
            used = account.used(now_s)
            assert used["requests_per_minute"] >= requests
            assert used["tokens_per_minute"] >= tokens
            assert used["concurrent_requests"] == len(self.running)
            reserved = sum(self.reserved[lease] for lease in self.running)
            assert used["tokens_per_month"] == self.billed + reserved
            for name, count in used.items():
                limit = getattr(limits, name)
                assert count >= 0
                assert limit is None or count <= limit

    @invariant()
    def headers_tell_the_truth(self) -> None:
        if self.running:
            headers = self.running[0].headers()
            for kind in ("requests", "tokens"):
                limits = [getattr(limit, f"{kind}_per_minute") for limit in (self.desk.tenant, self.desk.key)]
                given = [limit for limit in limits if limit is not None]
                used = self.desk.accounts[0].used(self.desk.now_s)[f"{kind}_per_minute"]
                expected = str(min(given) - used) if given else None
                assert headers.get(f"x-ratelimit-remaining-{kind}") == expected


LimitsMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestLimitsMachine = LimitsMachine.TestCase
