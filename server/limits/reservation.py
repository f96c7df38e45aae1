"""A request's part of the limits of its tenant and key: taken before it runs, settled when it ends.

The decision is a comparison of sums, so a refusal is cheap. If several limits refuse, the error tells the longest wait.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime

from manylora.errors import ManyloraError, QuotaExceededError, RateLimitError
from manylora.server.limits.accounts import LimitedAccount, TakenAt, Window

NEAR_TOKENS = 256
"""An answer without a bound that has at most these reserved tokens left will soon need more."""
BUSY_S = 1.0
"""Retry-After in seconds where a limit becomes free only when other requests end."""
_Refusal = tuple[str, RateLimitError]
"""Name of the limit that refuses, and the error."""


class LimitReservation:
    """One request's part of the limits of its tenant and key, from its admission to its end.

    Its owner must call `end`, whatever happens; each of the other steps may be left out.
    """

    def __init__(self) -> None:
        self.accounts: Sequence[LimitedAccount] = ()
        """The accounts from which it takes."""
        self._monotonic: Callable[[], float] = lambda: 0.0
        self._on_refusal: Callable[[str], None] = lambda _: None
        self._request_marks: tuple[TakenAt, ...] | None = None
        """For `Window.give_back` of each account; None where the request does not count."""
        self._reserved: int | None = None
        self._is_open = False
        self._taken: dict[tuple[TakenAt, ...], int] = {}
        """Reserved tokens by their marks for `Window.give_back` of each account, oldest first."""
        self.admitted_s = 0.0

    def admit(
        self,
        accounts: Sequence[LimitedAccount],
        monotonic: Callable[[], float],
        on_refusal: Callable[[str], None],
        tokens: int,
        *,
        is_counted: bool = True,
    ) -> None:
        """Count one request, if there is room for it and for `tokens`.

        Args:
            accounts: The accounts with their limits.
            monotonic: Seconds that never jump.
            on_refusal: Called with the name of the limit that is reached.
            tokens: Least tokens of the request; they are not reserved yet.
            is_counted: False only asks whether there is room.

        Raises:
            RateLimitError: A limit is reached; nothing was counted.
        """
        self.accounts = accounts
        self._monotonic = monotonic
        self._on_refusal = on_refusal
        self.admitted_s = now_s = monotonic()
        self._check(now_s, tokens, is_new=True)
        if not is_counted:
            return
        self._request_marks = tuple(limited.account.requests.take(now_s, 1) for limited in accounts)
        for limited in accounts:
            limited.account.in_flight += 1

    def reserve(self, least: int, most: int, *, is_open: bool) -> None:
        """Reserve tokens before they are used.

        Args:
            least: Fewest tokens with which the request can run.
            most: Most tokens that it can use.
            is_open: True if the client set no bound: then at most what the limits allow is reserved, and `grow`
                reserves more later.

        Raises:
            RateLimitError: There is no room now, or never; the request does not count any more.
        """
        tokens = self.wanted(least, most, is_open=is_open)
        self._is_open = is_open
        now_s = self._monotonic()
        with self.refusing():
            self._check(now_s, tokens, is_new=False)
        self._reserved = 0
        self._take(now_s, tokens)

    def wanted(self, least: int, most: int, *, is_open: bool) -> int:
        """Number of tokens that `reserve` takes."""
        limits = [limited.limits for limited in self.accounts]
        bounds = [
            bound for each in limits for bound in (each.tokens_per_minute, each.tokens_per_month)
        ]
        return (
            max(least, min([most, *(bound for bound in bounds if bound is not None)]))
            if is_open
            else most
        )

    def check_minute(self) -> None:
        """Refuse to go on once the tokens of the minute are used up.

        Raises:
            RateLimitError: They are; the request does not count any more.
        """
        now_s = self._monotonic()
        refusals = [
            _of_window(limited, "tokens_per_minute", limited.account.tokens, 1, now_s)
            for limited in self.accounts
        ]
        with self.refusing():
            self._raise_longest(refusals)

    @contextmanager
    def refusing(self) -> Iterator[None]:
        """A block that may refuse the request by an error: then it does not count in its minute."""
        try:
            yield
        except ManyloraError:
            for limited, mark in zip(self.accounts, self._request_marks or (), strict=False):
                limited.account.requests.give_back(mark, 1)
            raise

    def spend(self, tokens: int) -> None:
        """Count tokens in the minute that were used already and are not billed."""
        now_s = self._monotonic()
        for limited in self.accounts:
            limited.account.tokens.take(now_s, tokens)

    def grow(self, tokens: int) -> bool:
        """Reserve more while the request runs.

        Args:
            tokens: What the request needs in all.

        Returns:
            True if it has them now; False if a limit has no room, or if the request has ended.
        """
        if self._reserved is None:
            return False
        more = tokens - self._reserved
        if self._is_open and more > -NEAR_TOKENS:
            now_s = self._monotonic()
            for limited in self.accounts:
                limited.account.foresee(limited.limits, now_s, max(0, more))
        if more > 0:
            now_s = self._monotonic()
            try:
                self._check(now_s, more, is_new=False)
            except RateLimitError:
                return False
            self._take(now_s, more)
        return True

    def settle(self, ledger_id: str, tokens: int, at: datetime) -> None:
        """Replace the reserved tokens by the used ones; later calls do nothing.

        Args:
            ledger_id: Id of the usage event, which is recorded already.
            tokens: Billed tokens.
            at: The event's time.
        """
        if self._reserved is None:
            return
        if tokens > self._reserved:
            self._take(self._monotonic(), tokens - self._reserved)
        self._give_back(self._reserved - tokens)
        for limited in self.accounts:
            limited.account.settled(ledger_id, tokens, at)

    def end(self) -> None:
        """Give back what the request still holds; later calls do nothing."""
        if self._reserved is not None:
            self._give_back(self._reserved)
        if self._request_marks is not None:
            for limited in self.accounts:
                limited.account.in_flight -= 1
            self._request_marks = None

    def headers(self) -> dict[str, str]:
        """Headers `x-ratelimit-*` as OpenAI writes them, of the holder that has less left; none without a limit."""
        now_s = self._monotonic()
        headers = {}
        for kind in ("requests", "tokens"):
            left = []
            for limited in self.accounts:
                limit: int | None = getattr(limited.limits, f"{kind}_per_minute")
                window: Window = getattr(limited.account, kind)
                if limit is not None:
                    left.append((max(0, limit - window.total(now_s)), limit, window))
            if left:
                remaining, limit, window = min(left, key=lambda entry: entry[:2])
                headers[f"x-ratelimit-limit-{kind}"] = str(limit)
                headers[f"x-ratelimit-remaining-{kind}"] = str(remaining)
                headers[f"x-ratelimit-reset-{kind}"] = _duration(
                    window.wait_s(now_s, window.total(now_s))
                )
        return headers

    def _take(self, now_s: float, tokens: int) -> None:
        marks = tuple(limited.account.tokens.take(now_s, tokens) for limited in self.accounts)
        for limited in self.accounts:
            limited.account.reserved += tokens
        self._taken[marks] = self._taken.get(marks, 0) + tokens
        self._reserved = (self._reserved or 0) + tokens

    def _give_back(self, tokens: int) -> None:
        """Give back this number of the reserved tokens, the latest first; nothing is reserved after that."""
        for limited in self.accounts:
            limited.account.reserved -= self._reserved or 0
        for marks, taken in reversed(self._taken.items()):
            part = min(tokens, taken)
            tokens -= part
            for limited, mark in zip(self.accounts, marks, strict=True):
                limited.account.tokens.give_back(mark, part)
        self._reserved = None

    def _check(self, now_s: float, tokens: int, *, is_new: bool) -> None:
        self._raise_longest(
            [
                each
                for limited in self.accounts
                for each in _refusals(limited, now_s, tokens, is_new)
            ]
        )

    def _raise_longest(self, found: Sequence[_Refusal | None]) -> None:
        refusals = [refusal for refusal in found if refusal is not None]
        if refusals:
            limit, error = max(refusals, key=lambda refusal: refusal[1].retry_after_s or math.inf)
            self._on_refusal(limit)
            raise error


def _refusals(
    limited: LimitedAccount, now_s: float, tokens: int, is_new: bool
) -> list[_Refusal | None]:
    limits = limited.limits
    account = limited.account
    found = list[_Refusal | None]()
    if is_new:
        found.append(_of_window(limited, "requests_per_minute", account.requests, 1, now_s))
        if limits.concurrent_requests is not None and not account.has_slot(
            now_s, limits.concurrent_requests
        ):
            wait_s = BUSY_S if limits.concurrent_requests else None
            found.append(
                _refusal(limited, "concurrent_requests", "That many are running already.", wait_s)
            )
    if tokens or is_new:
        found.append(
            _of_window(limited, "tokens_per_minute", account.tokens, max(tokens, 1), now_s)
        )
    if tokens:
        found.append(_of_month(limited, tokens, now_s))
    return found


def _of_window(
    limited: LimitedAccount, name: str, window: Window, amount: int, now_s: float
) -> _Refusal | None:
    limit: int | None = getattr(limited.limits, name)
    if limit is None or window.has_room(now_s, amount, limit):
        return None
    if amount > limit:
        return _refusal(
            limited, name, f"This request alone may take {amount}: it is always refused.", None
        )
    wait_s = window.wait_s(now_s, window.total(now_s) + amount - limit)
    why = f"{window.total(now_s)} were used in the last minute, and this request may take {amount}."
    return _refusal(limited, name, why, wait_s)


def _of_month(limited: LimitedAccount, tokens: int, now_s: float) -> _Refusal | None:
    limit = limited.limits.tokens_per_month
    account = limited.account
    if limit is None or account.has_month(now_s, tokens, limit):
        return None
    used, reserved = account.month_parts()
    why = f"{used} are used and the request takes up to {tokens}."
    if used + tokens <= limit:
        why = f"{why} {reserved} are reserved by requests that run."
        return _refusal(limited, "tokens_per_month", why, BUSY_S)
    message = f"The {limited.holder}'s limit tokens_per_month is {limit}. {why} The count restarts next month (UTC)."
    return "tokens_per_month", QuotaExceededError(message)


def _refusal(limited: LimitedAccount, name: str, why: str, wait_s: float | None) -> _Refusal:
    again = "" if wait_s is None else f" Try again in {math.ceil(wait_s)} s."
    message = (
        f"The {limited.holder}'s limit {name} is {getattr(limited.limits, name)}. {why}{again}"
    )
    return name, RateLimitError(message, retry_after_s=wait_s)


def _duration(seconds: float) -> str:
    """As OpenAI writes it: `20ms`, `1s`, `6m0s`; rounded up."""
    if seconds < 1:
        return f"{math.ceil(1000 * seconds)}ms"
    minutes, rest = divmod(math.ceil(seconds), 60)
    return f"{minutes}m{rest}s" if minutes else f"{rest}s"
