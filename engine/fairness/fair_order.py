"""Order in which requests get rows: by lane, then by tenant, then by the tenant's adapters, then by arrival.

Every lane, tenant and adapter is a share with a counter: its service divided by its weight. The share with the smallest
counter goes first. This is the virtual token counter of Sheng et al., "Fairness in Serving Large Language Models"
(arXiv:2401.00588), at three levels, so that a tenant with a hundred adapters has one share. It differs from the paper
in three ways:

* Rows count. The position of a share is its counter plus one `quantum` of units for each row that it has in the step.
  So tenants that always have requests waiting divide the rows of every step, instead of taking whole steps in turns.
* A row changes hands only when the positions of two shares are more than a quantum apart. So it changes hands once per
  quantum and not in every step, and requests of one adapter stay together. Requests that lost their rows are stopped.
  The more are stopped, the longer a quantum is. With half as many stopped as the step has rows, turns end: requests
  that have begun are finished before others begin.
* Idle time earns no credit. A share that gets its first request is lifted to the smallest counter of the shares that
  have rows and want more; if there is none, to the largest counter that any share had. A share whose requests all have
  rows is lifted to the same counter when it wants more, less one quantum for each row of a step.

Bound: the counters of two tenants that always have requests waiting differ by at most two quanta for each row of a
step, plus the price of one step, as long as turns do not end.

This module knows nothing of pages or adapters; the caller says which requests are blocked.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Generator, Iterable, Iterator, Sequence
from operator import attrgetter
from typing import Literal

from manylora.engine.fairness.inner_order import InnerOrder
from manylora.engine.fairness.shares import (
    ChildRows,
    FairPlace,
    FairShare,
    Flow,
    charge_shares,
)
from manylora.engine.request import FlowKey

QUANTUM_TOKENS = 32
"""Output tokens of one request that make a quantum."""
INTERACTIVE_WEIGHT = 0.95
"""Weight of lane 0."""
BATCH_WEIGHT = 0.05
"""Weight of each other lane: a batch gets a twentieth of the service while interactive requests take the rest."""
MAX_STOPPED_PER_ROW = 2
"""Stopped requests per row of a step above which requests of one adapter take no more rows from each other."""
STOPPED_FRACTION = 0.5
"""Stopped requests per row in the step above which equal shares take no more turns."""
MIN_STOPPED = 4
"""Stopped requests up to which equal shares take turns, however small a step is."""
_last_served = attrgetter("priority", "arrival_index")
"""Sorts rows of one tenant, whatever their adapters: the largest makes way first."""


class FairOrder:
    """Order of all requests of the engine, in the step or not.

    Args:
        policy: "fair", or "fcfs", which makes one share of all requests of a lane.
        inner: Order of requests of one adapter of one tenant.
        quantum: Units of service; see `QUANTUM_TOKENS`.
        num_rows: Most requests in a step.
    """

    def __init__(
        self, policy: Literal["fcfs", "fair"], inner: InnerOrder, quantum: float, num_rows: int
    ) -> None:
        self._max_stopped = MAX_STOPPED_PER_ROW * num_rows
        self._stopped: dict[str, FairPlace] = {}
        """Requests that had a row and want it back, by id."""
        self._now_s = 0.0
        self._is_fair = policy == "fair"
        self._inner = inner
        self._quantum = quantum
        self._credit = quantum * num_rows
        """Units by which a share that had all it wanted may stay behind the others."""
        self.root = FairShare(None, None, 1.0, quantum, 0)
        """Root of the tree; its children are the lanes."""
        self._tickets = itertools.count(1)
        self._touched: set[FairShare] = set()
        self._looked: set[str] = set()
        self._rows_by_share: dict[FairShare, ChildRows] = {}
        """Rows of the children of a share; valid until a row changes hands."""
        self._settled: dict[FairShare, FairPlace | None] = {}
        """By tenant: its row with the worst priority. By adapter: None if none of its rows makes way. Valid until a row
        changes hands."""
        self._num_prioritized = 0
        """Requests with a priority of their own."""
        self.num_queued = 0
        """Requests without a row."""
        self.num_rows = 0
        """Requests in the step."""

    @property
    def num_batch_rows(self) -> int:
        """Requests of batch lanes in the step."""
        return sum(lane.rows for key, lane in self.root.stepping.items() if key)

    def enter(self, place: FairPlace) -> None:
        """Take in a request that arrives, without a row."""
        key = place.key if self._is_fair else FlowKey(lane=place.key.lane)
        lane_weight = BATCH_WEIGHT if key.lane else INTERACTIVE_WEIGHT
        lane = self.root.child(FairShare, key.lane, lane_weight, self._credit, next(self._tickets))
        tenant = lane.child(FairShare, key.tenant, key.weight, self._credit, next(self._tickets))
        adapter = place.adapter if self._is_fair else None
        place.flow = tenant.child(Flow, adapter, 1.0, self._credit, next(self._tickets))
        self._num_prioritized += place.priority != 0
        self.queue(place)

    def leave(self, place: FairPlace) -> None:
        """Forget a request that has ended; its row or its place in the queue ends with it."""
        if place.has_row:
            self._drop_row(place)
        else:
            self._unqueue(place)
            self._stopped.pop(place.request_id, None)
        self._num_prioritized -= place.priority != 0
        for share in place.flow.path:
            if not share.num_queued and not share.rows and share.parent is not None:
                share.parent.retire(share)

    def queue(self, place: FairPlace) -> None:
        """Queue a request that has no row and wants one."""
        flow = place.flow
        place.queue_key = self._inner.key(place)
        flow.push(place)
        self.num_queued += 1
        for share in flow.path:
            share.num_queued += 1
            share.touch()

    def start(self, place: FairPlace) -> None:
        """Give a queued request a row."""
        self._unqueue(place)
        self._stopped.pop(place.request_id, None)
        flow = place.flow
        flow.in_step[place.request_id] = place
        place.has_row = True
        place.has_started = True
        self.num_rows += 1
        self._forget_rows()
        for share in flow.path:
            share.rows += 1
            share.touch()
            if share.parent is not None:
                share.parent.stepping[share.key] = share

    def stop(self, place: FairPlace) -> None:
        """Take the row from a request, and queue it again."""
        self._drop_row(place)
        self.queue(place)
        place.standing.stopped_s = self._now_s
        self._stopped[place.request_id] = place

    def charge(self, charges: Sequence[tuple[FairPlace, float]]) -> None:
        """Count the service of a step, in units, for lanes, tenants and adapters."""
        self._forget_rows()
        by_share: defaultdict[FairShare, float] = defaultdict(float)
        for place, units in charges:
            flow, tenant, lane = place.flow.path
            by_share[flow] += units
            by_share[tenant] += units
            by_share[lane] += units
        charge_shares(by_share)
        self._inner.charge(charges)

    def candidates(self, limit: int) -> Generator[FairPlace, None, None]:
        """Queued requests, first to be served first, at most `limit`. The caller may `start` each as it comes.

        A request that was ahead in this order counts as served, so that tenants take turns. Must be run to its end, or
        closed.
        """
        self._forget_rows()  # of a request that was looked at out of turn
        try:
            for _ in range(limit):
                place = self._next()
                if place is None:
                    return
                yield place
        finally:
            for share in self._touched:
                share.promised = 0
                share.is_closed = False
                if isinstance(share, Flow):
                    share.cursor = 0
                share.touch()
            self._touched.clear()
            self._looked.clear()

    def pass_over(self, place: FairPlace) -> None:
        """Have `candidates` skip all other requests of the adapter of this one, which is not on the device.

        Each such adapter doubles the number of its tenant's requests that count as served in this plan. So a tenant
        whose adapters are all blocked leaves candidates to others, however far ahead of it they are.
        """
        flow, tenant, _ = place.flow.path
        if self._is_fair:  # else requests for other adapters are in the same queue
            self._close(flow)
            tenant.promised *= 2
            tenant.has_grown = True

    def row_for(self, place: FairPlace) -> FairPlace | None:
        """Request in the step that makes way for this one; None when none has to."""
        node = self.root
        for child in reversed(place.flow.path):
            row = self._row_among(node, child, place)
            if row is not None or not child.rows:
                return row
            node = child
        return self._row_within(place.flow, place)

    def _row_among(self, node: FairShare, child: FairShare, place: FairPlace) -> FairPlace | None:
        """Row that a sibling of `child` gives up for it."""
        if (
            self._num_prioritized
            and isinstance(child, Flow)
            and (row := self._by_priority(node, place)) is not None
        ):
            return row
        rows = self._rows_by_share.get(node)
        if rows is None:
            rows = self._rows_by_share[node] = ChildRows(node)
        if rows.farthest < child.after + self._slack(child):
            return None
        if rows.farthest < self._far(child) and rows.most < (child.rows + 1) / child.weight:
            return None
        for other in rows.shares:
            if other is child or not self._is_ahead(other, other.now, child):
                continue
            row = self._last_row(other)
            # Priorities order the requests of one tenant: they keep no row from another tenant.
            if row is not None and (row.priority >= place.priority or not isinstance(child, Flow)):
                return row
        return None

    def _by_priority(self, node: FairShare, place: FairPlace) -> FairPlace | None:
        """Row of a tenant that makes way because the tenant ordered its own requests."""
        if node not in self._settled:
            rows = [
                row
                for flow in node.stepping.values()
                if isinstance(flow, Flow)
                for row in self._free_rows(flow)
            ]
            self._settled[node] = max(rows, key=_last_served, default=None)
        row = self._settled[node]
        return row if row is not None and row.priority > place.priority else None

    def _row_within(self, flow: Flow, place: FairPlace) -> FairPlace | None:
        """Row that makes way for another request of the same adapter.

        A new request takes no row while `MAX_STOPPED_PER_ROW` stopped requests per row wait to go on.
        """
        if flow in self._settled:
            return None
        row = self._last_row(flow)
        if row is None or not self._inner.yields(row, place):
            self._settled[flow] = None  # the requests queued behind this one get no row either
            return None
        is_crowded = len(self._stopped) >= self._max_stopped
        if is_crowded and place.request_id not in self._stopped and row.priority <= place.priority:
            return None
        return row

    def is_behind(self, other: FairPlace, place: FairPlace) -> bool:
        """True if `other` must give its pages to `place`, because its share is far enough ahead."""
        share, mine = _apart(other.flow, place.flow)
        return share is not mine and self._is_ahead(
            share, share.now if other.has_row else share.after, mine
        )

    def yielding(self, place: FairPlace, others: Iterable[FairPlace]) -> Iterator[FairPlace]:
        """Requests of `others` that give up their pages for `place`, each as if those before it had done so already."""
        given: Counter[FairShare] = Counter()
        for other in others:
            share, mine = _apart(other.flow, place.flow)
            rows = share.rows - given[share]
            num_rows = rows + (not other.has_row)
            position = share.counter + share.quantum * num_rows / share.weight
            is_behind = share is not mine and self._is_ahead(share, position, mine, rows)
            if is_behind or (other.has_row and self._is_later(other, place)):
                given[share] += other.has_row
                yield other

    def _is_later(self, row: FairPlace, place: FairPlace) -> bool:
        """True if their tenant's own order has `row` make way for `place`."""
        if row.flow is place.flow:
            return self._inner.yields(row, place)
        return row.flow.parent is place.flow.parent and row.priority > place.priority

    def entitlement(self, place: FairPlace) -> tuple[float, ...]:
        """Sorts requests of the step and others alike: the smallest is the most entitled to pages."""
        flow, tenant, _ = place.flow.path
        return (
            not place.has_row,
            place.key.lane,
            tenant.counter,
            flow.counter,
            place.arrival_index,
        )

    def turn(self, place: FairPlace) -> tuple[float, ...]:
        """Sorts requests with rows, or about to get one, by their turn for tokens; a lane's weight counts here."""
        flow, tenant, lane = place.flow.path
        return (lane.counter, tenant.counter, flow.counter, place.arrival_index)

    def tick(self, now_s: float) -> None:
        """Let time change the inner order of requests that had a row and lost it. Comes before each plan."""
        self._now_s = now_s
        for place in self._inner.due(self._stopped.values(), now_s):
            self._unqueue(place)
            self._inner.renew(place)
            self.queue(place)

    def check(self) -> set[str]:
        """Verify the counts of all shares, and return the ids of all requests; see `FairShare.check`."""
        return self.root.check()[2]

    def _slack(self, share: FairShare) -> float:
        """Distance between the positions of `share` and another that a row needs to change hands."""
        return self._quantum / share.weight

    def _far(self, share: FairShare) -> float:
        """Position from which on another share with as many rows gives one to `share`.

        It grows with the number of stopped requests, because rows between equal shares only take turns. Preempted
        requests count too: otherwise equal shares that lack pages would take them from each other, and each turn
        would cost loads.
        """
        free = 1 - len(self._stopped) / max(STOPPED_FRACTION * self.num_rows, MIN_STOPPED)
        return share.after + self._slack(share) / free if free > 0 else math.inf

    def _is_ahead(
        self, other: FairShare, position: float, share: FairShare, rows: int | None = None
    ) -> bool:
        """True if `other`, which stands at `position` and has `rows` rows, gives a row or pages to `share`.

        A share that has more rows for its weight gives one as soon as a quantum is between the two.
        """
        if position < share.after + self._slack(share):
            return False
        rows = other.rows if rows is None else rows
        return (
            position >= self._far(share)
            or (rows - 1) / other.weight >= (share.rows + 1) / share.weight
        )

    def _next(self) -> FairPlace | None:
        while True:
            node = self.root
            while not isinstance(node, Flow):
                child = node.first()
                if child is None:
                    break
                node = child
            if node is self.root:
                return None
            place: FairPlace | None = node.look() if isinstance(node, Flow) else None
            if place is None:
                self._close(node)
                continue
            self._looked.add(place.request_id)
            for share in place.flow.path:
                share.promised += 1
                share.has_grown = True
            self._touched.update(place.flow.path)
            return place

    def _close(self, share: FairShare) -> None:
        share.is_closed = True
        self._touched.add(share)

    def _unqueue(self, place: FairPlace) -> None:
        flow = place.flow
        flow.pop(place)
        self.num_queued -= 1
        was_promised = place.request_id in self._looked
        self._looked.discard(place.request_id)
        for share in flow.path:
            share.num_queued -= 1
            share.promised -= was_promised
            share.touch()

    def _drop_row(self, place: FairPlace) -> None:
        flow = place.flow
        del flow.in_step[place.request_id]
        place.has_row = False
        self.num_rows -= 1
        self._forget_rows()
        for share in flow.path:
            share.rows -= 1
            share.touch()
            if not share.rows and share.parent is not None:
                del share.parent.stepping[share.key]

    def _forget_rows(self) -> None:
        self._rows_by_share.clear()
        self._settled.clear()

    def _last_row(self, share: FairShare) -> FairPlace | None:
        """Request of a share that makes way first."""
        if isinstance(share, Flow):
            return max(self._free_rows(share), key=self._inner.key, default=None)
        for child in sorted(share.stepping.values(), key=attrgetter("now"), reverse=True):
            row = self._last_row(child)
            if row is not None:
                return row
        return None

    @staticmethod
    def _free_rows(flow: Flow) -> list[FairPlace]:
        return [row for row in flow.in_step.values() if not row.is_protected]


def _apart(flow: Flow, other: Flow) -> tuple[FairShare, FairShare]:
    """Shares to compare: the ancestors of both flows, or the flows themselves, that have one parent."""
    share: FairShare = flow
    sibling: FairShare = other
    while (
        share.parent is not sibling.parent
        and share.parent is not None
        and sibling.parent is not None
    ):
        share = share.parent
        sibling = sibling.parent
    return share, sibling
