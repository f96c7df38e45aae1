"""Limits as arithmetic, on a clock that stands until it is told to move."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from manylora.errors import QuotaExceededError, RateLimitError
from manylora.registry.db.clock import month_after, month_of
from manylora.registry.limits import UNLIMITED, Limits
from manylora.server.errors import error_response
from manylora.server.limits import accounts as accounts_module
from manylora.server.limits.accounts import Account, Accounts, LimitedAccount, Window
from manylora.server.limits.reservation import LimitReservation

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

    def admit(self, least: int = 0, lease: LimitReservation | None = None) -> LimitReservation:
        lease = lease or LimitReservation()
        shares = [
            LimitedAccount("tenant", "ten_1", self.accounts[0], self.tenant),
            LimitedAccount("key", "key_1", self.accounts[1], self.key),
        ]
        lease.admit(shares, lambda: self.now_s, self.refused.append, least)
        return lease


def test_a_window_counts_for_sixty_to_sixty_one_seconds() -> None:
    for start in (1000.0, 1000.5, 1000.999):
        window = Window()
        window.take(start, 3)
        assert window.total(start + 60) == 3
        assert window.wait_s(start, 3) <= 61
        assert window.total(start + window.wait_s(start, 3)) == 0
        assert window.total(start + 61) == 0


def retry_headers(error: RateLimitError) -> dict[str, str]:
    headers = error_response(error).headers
    return {name: value for name, value in headers.items() if "retry" in name}


def test_the_month_is_used_up_for_good_but_not_what_running_requests_reserve() -> None:
    desk = Desk(tenant=Limits(tokens_per_month=100))
    past, running = desk.admit(), desk.admit()
    past.reserve(60, 60, is_open=False)
    past.settle("use_1", 50, NOON)
    running.reserve(40, 40, is_open=False)
    with pytest.raises(RateLimitError, match="40 are reserved") as busy:
        desk.admit(least=11)
    assert (busy.value.code, error_response(busy.value).headers["retry-after"]) == (
        "rate_limit_exceeded",
        "1",
    )
    with pytest.raises(QuotaExceededError) as used_up:
        desk.admit(least=51)
    assert (used_up.value.code, retry_headers(used_up.value)) == (
        "insufficient_quota",
        {"x-should-retry": "false"},
    )
    running.settle("use_2", 1, NOON)
    desk.admit(least=49)


@pytest.mark.parametrize(
    "limits", [{"requests_per_minute": 0}, {"concurrent_requests": 0}, {"tokens_per_minute": 0}]
)
def test_a_limit_of_nothing_lets_nothing_pass_and_says_not_to_retry(limits: dict[str, int]) -> None:
    with pytest.raises(RateLimitError) as refused:
        Desk(tenant=Limits(**limits)).admit(least=1)
    assert retry_headers(refused.value) == {"x-should-retry": "false"}
    assert refused.value.code == "rate_limit_exceeded"


def test_an_answer_without_a_bound_reserves_no_more_than_the_limits_allow() -> None:
    desk = Desk(tenant=Limits(tokens_per_minute=100), key=Limits(tokens_per_month=80))
    desk.admit().reserve(11, 1034, is_open=True)
    assert desk.accounts[0].reserved == 80


def test_of_a_reservation_that_grew_the_first_part_is_used_first() -> None:
    desk = Desk()
    lease = desk.admit()
    lease.reserve(11, 40, is_open=True)
    desk.now_s += 30
    assert lease.grow(70)
    lease.settle("use_1", 60, NOON)
    lease.end()
    desk.now_s += 31
    assert desk.accounts[0].used(desk.now_s)["tokens_per_minute"] == 20


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


def test_accounts_of_those_who_left_are_forgotten_and_no_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(accounts_module, "MAX_ACCOUNTS", 10)
    accounts = Accounts()
    kept = accounts.of("key_kept", 0.0)
    kept.in_flight = 1
    for index in range(1000):
        accounts.of(f"key_{index}", float(index)).requests.take(index, 1)
    assert accounts.of("key_kept", 1000.0) is kept
    assert len(accounts._accounts) < 250
    assert accounts.of("key_999", 1000.0).requests.total(1000.0) == 1


COUNTS = st.none() | st.integers(0, 6)
TOKENS = st.none() | st.integers(0, 200)
LIMITS = st.builds(
    Limits,
    requests_per_minute=COUNTS,
    concurrent_requests=COUNTS,
    tokens_per_minute=TOKENS,
    tokens_per_month=TOKENS | st.integers(0, 3000),
)


class LimitsMachine(RuleBasedStateMachine):
    """Against a model that remembers every admission with its moment."""

    @initialize(tenant=LIMITS, key=LIMITS)
    def begin(self, tenant: Limits, key: Limits) -> None:
        self.desk = Desk(tenant=tenant, key=key)
        self.limits = {"tenant": tenant, "key": key}
        self.admitted: list[float] = []
        self.taken: dict[LimitReservation, list[tuple[float, int]]] = {}
        """When each reserved how much, and what of it counts: what was reserved or, once settled, used."""
        self.running: list[LimitReservation] = []
        self.reserved: dict[LimitReservation, int] = {}
        self.billed = 0
        self.ends = 0

    def used(self) -> dict[str, int]:
        """What counts now; in the minute, a second does until all of it is 60 seconds old."""
        oldest = math.floor(self.desk.now_s) - 60
        taken = [each for takes in self.taken.values() for each in takes]
        return {
            "requests_per_minute": sum(math.floor(moment) >= oldest for moment in self.admitted),
            "tokens_per_minute": sum(
                count for moment, count in taken if math.floor(moment) >= oldest
            ),
            "concurrent_requests": len(self.running),
            "tokens_per_month": self.billed + sum(self.reserved[lease] for lease in self.running),
        }

    def full(self, tokens: int, *, is_new: bool) -> set[str]:
        """What refuses a request of so many tokens, in the words of the error; nothing where there is room."""
        asked = dict.fromkeys(("tokens_per_minute", "tokens_per_month"), tokens)
        if is_new:
            asked |= dict.fromkeys(("requests_per_minute", "concurrent_requests"), 1)
        used = self.used()
        return {
            f"The {holder}'s limit {name} is {limit}."
            for holder, limits in self.limits.items()
            for name, amount in asked.items()
            if (limit := getattr(limits, name)) is not None and used[name] + amount > limit
        }

    def is_admitted(self, act: Callable[[], object], tokens: int, *, is_new: bool) -> bool:
        """Do it, which must succeed exactly where nothing is full; if it is refused, come again at the time told."""
        full = self.full(tokens, is_new=is_new)
        try:
            act()
        except RateLimitError as error:
            (told,) = [limit for limit in full if error.message.startswith(limit)]
            assert f" {self.desk.refused[-1]} " in told
            self.come_again(error.retry_after_s, tokens, is_new=is_new)
            return False
        assert not full
        return True

    def come_again(self, wait_s: float | None, tokens: int, *, is_new: bool) -> None:
        """The rates have room at the time told, and nothing has before it; who is told none never finds room."""
        end_s = self.desk.now_s + (1e6 if wait_s is None else wait_s)
        self.desk.now_s = max(self.desk.now_s, end_s - 0.01)
        assert self.full(tokens, is_new=is_new)
        if wait_s is None:
            return
        self.desk.now_s = end_s
        full = self.full(tokens, is_new=is_new)
        assert not any("per_minute" in limit or limit.endswith(" is 0.") for limit in full)

    @rule(seconds=st.one_of(st.floats(0, 3), st.floats(0, 90)))
    def wait(self, seconds: float) -> None:
        self.desk.now_s += seconds

    @rule(tokens=st.integers(1, 120), is_open=st.booleans())
    def ask(self, tokens: int, is_open: bool) -> None:
        lease = LimitReservation()
        if not self.is_admitted(lambda: self.desk.admit(1, lease), 1, is_new=True):
            return
        names = ("tokens_per_minute", "tokens_per_month") if is_open else ()
        bounds = [getattr(limits, name) for limits in self.limits.values() for name in names]
        tokens = max(1, min([tokens, *(bound for bound in bounds if bound is not None)]))
        if not self.is_admitted(
            lambda: lease.reserve(1, tokens, is_open=is_open), tokens, is_new=False
        ):
            lease.end()
            return
        self.running.append(lease)
        self.reserved[lease] = tokens
        self.admitted.append(self.desk.now_s)
        self.taken[lease] = [(self.desk.now_s, tokens)]

    @precondition(lambda self: self.running)
    @rule(data=st.data(), more=st.integers(0, 60))
    def grow(self, data: Any, more: int) -> None:
        lease = data.draw(st.sampled_from(self.running))
        full = self.full(more, is_new=False) if more else set()
        assert lease.grow(self.reserved[lease] + more) == (not full)
        if not full:
            self.reserved[lease] += more
            self.taken[lease].append((self.desk.now_s, more))

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
        assert not lease.grow(used + 1)

    @precondition(lambda self: self.running)
    @rule()
    def fail(self) -> None:
        lease = self.running.pop()
        lease.end()
        self.taken[lease] = []

    @invariant()
    def exactly_what_was_taken_counts_and_never_more_than_the_limit(self) -> None:
        used = self.used()
        for account, limits in zip(self.desk.accounts, self.limits.values(), strict=True):
            assert account.used(self.desk.now_s) == used
            bounds = {name: getattr(limits, name) for name in used}
            assert all(
                0 <= used[name] <= bound for name, bound in bounds.items() if bound is not None
            )

    @invariant()
    def headers_tell_the_truth(self) -> None:
        if self.running:
            headers = self.running[0].headers()
            for kind in ("requests", "tokens"):
                given = [getattr(limits, f"{kind}_per_minute") for limits in self.limits.values()]
                tightest = min((limit for limit in given if limit is not None), default=None)
                left = None if tightest is None else tightest - self.used()[f"{kind}_per_minute"]
                for name, expected in (("limit", tightest), ("remaining", left)):
                    assert headers.get(f"x-ratelimit-{name}-{kind}") == (
                        None if expected is None else str(expected)
                    )


LimitsMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=30)
TestLimitsMachine = LimitsMachine.TestCase
