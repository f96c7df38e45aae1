"""This process's part of one limit that holds across servers: what it has, what it needs, and what it gives back.

While requests keep coming it asks for more than they need, so they do not wait. What nobody needed for about a second
goes back.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from manylora.registry.access.limit_leases import (
    AHEAD_SHARE,
    MINUTELY,
    SLOT_US,
    Kind,
    LeaseAnswer,
    LeaseAsk,
)
from manylora.registry.cache import MAX_OUTAGE_S
from manylora.registry.limits import Limits
from manylora.server.limits.accounts import SPAN_S, Mark, Window

if TYPE_CHECKING:
    from manylora.server.limits.shared_accounts import LeasedAccounts

TICK_S = 0.1
LEASE_S = 1.0
"""What was fetched ahead goes back when there was no request for so long."""
BURST_SHARE = 4
"""A process takes at most this part of a limit ahead."""
GROW_TOKENS = 256
"""Tokens fetched ahead for answers without a bound, before they need them; at 100 tokens per second, 2.5 seconds."""
MIN_GROW_TOKENS = 16
RENEW_S = {"concurrent_requests": 1.5}
RENEW_OTHERS_S = 20.0


class Lease(Window):
    """This process's part of one limit; without a limit, what it has taken in the last minute.

    `amount` is what it holds; running requests use `in_use` of that, and the rest is spare. Tokens and requests per
    minute leave `amount` when they are taken, tokens of a month when they are used.
    """

    def __init__(
        self,
        accounts: LeasedAccounts,
        holder_id: str,
        kind: Kind,
        in_use: Callable[[], int] = lambda: 0,
    ) -> None:
        super().__init__()
        self.kind: Kind = kind
        self.limit: int | None = None
        self.amount = self._told = 0
        self.needs: list[int] = []
        """Of requests that wait; 0 only asks how the limit stands."""
        self.returns: list[tuple[int, LeaseAnswer]] = []
        """What was taken and not used, with `seen` of then."""
        self.growth = 0
        """What answers that go on need next."""
        self.unmoved: deque[tuple[float, int]] = deque()
        """Used tokens of a month that the database does not have yet, with the time of their use."""
        self.seen: LeaseAnswer | None = None
        """The last answer about this limit."""
        self.accounts = accounts
        self._holder_id = holder_id
        self._in_use = in_use
        self._seen_s = self._fresh_s = self._valid_s = self._keep_until_s = -math.inf
        self._demand, self._demand_s = 0.0, -math.inf

    @property
    def spare(self) -> int:
        """What requests may take; below 0 if they use more than the process holds."""
        return self.amount - self._in_use()

    @property
    def _held(self) -> int:
        """What the database counts for this process."""
        return (
            0
            if self.limit is None
            else max(0, self.amount) + sum(tokens for _, tokens in self.unmoved)
        )

    def follow(self, limits: Limits) -> None:
        """Note the limit that counts now. Nothing is spent that was taken from another."""
        limit = getattr(limits, self.kind)
        if limit != self.limit:
            self.limit, self.seen, self._valid_s = limit, None, -math.inf
            self._keep_until_s = -math.inf
            self.accounts.activate(self)

    def has(self, amount: int, now_s: float) -> bool:
        """Whether so much may be taken now."""
        return amount <= self.spare and now_s < self._valid_s

    def has_room(self, now_s: float, amount: int, limit: int) -> bool:
        """Whether this process holds so much."""
        return amount <= limit and self.has(amount, now_s)

    def take(self, now_s: float, amount: int) -> Mark:
        """Take from what the process holds; returns what the database said last, for `give_back`."""
        if self.limit is None:
            return super().take(now_s, amount)
        self.amount -= amount
        return self.seen

    def give_back(self, mark: Mark, amount: int) -> None:
        """Give back what was taken and not used."""
        if not isinstance(mark, LeaseAnswer):
            super().give_back(mark, amount)
        elif amount:
            self.returns.append((amount, mark))
            self.accounts.activate(self)

    def wait_s(self, now_s: float, amount: int) -> float:
        """Seconds until the sum of now is smaller by `amount`, if nothing is added."""
        if self.limit is None:
            return super().wait_s(now_s, amount)
        return max(TICK_S, amount * SPAN_S / max(self.limit, 1))

    def is_hopeless(self, amount: int, now_s: float) -> bool:
        """Whether asking for so much is useless: it is more than the limit, or the last answer is fresh."""
        is_known = (
            now_s < min(self._valid_s, self._fresh_s) and self.spare + self._left(now_s) < amount
        )
        return is_known or amount > (self.limit or 0)

    def expect(self, amount: int, now_s: float) -> None:
        """Count demand."""
        self._demand, self._demand_s = self._demand_at(now_s) + amount, now_s
        self.accounts.activate(self)

    def grow(self, amount: int, now_s: float) -> None:
        """Answers without a bound go on: so much now, and more later."""
        self.expect(amount, now_s)
        self._keep_until_s = now_s + LEASE_S
        most = max((self.limit or 0) // BURST_SHARE, MIN_GROW_TOKENS)
        growth = min(max(GROW_TOKENS, int(self._demand)), most)
        if self.spare < growth / 2 and self._left(now_s) >= 1:
            self.growth = growth
            self.accounts.hurry()

    def total(self, now_s: float) -> int:
        """What counts against the limit now, as far as it is known here."""
        if self.limit is None and self.kind in MINUTELY:
            return super().total(now_s)
        return (
            max(0, math.ceil(self._used(now_s) - self.spare - 1e-6)) if self.seen is not None else 0
        )

    def ask(self, now_s: float) -> LeaseAsk | None:
        """What to tell and to ask the database now, if anything. What it gives back leaves `amount`."""
        while self.unmoved and self.unmoved[0][0] < self.accounts.usage.unmoved_since:
            self.unmoved.popleft()
        spare, aim = self.spare, self._aim(now_s)
        if self.limit is None:
            is_due, back = bool(self.needs or self._told), spare
        else:
            renew_s = LEASE_S if self._held < self._told else RENEW_S.get(self.kind, RENEW_OTHERS_S)
            is_old = self._told > 0 and now_s >= self._seen_s + renew_s
            is_kept = spare <= 2 * aim or now_s < self._keep_until_s
            back = min(spare, 0) if is_kept else spare - aim
            is_due = bool(
                self.needs or self.growth or self.returns or spare < aim / 2 or is_old or back
            )
        if not is_due:
            return None
        self.amount = self.amount - back if self.limit is not None else 0
        if self.growth:
            self.needs.append(max(0, min(self.growth, spare + self._left(now_s))))
        needs, returns, self.needs, self.returns = self.needs, self.returns, [], []
        self.growth, self._fresh_s = 0, -math.inf
        return LeaseAsk(
            holder_id=self._holder_id,
            kind=self.kind,
            limit=self.limit,
            held=self._held,
            spare=self.spare,
            back=back,
            returns=returns,
            needs=needs,
            ahead=aim,
        )

    def take_answer(self, asked_s: float, ask: LeaseAsk, answer: LeaseAnswer) -> None:
        """Note what the database said."""
        self._told = ask.held + answer.granted
        if ask.limit == self.limit:
            self.amount += answer.granted
            if any(ask.needs):  # those who wait for it are only about to run
                self._keep_until_s = asked_s + LEASE_S
            self.seen, self._seen_s, self._fresh_s = answer, asked_s, asked_s + TICK_S
            self._valid_s = asked_s + (
                SLOT_US / 1e6 if self.kind == "concurrent_requests" else MAX_OUTAGE_S
            )

    def take_failure(self, ask: LeaseAsk, *, is_in_doubt: bool) -> None:
        """Tell it again. In doubt, what was given back is lost until the limit refills: it must not count twice."""
        self._told = max(1, self._told)
        if not is_in_doubt:
            self.amount += ask.back
            self.returns += ask.returns

    def is_empty(self, now_s: float) -> bool:
        """Whether there is nothing to do until somebody asks for something."""
        return self._held == self._told == 0 and now_s >= self._demand_s + LEASE_S

    def _used(self, now_s: float) -> float:
        """Of the limit, by all servers, with what they hold."""
        used = self.seen.used if self.seen is not None else 0.0
        drained = (
            (self.limit or 0) / SPAN_S * (now_s - self._seen_s)
            if self.kind in MINUTELY and used
            else 0.0
        )
        return max(0.0, used - drained)

    def _left(self, now_s: float) -> int:
        return math.floor((self.limit or 0) - self._used(now_s) + 1e-6)

    def _demand_at(self, now_s: float) -> float:
        """The demand of the last seconds: halved in each, so it is that of 1.4 seconds where it is steady."""
        return float(self._demand * 0.5 ** (now_s - self._demand_s))

    def _aim(self, now_s: float) -> int:
        """How much spare the process should have: what it needs in about a second, but only a part of what is left."""
        if self.limit is None or now_s >= min(self._valid_s, self._demand_s + LEASE_S):
            return 0
        most = max(0, self.spare + self._left(now_s)) // AHEAD_SHARE
        return min(int(self._demand_at(now_s)), self.limit // BURST_SHARE, most)
