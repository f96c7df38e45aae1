"""Limits that several servers share, in SQL: each server takes a part before it is used.

A server tells in one short write transaction what it holds of its limits, what it gives back and what it needs; the
answer is what it got. What all servers hold and have used together is never more than the limit:

- per minute: a bucket. `used` falls by a sixtieth of the limit per second, but never below what servers hold.
- at the same time: what servers hold. A server that does not renew its allocations loses them.
- per month: what the usage ledger has, and what servers hold beside it.

All times are by one clock, that of the database.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from secrets import token_hex
from typing import Any, NamedTuple

from sqlalchemy import FromClause, delete, func, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from manylora.registry.db.clock import MINUTE_US, from_micros, month_after, month_of, to_micros
from manylora.registry.db.database import Database, database_us, insert_into
from manylora.registry.db.models import LimitAllocationRow, LimitBucketRow
from manylora.registry.limits import LimitKind
from manylora.registry.usage.write import month_tokens

MINUTELY = ("requests_per_minute", "tokens_per_minute")
Clock = Callable[[AsyncSession], Awaitable[int]]
"""Gives the microseconds since 1970 on a clock that all servers share."""
SLOT_US = 5_000_000
"""Time for which places of concurrent requests stay allocated, unless they are renewed."""
HELD_US = 65_000_000
"""Time for which per-minute and per-month parts do; longer than a server spends what it holds without the database."""
AHEAD_SHARE = 8
"""Divisor of what is left: a server gets at most this part for later requests, the rest is for other servers."""
KEPT_US = 10 * MINUTE_US
"""Age at which rows that say nothing any more are deleted."""


class AllocationAnswer(NamedTuple):
    """Amount that a server got of one limit, and the state of the limit."""

    granted: int
    used: float
    """Amount of the limit that all servers used or hold."""
    at: int
    """Time of this state, in microseconds since 1970."""
    returned: float
    """Per minute only: sum of all amounts that were given back."""
    billed: int
    """Per month only: tokens in the ledger."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocationRequest:
    """Request of a server: what it holds, gives back and needs of one limit."""

    holder_id: str
    """A tenant or a key."""
    kind: LimitKind
    limit: int | None
    """None: nothing is limited, the answer only tells what is used."""
    held: int
    """Amount that the server goes on holding; it counts even if it is more than the limit."""
    spare: int
    """The part of `held` that is free for `needs`."""
    back: int
    """Per minute only: amount that was held and not used; below 0, amount that was used and not held."""
    returns: Sequence[tuple[int, AllocationAnswer]]
    """Per minute only: amounts that requests took and did not use, with the last answer before they took them."""
    needs: Sequence[int]
    """Amounts that waiting requests need, in their order: each is fulfilled or not."""
    ahead: int
    """Amount that later requests probably need."""


class LimitAllocations:
    """The shared state of limits.

    Args:
        database: Where it is.
        owner: This server's name, under which its allocations are.
        clock: The clock that all servers share.
    """

    def __init__(self, database: Database, owner: str, clock: Clock = database_us) -> None:
        self._database = database
        self._owner = owner
        self._clock = clock
        self._next_sweep = 0
        self.is_in_doubt = False
        """True if an exchange that failed may have happened all the same."""

    async def forget(self, *, is_billed: bool) -> None:
        """Delete this server's allocations: nothing of it runs.

        Args:
            is_billed: Whether the ledger has all that it used of a month. If not, what it held of months counts on for
                a while under another name, so that this server's next allocations do not replace it.

        Raises:
            CapacityError: The database cannot answer; code db.unavailable.
        """
        async with self._database.write() as session:
            if not is_billed:
                kept = {
                    "owner": f"{self._owner}/{token_hex(4)}",
                    "until": await self._clock(session) + HELD_US,
                }
                months = update(LimitAllocationRow).filter_by(
                    owner=self._owner, kind="tokens_per_month"
                )
                await session.execute(months.values(kept))
            await session.execute(
                delete(LimitAllocationRow).where(LimitAllocationRow.owner == self._owner)
            )

    async def exchange(
        self, requests: Sequence[AllocationRequest], grace_us: int = 0
    ) -> list[AllocationAnswer]:
        """Give back and take, in one transaction.

        Args:
            requests: At most one for each holder and kind.
            grace_us: Allocations of others that ended at most this long ago still count: their owners could not renew
                them while the database was away.

        Returns:
            One answer for each.

        Raises:
            CapacityError: The database cannot answer; code db.unavailable. Nothing or all of it has happened.
        """
        self.is_in_doubt = False
        allocation = LimitAllocationRow
        bucket = LimitBucketRow
        async with self._database.write() as session:
            now = await self._clock(session)
            month = month_of(from_micros(now))
            ids = {request.holder_id for request in requests}
            others = (
                allocation.holder_id.in_(ids),
                allocation.owner != self._owner,
                allocation.until > now - grace_us,
            )
            sums = select(allocation.holder_id, allocation.kind, func.sum(allocation.amount)).where(
                *others
            )
            found = await session.execute(sums.group_by(allocation.holder_id, allocation.kind))
            held = {(holder_id, kind): int(amount) for holder_id, kind, amount in found}
            rows = await session.scalars(select(bucket).where(bucket.holder_id.in_(ids)))
            buckets = {(row.holder_id, row.kind): row for row in rows}
            of_months = {each.holder_id for each in requests if each.kind == "tokens_per_month"}
            tokens = await month_tokens(session, of_months, month)
            # A month's allocation stays: only its owner knows whether the ledger has all that it used.
            untils = {
                "tokens_per_month": to_micros(month_after(month)) + HELD_US,
                "concurrent_requests": now + SLOT_US,
            }
            answers: list[AllocationAnswer] = []
            allocations: list[dict[str, Any]] = []
            changed: list[dict[str, Any]] = []
            for request in requests:
                key = (request.holder_id, request.kind)
                name = {"holder_id": request.holder_id, "kind": request.kind}
                is_monthly = request.kind == "tokens_per_month"
                billed = tokens.get(request.holder_id, 0) if is_monthly else 0
                answer = _answer(request, held.get(key, 0), buckets.get(key), billed, now)
                answers.append(answer)
                until = untils.get(request.kind, now + HELD_US)
                allocations.append(
                    name
                    | {
                        "owner": self._owner,
                        "amount": request.held + answer.granted,
                        "until": until,
                    }
                )
                if request.kind in MINUTELY:
                    changed.append(
                        name | {"used": answer.used, "at": answer.at, "returned": answer.returned}
                    )
            await _put(session, allocation.__table__, allocations)
            await _put(session, bucket.__table__, changed)
            if now >= self._next_sweep:
                self._next_sweep = now + MINUTE_US
                await session.execute(delete(allocation).where(allocation.until < now - KEPT_US))
                await session.execute(delete(bucket).where(bucket.at < now - KEPT_US))
            self.is_in_doubt = True
        return answers


def _answer(
    request: AllocationRequest, others: int, bucket: LimitBucketRow | None, billed: int, now: int
) -> AllocationAnswer:
    """Answer to a request, where other servers hold the amount `others`."""
    least = float(billed + others + request.held)
    used = least
    returned = 0.0
    rate = (request.limit or 0) / MINUTE_US
    if request.kind in MINUTELY:
        used = 0.0
        if bucket is not None:  # if the clock was set back, the bucket refills from now on
            used = bucket.used - rate * max(0, now - bucket.at)
            returned = bucket.returned
        unused = max(0, request.back)
        used = max(used, least + unused) - request.back
        returned += unused
        used = min(used, request.limit or 0)  # a smaller limit begins used up, not in debt
        for amount, seen in request.returns:
            # Tokens that drained while they were reserved are not given back: with those taken since, any window would
            # have more than the limit. `used + returned` has fallen only as the bucket drained.
            low = min(seen.used, request.limit or 0) + seen.returned - rate * max(0, now - seen.at)
            credit = (
                max(0.0, min(amount, low - returned))
                if returned >= seen.returned and now >= seen.at
                else 0.0
            )
            used -= credit
            returned += credit
        used = max(used, least)
    granted = 0
    if request.limit is not None:
        left = int(request.limit - used + 1e-6)
        room = left + request.spare
        for need in request.needs:
            granted += need if granted + need <= room else 0
        granted += max(0, min(request.ahead, (room - granted) // AHEAD_SHARE))
        granted = max(0, min(granted - request.spare, left))
    return AllocationAnswer(granted, used + granted, now, returned, billed)


async def _put(session: AsyncSession, table: FromClause, rows: list[dict[str, Any]]) -> None:
    """Insert rows, or replace what they say."""
    if rows:
        upsert = insert_into(session, table)
        keys = [column.name for column in table.primary_key]
        changes = {name: upsert.excluded[name] for name in rows[0] if name not in keys}
        await session.execute(upsert.on_conflict_do_update(index_elements=keys, set_=changes), rows)
