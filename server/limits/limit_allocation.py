"""An allocation: this process's part of one limit that holds across servers; what it has, needs and gives back.

While requests keep coming it asks for more than they need, so they do not wait. What nobody needed for about a second
goes back.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable
from datetime import datetime
from typing import TYPE_CHECKING

from manylora.registry.access.limit_allocations import (
    AHEAD_SHARE,
    MINUTELY,
    SLOT_US,
    AllocationAnswer,
    AllocationRequest,
)
from manylora.registry.cache import MAX_OUTAGE_S
from manylora.registry.limits import LimitKind, Limits
from manylora.server.limits.accounts import BUSY_S, SPAN_S, TakenAt, Window

if TYPE_CHECKING:
    from manylora.registry.usage.ledger import UsageLedger

TICK_S = 0.1
KEEP_S = 1.0
"""Seconds without a request after which amounts that were fetched ahead go back."""
BURST_SHARE = 4
"""A process takes at most this part of a limit ahead."""
GROW_TOKENS = 256
"""Tokens fetched ahead for answers without a bound, before they need them; at 100 tokens per second, 2.5 seconds."""
MIN_GROW_TOKENS = 16
RENEW_S = {"concurrent_requests": 1.5}
RENEW_OTHERS_S = 20.0


class DueAllocations:
    """Allocations that the exchange with the database has to look after. Thread: one event loop.

    Args:
        usage: Says which used tokens are in the database.
        monotonic: Seconds that never jump.
    """

    def __init__(self, usage: UsageLedger, monotonic: Callable[[], float]) -> None:
        self.usage = usage
        self.monotonic = monotonic
        self.allocations: dict[LimitAllocation, None] = {}
        self.is_urgent = False
        """A request waits for the next exchange."""
        self.changed = asyncio.Event()

    def add(self, allocation: LimitAllocation) -> None:
        """Look after an allocation from now on."""
        if allocation not in self.allocations:
            self.allocations[allocation] = None
            self.changed.set()

    def hurry(self) -> None:
        """Ask the database as soon as the pace allows."""
        self.is_urgent = True
        self.changed.set()


class LimitAllocation(Window):
    """Part of one limit that this process has; without a limit, the amount that it uses by itself.

    `amount` is what the process holds; running requests use `in_use` of that, and the rest is spare. Tokens and
    requests per minute leave `amount` when they are taken, tokens of a month when they are used.
    """

    def __init__(self, due: DueAllocations, holder_id: str, kind: LimitKind) -> None:
        super().__init__()
        self.kind: LimitKind = kind
        self.limit: int | None = None
        self.amount = 0
        self._counted = 0
        """Amount that the database counts for this process since the last exchange."""
        self.needs: list[int] = []
        """Amounts that waiting requests need; 0 only asks how the limit stands."""
        self.returns: list[tuple[int, AllocationAnswer]] = []
        """Amounts that were taken and not used, each with `seen` as it was when they were taken."""
        self.growth = 0
        """Amount that unbounded answers need next."""
        self.unmoved: deque[tuple[float, int]] = deque()
        """Used tokens of a month that the database does not have yet, with the time of their use."""
        self.seen: AllocationAnswer | None = None
        """The last answer about this limit."""
        self._due = due
        self._holder_id = holder_id
        self._seen_s = self._fresh_s = self._valid_s = self._keep_until_s = -math.inf
        self._demand = 0.0
        self._demand_s = -math.inf

    @property
    def spare(self) -> int:
        """Amount that requests may take; below 0 if they use more than the process holds."""
        return self.amount - self.in_use

    @property
    def _held(self) -> int:
        """Amount that the database should count for this process."""
        return (
            0
            if self.limit is None
            else max(0, self.amount) + sum(tokens for _, tokens in self.unmoved)
        )

    def follow(self, limits: Limits) -> None:
        """Note the limit that counts now. Amounts that were taken from another limit are not spent."""
        limit = getattr(limits, self.kind)
        if limit != self.limit:
            self.limit = limit
            self.seen = None
            self._valid_s = self._keep_until_s = -math.inf
            self._due.add(self)

    def has(self, amount: int, now_s: float) -> bool:
        """Return true if `amount` may be taken now."""
        return amount <= self.spare and now_s < self._valid_s

    def has_room(self, now_s: float, amount: int, limit: int) -> bool:
        """Return true if this process holds `amount`, and running requests use no more than the limit with it."""
        return self.in_use + amount <= limit and self.has(amount, now_s)

    def take(self, now_s: float, amount: int) -> TakenAt:
        """Take from what the process holds; returns the database's last answer, for `give_back`."""
        if self.kind not in MINUTELY:
            self.in_use += amount
        elif self.limit is None:
            return super().take(now_s, amount)
        else:
            self.amount -= amount
        return self.seen

    def give_back(self, taken_at: TakenAt, amount: int) -> None:
        """Give back what was taken and not used."""
        if self.kind not in MINUTELY:
            self.in_use -= amount
        elif not isinstance(taken_at, AllocationAnswer):
            super().give_back(taken_at, amount)
        elif amount:
            self.returns.append((amount, taken_at))
            self._due.add(self)

    def settle(self, _ledger_id: str, tokens: int, _at: datetime) -> None:
        """Count used tokens of a month for this process until the database has them."""
        if self.limit is not None:
            self.amount -= tokens
            self.unmoved.append((self._due.monotonic(), tokens))
            self._due.add(self)

    def foresee(self, limits: Limits, now_s: float, tokens: int) -> None:
        """Fetch tokens before an answer without a bound needs them."""
        self.follow(limits)
        if self.limit is None:
            return
        self.expect(tokens, now_s)
        self._keep_until_s = now_s + KEEP_S
        most = max(self.limit // BURST_SHARE, MIN_GROW_TOKENS)
        growth = min(max(GROW_TOKENS, int(self._demand)), most)
        if self.spare < growth / 2 and self._left(now_s) >= 1:
            self.growth = growth
            self._due.hurry()

    def wait_s(self, now_s: float, amount: int) -> float:
        """Seconds until the present sum is smaller by `amount`, if nothing is added."""
        if self.kind not in MINUTELY:
            return BUSY_S
        if self.limit is None:
            return super().wait_s(now_s, amount)
        return max(TICK_S, amount * SPAN_S / max(self.limit, 1))

    def is_hopeless(self, amount: int, now_s: float) -> bool:
        """Return true if asking for `amount` is useless: it exceeds the limit, or what the last, fresh answer left."""
        is_known = (
            now_s < min(self._valid_s, self._fresh_s) and self.spare + self._left(now_s) < amount
        )
        return is_known or amount > (self.limit or 0)

    def expect(self, amount: int, now_s: float) -> None:
        """Count demand."""
        self._demand = self._demand_at(now_s) + amount
        self._demand_s = now_s
        self._due.add(self)

    def total(self, now_s: float) -> int:
        """Amount that counts against the limit now, as far as it is known here."""
        if self.limit is None and self.kind in MINUTELY:
            return super().total(now_s)
        if self.seen is None:
            return self.in_use
        return max(0, math.ceil(self._used(now_s) - self.spare - 1e-6))

    def is_idle(self, now_s: float) -> bool:
        """Return true if the allocation can be deleted: the database knows all that counts."""
        return not (self.in_use or super().total(now_s)) and self not in self._due.allocations

    def request(self, now_s: float) -> AllocationRequest | None:
        """Request to the database that is due now, if any. The part that it gives back leaves `amount`."""
        while self.unmoved and self.unmoved[0][0] < self._due.usage.unmoved_since:
            self.unmoved.popleft()
        spare = self.spare
        aim = self._aim(now_s)
        if self.limit is None:
            is_due = bool(self.needs or self._counted)
            back = spare
        else:
            is_less = self._held < self._counted
            renew_s = KEEP_S if is_less else RENEW_S.get(self.kind, RENEW_OTHERS_S)
            is_old = self._counted > 0 and now_s >= self._seen_s + renew_s
            is_kept = spare <= 2 * aim or now_s < self._keep_until_s
            back = min(spare, 0) if is_kept else spare - aim
            is_due = bool(
                self.needs or self.growth or self.returns or spare < aim / 2 or is_old or back
            )
        if not is_due:
            return None
        self.amount = 0 if self.limit is None else self.amount - back
        if self.growth:
            self.needs.append(max(0, min(self.growth, spare + self._left(now_s))))
        self._fresh_s = -math.inf
        request = AllocationRequest(
            holder_id=self._holder_id,
            kind=self.kind,
            limit=self.limit,
            held=self._held,
            spare=self.spare,
            back=back,
            returns=self.returns,
            needs=self.needs,
            ahead=aim,
        )
        self.needs = []
        self.returns = []
        self.growth = 0
        return request

    def take_answer(
        self, asked_s: float, request: AllocationRequest, answer: AllocationAnswer
    ) -> None:
        """Note the database's answer to a request."""
        self._counted = request.held + answer.granted
        if request.limit == self.limit:
            self.amount += answer.granted
            if any(request.needs):  # those who wait for it are only about to run
                self._keep_until_s = asked_s + KEEP_S
            self.seen = answer
            self.billed = answer.billed
            self._seen_s = asked_s
            self._fresh_s = asked_s + TICK_S
            self._valid_s = asked_s + (
                SLOT_US / 1e6 if self.kind == "concurrent_requests" else MAX_OUTAGE_S
            )

    def take_failure(self, request: AllocationRequest, *, is_in_doubt: bool) -> None:
        """Have a request sent again. In doubt, its returns are lost: they must not count twice."""
        self._counted = max(1, self._counted)
        if not is_in_doubt:
            self.amount += request.back
            self.returns += request.returns

    def is_empty(self, now_s: float) -> bool:
        """Return true if there is nothing to do until a request comes."""
        return self._held == self._counted == 0 and now_s >= self._demand_s + KEEP_S

    def _used(self, now_s: float) -> float:
        """Amount of the limit that all servers used or hold."""
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
        """Spare amount to aim at: the need of about a second, but only a part of what is left."""
        if self.limit is None or now_s >= min(self._valid_s, self._demand_s + KEEP_S):
            return 0
        most = max(0, self.spare + self._left(now_s)) // AHEAD_SHARE
        return min(int(self._demand_at(now_s)), self.limit // BURST_SHARE, most)
