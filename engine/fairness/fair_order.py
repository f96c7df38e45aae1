"""The order in which requests get rows: lanes by weight, tenants of a lane by weight, a tenant's adapters, arrival.

Every lane, tenant and adapter has a counter of the service that it got, divided by its weight. The least served goes
first. This is the virtual token counter of Sheng et al., "Fairness in Serving Large Language Models"
(arXiv:2401.00588), kept at three levels, so that a tenant with a hundred adapters has one share. Differences from
the paper:

* Rows count too. A share's place is its counter plus `quantum` units for each row that it has in the step. So two
  backlogged tenants divide the rows of every step, and differences of their counters are evened out over about
  `quantum` units a row, instead of giving whole steps in turns.
* A request in the step makes way for one that is not only when the shares differ by more than a quantum. So rows change
  hands once per quantum and not in every step, and requests of one adapter stay together. The more requests were
  stopped for others, paused or preempted, the longer a quantum is, without end as they become half as many as the
  step holds: where more tenants wait than there are rows or pages for, answers that have begun are finished first.
* A share that becomes active is lifted to the least counter of those that are served and want more, or, where nobody
  does, to the most that any was given, the last leaver included. A share that had all it wanted is lifted as far but
  for a quantum a row when it wants more. So neither idle nor modest time is credit, for it or for a newcomer.

Bound: of two tenants that always have requests waiting, the counters differ by at most two quanta for each row of a
step, plus what one step may cost, while turns have an end. Knows nothing of pages or adapters; the caller says what is
blocked.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Generator, Iterable, Iterator, Sequence
from operator import attrgetter
from typing import Literal

from manylora.engine.fairness.inner_order import InnerOrder
from manylora.engine.fairness.shares import ChildRows, Flow, Share, charge_shares
from manylora.engine.scheduling.request_state import RequestState

QUANTUM_TOKENS = 32
"""Output tokens of one request that make a quantum."""
INTERACTIVE_WEIGHT, BATCH_WEIGHT = 0.95, 0.05
"""Lane 0 and each lane above it: a batch gets a twentieth of the service while interactive requests take the rest."""
MAX_STOPPED_PER_ROW = 2
"""Requests of one adapter take rows from each other only until so many for each row wait to have theirs back."""
STOPPED_FRACTION = 0.5
"""Equal shares take no more turns when so many requests are stopped for each one in the step."""
MIN_STOPPED = 4
"""However small a step is, so many may be stopped."""


class FairOrder:
    """All requests of the engine, in the step or not.

    Args:
        policy: "fair", or "fcfs", which makes one share of all requests of a lane.
        inner: Order of requests of one adapter of one tenant.
        quantum: Units of service; see `QUANTUM_TOKENS`.
        num_rows: Most requests in a step.
    """

    def __init__(
        self, policy: Literal["fcfs", "fair"], inner: InnerOrder, quantum: float, num_rows: int
    ) -> None:
        self._num_rows = num_rows
        self.paused: set[RequestState] = set()
        """Requests with pages and without a row."""
        self._stopped: dict[str, RequestState] = {}
        """Requests that had a row and want it back: paused, or preempted since."""
        self._now_s = 0.0
        self._is_fair = policy == "fair"
        self._inner = inner
        self._quantum = quantum
        self.root = Share(None, None, 1.0, quantum, 0)
        """Its children are the lanes."""
        self._tickets = itertools.count(1)
        self._touched: set[Share] = set()
        self._looked: set[str] = set()
        self._rows_by_share: dict[Share, ChildRows] = {}
        """What is known of the rows of a share's children, as long as no row has changed hands."""
        self._settled: dict[Share, RequestState | None] = {}
        """By tenant: its row with the worst priority. By adapter: None if none of its rows makes way. Valid until a row
        changes hands."""
        self._num_prioritized = 0
        """Requests with a priority of their own."""
        self.num_queued = 0
        """Requests without a row."""

    @property
    def num_batch_rows(self) -> int:
        """Requests of batch lanes in the step."""
        return sum(lane.rows for key, lane in self.root.stepping.items() if key)

    def enter(self, state: RequestState) -> None:
        """A request arrives, without a row."""
        flow = state.request.flow
        lane_weight = BATCH_WEIGHT if flow.lane else INTERACTIVE_WEIGHT
        credit = self._quantum * self._num_rows
        lane = self.root.child(Share, flow.lane, lane_weight, credit, next(self._tickets))
        tenant_key, weight = (flow.tenant, flow.weight) if self._is_fair else ("", 1.0)
        tenant = lane.child(Share, tenant_key, weight, credit, next(self._tickets))
        adapter = state.digest if self._is_fair else None
        state.share = tenant.child(Flow, adapter, 1.0, credit, next(self._tickets))
        for share in state.share.path:
            share.num_alive += 1
        self._num_prioritized += state.priority != 0
        self.queue(state)

    def leave(self, state: RequestState) -> None:
        """A request has ended, or its row or its place in the queue ends with it."""
        if state.has_row:
            self._drop_row(state)
        else:
            self._unqueue(state)
            self._resumed(state)
        self._num_prioritized -= state.priority != 0
        for share in state.share.path:
            share.num_alive -= 1
            if not share.num_alive and share.parent is not None:
                share.parent.retire(share)

    def queue(self, state: RequestState) -> None:
        """A request has no row and wants one."""
        flow = state.share
        state.queue_key = self._inner.key(state)
        flow.push(state.queue_key, state)
        self.num_queued += 1
        for share in flow.path:
            share.num_queued += 1
            share.touch()

    def start(self, state: RequestState) -> None:
        """Give a queued request a row."""
        self._unqueue(state)
        self._resumed(state)
        flow = state.share
        flow.in_step[state.request_id] = state
        state.has_row = True
        self._forget_rows()
        for share in flow.path:
            share.rows += 1
            share.touch()
            if share.parent is not None:
                share.parent.stepping[share.key] = share

    def stop(self, state: RequestState) -> None:
        """A request loses its row, and is queued again, paused if it keeps its pages; or a paused one loses those."""
        if state.has_row:
            self._drop_row(state)
            self.queue(state)
            state.paused_s = self._now_s
            self._stopped[state.request_id] = state
        if state.is_paused:
            self.paused.add(state)
        else:
            self.paused.discard(state)

    def charge(self, charges: Sequence[tuple[RequestState, float]]) -> None:
        """Count the service of a step, in units, for lanes, tenants and adapters."""
        self._forget_rows()
        by_share: defaultdict[Share, float] = defaultdict(float)
        for state, units in charges:
            flow, tenant, lane = state.share.path
            by_share[flow] += units
            by_share[tenant] += units
            by_share[lane] += units
        charge_shares(by_share)
        self._inner.charge(charges)

    def candidates(self, limit: int) -> Generator[RequestState, None, None]:
        """Queued requests, first to be served first, at most `limit`. The caller may `start` each as it comes.

        What is ahead in this order counts as served, so that tenants take turns. `pass_over` skips those of the same
        adapter. Must be run to its end, or closed.
        """
        self._forget_rows()  # of a request that was looked at out of turn
        try:
            for _ in range(limit):
                state = self._next()
                if state is None:
                    return
                yield state
        finally:
            for share in self._touched:
                share.promised, share.is_closed = 0, False
                if isinstance(share, Flow):
                    share.cursor = 0
                share.touch()
            self._touched.clear()
            self._looked.clear()

    def pass_over(self, state: RequestState) -> None:
        """Have `candidates` skip what else is queued with the adapter of this one, which is not on the device.

        Each such adapter doubles what counts as served of its tenant in this plan, so that a tenant whose adapters are
        all blocked leaves candidates to others, however far ahead of it they are.
        """
        flow, tenant, _ = state.share.path
        if self._is_fair:  # else requests for other adapters are in the same queue
            self._close(flow)
            tenant.promised *= 2
            tenant.has_grown = True

    def row_for(self, state: RequestState) -> RequestState | None:
        """The request in the step that makes way for this one; None when none has to."""
        node = self.root
        for child in reversed(state.share.path):
            row = self._row_among(node, child, state)
            if row is not None or not child.rows:
                return row
            node = child
        return self._row_within(state.share, state)

    def _row_among(self, node: Share, child: Share, state: RequestState) -> RequestState | None:
        """The row that a sibling of `child` gives up for it."""
        if (
            self._num_prioritized
            and isinstance(child, Flow)
            and (row := self._by_priority(node, state)) is not None
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
            if row is not None and row.priority >= state.priority * isinstance(child, Flow):
                return row
        return None

    def _by_priority(self, node: Share, state: RequestState) -> RequestState | None:
        """The row of a tenant that makes way because the tenant ordered its own requests."""
        if node not in self._settled:
            rows = [
                row
                for flow in node.stepping.values()
                if isinstance(flow, Flow)
                for row in self._free_rows(flow)
            ]
            self._settled[node] = max(
                rows, key=attrgetter("priority", "arrival_index"), default=None
            )
        row = self._settled[node]
        return row if row is not None and row.priority > state.priority else None

    def _row_within(self, flow: Flow, state: RequestState) -> RequestState | None:
        """The row that makes way for another request of the same adapter.

        A new request takes no row while `MAX_STOPPED_PER_ROW` stopped requests per row wait to go on.
        """
        if flow in self._settled:
            return None
        row = max(self._free_rows(flow), key=self._inner.key, default=None)
        if row is None or not self._inner.yields(row, state):
            self._settled[flow] = None  # the requests queued behind this one get no row either
            return None
        is_crowded = len(self._stopped) >= MAX_STOPPED_PER_ROW * self._num_rows
        if is_crowded and state.request_id not in self._stopped and row.priority <= state.priority:
            return None
        return row

    def is_behind(self, other: RequestState, state: RequestState) -> bool:
        """Whether `other` must give its pages to `state`, because its share is far enough ahead."""
        share, mine = _apart(other.share, state.share)
        return share is not mine and self._is_ahead(
            share, share.now if other.has_row else share.after, mine
        )

    def yielding(
        self, state: RequestState, others: Iterable[RequestState]
    ) -> Iterator[RequestState]:
        """Those of `others` that give their pages up for `state`, each as if those before it had done so already."""
        ours = state.share
        given: Counter[Share] = Counter()
        for other in others:
            share, mine = _apart(other.share, ours)
            rows = share.rows - given[share]
            place = share.counter + share.quantum * (rows + (not other.has_row)) / share.weight
            is_behind = share is not mine and self._is_ahead(share, place, mine, rows)
            if is_behind or (other.has_row and self._is_later(other, state)):
                given[share] += other.has_row
                yield other

    def _is_later(self, row: RequestState, state: RequestState) -> bool:
        """Whether their tenant's own order has `row` make way for `state`."""
        flow, ours = row.share, state.share
        if flow is ours:
            return self._inner.yields(row, state)
        return flow.parent is ours.parent and row.priority > state.priority

    def place(self, state: RequestState) -> tuple[float, ...]:
        """Sorts requests of the step and others alike: the smallest is the most entitled to pages."""
        flow, tenant, _ = state.share.path
        return (
            not state.has_row,
            state.request.flow.lane,
            tenant.counter,
            flow.counter,
            state.arrival_index,
        )

    def turn(self, state: RequestState) -> tuple[float, ...]:
        """Sorts requests with rows, or about to get one, by their turn for tokens; a lane's weight counts here."""
        flow, tenant, lane = state.share.path
        return (lane.counter, tenant.counter, flow.counter, state.arrival_index)

    def tick(self, now_s: float) -> None:
        """Let time change the inner order of requests that had a row and lost it. Comes before each plan."""
        self._now_s = now_s
        for state in self._inner.due(self._stopped.values(), now_s):
            self._unqueue(state)
            self._inner.renew(state)
            self.queue(state)

    def check(self) -> set[str]:
        """Verify the counts of all shares, and return the ids of all requests; see `Share.check`."""
        return self.root.check()[2]

    def _slack(self, share: Share) -> float:
        """How far apart the places of `share` and another must be for a row to change hands."""
        return self._quantum / share.weight

    def _far(self, share: Share) -> float:
        """The count of service from which on another share with as many rows gives one to `share`.

        It grows with the number of stopped requests, because rows between equal shares only take turns. Preempted
        requests count too: otherwise equal shares that lack pages would take them from each other, and each turn
        would cost loads.
        """
        num_rows = sum(lane.rows for lane in self.root.children.values())
        free = 1 - len(self._stopped) / max(STOPPED_FRACTION * num_rows, MIN_STOPPED)
        return share.after + self._slack(share) / free if free > 0 else math.inf

    def _is_ahead(self, other: Share, place: float, share: Share, rows: int | None = None) -> bool:
        """Whether `other`, which stands at `place` and has `rows` rows, gives a row or pages to `share`.

        One that has more rows for its weight does so as soon as a quantum is between them.
        """
        if place < share.after + self._slack(share):
            return False
        rows = other.rows if rows is None else rows
        return (
            place >= self._far(share)
            or (rows - 1) / other.weight >= (share.rows + 1) / share.weight
        )

    def _next(self) -> RequestState | None:
        while True:
            node = self.root
            while not isinstance(node, Flow):
                child = node.first()
                if child is None:
                    break
                node = child
            if node is self.root:
                return None
            if not isinstance(node, Flow) or (state := node.look()) is None:
                self._close(node)
                continue
            self._looked.add(state.request_id)
            for share in node.path:
                share.promised += 1
                share.has_grown = True
            self._touched.update(node.path)
            return state

    def _close(self, share: Share) -> None:
        share.is_closed = True
        self._touched.add(share)

    def _unqueue(self, state: RequestState) -> None:
        flow = state.share
        flow.pop(state)
        self.num_queued -= 1
        was_promised = state.request_id in self._looked
        self._looked.discard(state.request_id)
        for share in flow.path:
            share.num_queued -= 1
            share.promised -= was_promised
            share.touch()

    def _drop_row(self, state: RequestState) -> None:
        flow = state.share
        del flow.in_step[state.request_id]
        state.has_row = False
        self._forget_rows()
        for share in flow.path:
            share.rows -= 1
            share.touch()
            if not share.rows and share.parent is not None:
                del share.parent.stepping[share.key]

    def _resumed(self, state: RequestState) -> None:
        self.paused.discard(state)
        self._stopped.pop(state.request_id, None)

    def _forget_rows(self) -> None:
        self._rows_by_share.clear()
        self._settled.clear()

    def _last_row(self, share: Share) -> RequestState | None:
        """The request of a share that makes way first."""
        if isinstance(share, Flow):
            return max(self._free_rows(share), key=self._inner.key, default=None)
        for child in sorted(share.stepping.values(), key=attrgetter("now"), reverse=True):
            row = self._last_row(child)
            if row is not None:
                return row
        return None

    @staticmethod
    def _free_rows(flow: Flow) -> list[RequestState]:
        return [row for row in flow.in_step.values() if not row.is_protected]


def _apart(flow: Flow, other: Flow) -> tuple[Share, Share]:
    """The two shares to compare: the ancestors of both flows, or the flows themselves, that have the same parent."""
    share: Share = flow
    sibling: Share = other
    while (
        share.parent is not sibling.parent
        and share.parent is not None
        and sibling.parent is not None
    ):
        share, sibling = share.parent, sibling.parent
    return share, sibling
