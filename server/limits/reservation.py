"""A request's part of the limits of its tenant and key: taken before it runs, settled when it ends.

The decision is a comparison of sums, so a refusal is cheap. If several limits refuse, the error tells the longest wait.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime

from manylora.errors import ManyloraError, QuotaExceededError, RateLimitError
from manylora.registry.limits import LimitKind
from manylora.server.limits.accounts import LimitedAccount, LimitUse, TakenAt

NEAR_TOKENS = 256
"""An answer without a bound that has at most these reserved tokens left will soon need more."""
_HEADERS: Mapping[str, LimitKind] = {
    "requests": "requests_per_minute",
    "tokens": "tokens_per_minute",
}


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
        """For `give_back` of the requests of each account; None where the request does not count."""
        self._reserved: int | None = None
        self._is_open = False
        self._taken: dict[tuple[TakenAt, ...], int] = {}
        """Reserved tokens by their marks for `give_back` of each account, oldest first."""
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
        self._check(
            now_s,
            {
                "requests_per_minute": 1,
                "concurrent_requests": 1,
                "tokens_per_minute": max(tokens, 1),
                "tokens_per_month": tokens,
            },
        )
        if is_counted:
            self._request_marks = tuple(
                use.take(now_s, 1) for use in self._uses("requests_per_minute")
            )
            for use in self._uses("concurrent_requests"):
                use.take(now_s, 1)

    def reserve(self, tokens: int, *, is_open: bool) -> None:
        """Reserve tokens before they are used.

        Args:
            tokens: All that the request can use, or `wanted` of an open one.
            is_open: True if the client set no bound: then `grow` reserves more later.

        Raises:
            RateLimitError: There is no room now, or never; the request does not count any more.
        """
        self._is_open = is_open
        now_s = self._monotonic()
        with self.refusing():
            self._check(now_s, {"tokens_per_minute": tokens, "tokens_per_month": tokens})
        self._take(now_s, tokens)

    def wanted(self, least: int, most: int) -> int:
        """Number of tokens that a request without a bound reserves: at most `most`, and what the limits allow."""
        limits = [limited.limits for limited in self.accounts]
        bounds = [
            bound for each in limits for bound in (each.tokens_per_minute, each.tokens_per_month)
        ]
        return max(least, min([most, *(bound for bound in bounds if bound is not None)]))

    def check_minute(self) -> None:
        """Refuse to go on once the tokens of the minute are used up.

        Raises:
            RateLimitError: They are; the request does not count any more.
        """
        with self.refusing():
            self._check(self._monotonic(), {"tokens_per_minute": 1})

    @contextmanager
    def refusing(self) -> Iterator[None]:
        """A block that may refuse the request by an error: then it does not count in its minute."""
        try:
            yield
        except ManyloraError:
            uses = self._uses("requests_per_minute")
            for use, mark in zip(uses, self._request_marks or (), strict=False):
                use.give_back(mark, 1)
            raise

    def spend(self, tokens: int) -> None:
        """Count tokens in the minute that were used already and are not billed."""
        now_s = self._monotonic()
        for use in self._uses("tokens_per_minute"):
            use.take(now_s, tokens)

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
                limited.account["tokens_per_minute"].foresee(limited.limits, now_s, max(0, more))
                limited.account["tokens_per_month"].foresee(limited.limits, now_s, max(0, more))
        if more > 0:
            now_s = self._monotonic()
            try:
                self._check(now_s, {"tokens_per_minute": more, "tokens_per_month": more})
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
        for use in self._uses("tokens_per_month"):
            use.settle(ledger_id, tokens, at)

    def end(self) -> None:
        """Give back what the request still holds; later calls do nothing."""
        if self._reserved is not None:
            self._give_back(self._reserved)
        if self._request_marks is not None:
            for use in self._uses("concurrent_requests"):
                use.give_back(None, 1)
            self._request_marks = None

    def headers(self) -> dict[str, str]:
        """Headers `x-ratelimit-*` as OpenAI writes them, of the holder that has less left; none without a limit."""
        now_s = self._monotonic()
        headers = {}
        for name, kind in _HEADERS.items():
            left = [
                (max(0, limit - limited.account[kind].total(now_s)), limit, limited.account[kind])
                for limited in self.accounts
                if (limit := limited.limit(kind)) is not None
            ]
            if left:
                remaining, limit, use = min(left, key=lambda entry: entry[:2])
                headers[f"x-ratelimit-limit-{name}"] = str(limit)
                headers[f"x-ratelimit-remaining-{name}"] = str(remaining)
                reset_s = use.wait_s(now_s, use.total(now_s))
                headers[f"x-ratelimit-reset-{name}"] = _duration(reset_s)
        return headers

    def _uses(self, kind: LimitKind) -> list[LimitUse]:
        return [limited.account[kind] for limited in self.accounts]

    def _take(self, now_s: float, tokens: int) -> None:
        marks = tuple(use.take(now_s, tokens) for use in self._uses("tokens_per_minute"))
        for use in self._uses("tokens_per_month"):
            use.take(now_s, tokens)
        self._taken[marks] = self._taken.get(marks, 0) + tokens
        self._reserved = (self._reserved or 0) + tokens

    def _give_back(self, tokens: int) -> None:
        """Give back this number of the reserved tokens, the latest first; nothing is reserved after that."""
        for use in self._uses("tokens_per_month"):
            use.give_back(None, self._reserved or 0)
        for marks, taken in reversed(self._taken.items()):
            part = min(tokens, taken)
            tokens -= part
            for use, mark in zip(self._uses("tokens_per_minute"), marks, strict=True):
                use.give_back(mark, part)
        self._reserved = None

    def _check(self, now_s: float, amounts: Mapping[LimitKind, int]) -> None:
        """Return if there is room for these amounts; raises the error of the limit with the longest wait."""
        refusals = [
            (error.retry_after_s or math.inf, kind, error)
            for limited in self.accounts
            for kind, amount in amounts.items()
            if amount and (error := _refusal(limited, kind, amount, now_s)) is not None
        ]
        if refusals:
            _, kind, error = max(refusals, key=lambda refusal: refusal[0])
            self._on_refusal(kind)
            raise error


def _refusal(
    limited: LimitedAccount, kind: LimitKind, amount: int, now_s: float
) -> RateLimitError | None:
    """The error where an account has no room for an amount of one limit."""
    limit = limited.limit(kind)
    use = limited.account[kind]
    if limit is None or use.has_room(now_s, amount, limit):
        return None
    what = f"The {limited.holder}'s limit {kind} is {limit}."
    total = use.total(now_s)
    if kind == "tokens_per_month":
        what = f"{what} {use.billed} are used and the request takes up to {amount}."
        if use.billed + amount > limit:
            return QuotaExceededError(f"{what} The count restarts next month (UTC).")
        what = f"{what} {max(0, total - use.billed)} are reserved by requests that run."
    elif amount > limit:
        what = f"{what} This request alone may take {amount}: it is always refused."
        return RateLimitError(what, retry_after_s=None)
    elif kind == "concurrent_requests":
        what = f"{what} That many are running already."
    else:
        what = f"{what} {total} were used in the last minute, and this request may take {amount}."
    wait_s = use.wait_s(now_s, total + amount - limit)
    return RateLimitError(f"{what} Try again in {math.ceil(wait_s)} s.", retry_after_s=wait_s)


def _duration(seconds: float) -> str:
    """As OpenAI writes it: `20ms`, `1s`, `6m0s`; rounded up."""
    if seconds < 1:
        return f"{math.ceil(1000 * seconds)}ms"
    minutes, rest = divmod(math.ceil(seconds), 60)
    return f"{minutes}m{rest}s" if minutes else f"{rest}s"
