"""Tree of shares that the fair order keeps: lanes, tenants in them, their adapters, and the requests of these.

A share counts the service that it was given and its rows in the step, and names the child that is next. A `FairPlace`
is one request: whose it is, its expected length and cost, and its place in the tree.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from operator import attrgetter, itemgetter
from typing import TypeVar, cast

from manylora.engine.request import FlowKey
from manylora.errors import EngineError

MAX_IDLE_SHARES = 4096
"""Idle shares that a share remembers; of more, the one that became idle first is forgotten."""
SortKey = tuple[float, ...]
"""Position of a request in the queue of its flow: the smallest goes first. It begins with the request's priority."""
ShareT = TypeVar("ShareT", bound="FairShare")
_sort_key = itemgetter(0)
"""Sort key of an entry of a queue."""


@dataclass(slots=True, kw_only=True, eq=False)
class Standing:
    """Facts of one request for the order of the requests of its adapter and tenant, beside priority and arrival."""

    start_by_s: float = math.inf
    """Latest second at which it can start and keep its deadline."""
    level: int | None = None
    """Level in the multi-level feedback queue; None before it was queued."""
    level_below_front: int = field(default=0, init=False)
    """Level to return to after a turn at the front."""
    level_units: float = field(default=0.0, init=False)
    """Units used at this level."""
    stopped_s: float = field(default=0.0, init=False)
    """Second at which it lost its row."""


@dataclass(slots=True, kw_only=True, eq=False)
class FairPlace:
    """A request in the fair order, with a row in the step or queued for one; and its work, expected and charged.

    Units are those of `manylora.engine.fairness.service`.
    """

    request_id: str
    key: FlowKey
    """Lane, tenant and weight."""
    arrival_index: float
    """Counts up per engine; older means smaller. No two are the same: fractions are for beams of one search."""
    arrived_s: float
    adapter: str | None
    """Digest of its adapter; None is the base model."""
    rank: int = 0
    """Rank of its adapter; 0 is the base model."""
    num_prompt: int
    """Tokens in its prompt."""
    predicted_tokens: int = 0
    """Output tokens that it is expected to have, from earlier answers of its tenant and adapter."""
    priority: int = 0
    """Lower goes first, within its tenant."""
    standing: Standing = field(default_factory=Standing)
    """Facts by which it stands before or behind the other requests of its adapter."""
    load_units: float = 0.0
    """Price of bringing its adapter to the device; 0 while the adapter's size is unknown."""
    has_started: bool = False
    """True if it ever had a row, or goes on from a request that had one."""
    num_charged: int = 0
    """Tokens that were computed at least once. To compute them again after a preemption costs the tenant nothing."""
    owes_load: bool = field(default=False, init=False)
    """True if its adapter is brought to the device for it, and the load is not charged yet."""
    queued_units: float = field(default=0.0, init=False)
    """Predicted price of the tokens still to compute, as counted when it began to wait."""
    in_batch_lane: bool = field(init=False)
    """True if it gives way to interactive requests."""
    has_row: bool = field(default=False, init=False)
    """True if it is in the step."""
    is_protected: bool = field(default=False, init=False)
    """True if no other request may take its row."""
    queue_key: SortKey = field(init=False)
    """Sort key in the queue of its flow; set when it is queued."""
    flow: Flow = field(init=False, repr=False)
    """Requests of its adapter and tenant; set when it enters the order."""

    def __post_init__(self) -> None:
        self.in_batch_lane = self.key.lane > 0

    @property
    def age_key(self) -> tuple[int, float]:
        """Sorts from the oldest to the newest request, lane by lane."""
        return self.key.lane, self.arrival_index

    def fork(self, request_id: str, arrival_index: float, num_charged: int) -> FairPlace:
        """The place of a request that goes on from this one, before it enters the order."""
        return replace(
            self,
            request_id=request_id,
            arrival_index=arrival_index,
            standing=replace(self.standing),
            num_charged=num_charged,
            has_started=True,
        )


@dataclass(eq=False, repr=False, slots=True)
class FairShare:
    """Service and rows of a lane, of a tenant in it, or of an adapter of that tenant."""

    parent: FairShare | None
    """The share that this one divides with its siblings; None for the root."""
    key: object
    """Name in the parent."""
    weight: float
    """Part of the parent's service, in proportion to the siblings' weights."""
    quantum: float
    """Units of service; see `manylora.engine.fairness.fair_order`."""
    ticket: int
    """Counts up; breaks ties."""
    counter: float = 0.0
    """Units of service over weight."""
    rows: int = 0
    """Its requests in the step."""
    promised: int = 0
    """Its requests that this plan has looked at and that have no row."""
    num_queued: int = 0
    """Its requests without a row."""
    is_closed: bool = False
    """True if this plan looks at no more of its requests."""
    has_grown: bool = False
    """True if its position grew after its last entry in the parent's heap."""
    children: dict[object, FairShare] = field(default_factory=dict)
    stepping: dict[object, FairShare] = field(default_factory=dict)
    """Children with rows."""
    idle: dict[object, FairShare] = field(default_factory=dict)
    """Children without requests that are remembered."""
    ready: list[Entry] = field(default_factory=list)
    """Heap of the children that have queued requests: priority, position, ticket. Only a child's last entry counts. If
    the child `has_grown`, its position is larger than this entry says."""
    _ceiling: float = 0.0
    """Largest counter that a child ever had."""
    _touched: list[FairShare] = field(default_factory=list)
    """Children whose last entry may be too large, or missing."""
    _is_touched: bool = False
    _entry: Entry | None = None
    """Its last entry in the parent's heap."""

    @property
    def now(self) -> float:
        """Position with the rows that it has: the share with the largest makes way first."""
        return self.counter + self.quantum * self.rows / self.weight

    @property
    def after(self) -> float:
        """Position with one more row: the share with the smallest gets the next row."""
        return self.counter + self.quantum * (self.rows + 1) / self.weight

    def child(
        self, kind: type[ShareT], key: object, weight: float, credit: float, ticket: int
    ) -> ShareT:
        """Find or make the child for a request that arrives, with this weight from now on.

        A new child starts at `now_served`. A child that had all it wanted so far is lifted to `credit` units below it.
        """
        child = self.children.get(key)
        if child is None:
            child = self.idle.pop(key, None) or kind(self, key, weight, self.quantum, ticket)
            child.counter = max(child.counter, self.now_served())
            self.children[key] = child
        elif not child.num_queued:
            child.counter = max(child.counter, self.now_served() - credit / weight)
        child.weight = weight
        return cast(ShareT, child)

    def retire(self, child: FairShare) -> None:
        """Remember the counter of a child without requests as long as it could matter."""
        del self.children[child.key]
        self.idle[child.key] = child
        if not self.children and self.parent is not None:
            # The next child is lifted to the largest counter, which is at least that of each of these.
            self.idle.clear()
            self.ready.clear()
            self._touched.clear()
        elif len(self.idle) > MAX_IDLE_SHARES:
            del self.idle[next(iter(self.idle))]

    def now_served(self) -> float:
        """Least counter of the children that have rows and want more; without these, the largest counter ever seen."""
        counters = (child.counter for child in self.stepping.values() if child.num_queued)
        return min(counters, default=self._ceiling)

    def check(self) -> tuple[int, int, set[str]]:
        """Verify the counts of this share and of all below it.

        Returns:
            Requests without a row, requests in the step, and the ids of both.

        Raises:
            EngineError: A share counts other requests than it has.
        """
        parts = [child.check() for child in self.children.values()]
        queued = sum(part[0] for part in parts)
        rows = sum(part[1] for part in parts)
        return self._check_counts(queued, rows, set().union(*(part[2] for part in parts)))

    def _check_counts(
        self, queued: int, rows: int, request_ids: set[str]
    ) -> tuple[int, int, set[str]]:
        counted = (self.num_queued, self.rows)
        if self.parent is not None and counted != (queued, rows):
            raise EngineError(
                f"a share has {queued} requests queued and {rows} in the step, and counts {counted}"
            )
        return queued, rows, request_ids

    def touch(self) -> None:
        """Have the parent look again: the position may be smaller now, or there are queued requests again."""
        if not self._is_touched and self.parent is not None:
            self._is_touched = True
            self.parent._touched.append(self)

    def first(self) -> FairShare | None:
        """Child whose request is next."""
        if len(self.children) == 1:
            (only,) = self.children.values()
            return only if only.num_queued and not only.is_closed else None
        ready = self.ready
        for child in self._touched:
            child._is_touched = False
            if child.num_queued and not child.is_closed:
                heapq.heappush(ready, child._make_entry())
        self._touched.clear()
        if len(ready) > 4 * len(self.children) + 64:
            ready[:] = [entry for entry in ready if entry[3]._entry is entry]
            heapq.heapify(ready)
        while ready:
            entry = ready[0]
            child = entry[3]
            if child._entry is not entry or not child.num_queued or child.is_closed:
                heapq.heappop(ready)
                continue
            if not child.has_grown:
                return child
            heapq.heapreplace(ready, child._make_entry())
        return None

    def _make_entry(self, priority: int = 0) -> Entry:
        position = self.counter + self.quantum * (self.rows + self.promised + 1) / self.weight
        self.has_grown = False
        entry = self._entry = (priority, position, self.ticket, self)
        return entry


@dataclass(eq=False, repr=False, slots=True)
class Flow(FairShare):
    """Requests of one adapter, or of the base, of one tenant in one lane."""

    in_step: dict[str, FairPlace] = field(default_factory=dict)
    """Requests with a row, by id."""
    cursor: int = 0
    """Number of queued requests that this plan has looked at."""
    path: tuple[Flow, FairShare, FairShare] = field(init=False)
    """The flow, its tenant and its lane."""
    queue: list[tuple[SortKey, FairPlace]] = field(default_factory=list)
    """Requests without a row, first to be served first."""

    def __post_init__(self) -> None:
        tenant = self.parent
        if tenant is None or tenant.parent is None:
            raise ValueError("a flow belongs to a tenant, and a tenant to a lane")
        self.path = (self, tenant, tenant.parent)

    def check(self) -> tuple[int, int, set[str]]:
        """See `FairShare.check`."""
        queued = [place.request_id for _, place in self.queue]
        return self._check_counts(len(queued), len(self.in_step), {*queued, *self.in_step})

    def push(self, place: FairPlace) -> None:
        """Queue a request by its `queue_key`."""
        index = bisect_left(self.queue, place.queue_key, key=_sort_key)
        self.queue.insert(index, (place.queue_key, place))
        if index < self.cursor:
            self.cursor += 1  # it lost its row in this plan, and waits for the next

    def pop(self, place: FairPlace) -> None:
        """Take a request out of the queue."""
        index = bisect_left(self.queue, place.queue_key, key=_sort_key)
        del self.queue[index]
        if index < self.cursor:
            self.cursor -= 1

    def look(self) -> FairPlace | None:
        """Next request that this plan has not looked at."""
        if self.cursor >= len(self.queue):
            return None
        self.cursor += 1
        return self.queue[self.cursor - 1][1]

    def _make_entry(self, priority: int = 0) -> Entry:
        """Make the entry with the priority of the next request.

        A tenant's own priorities go before the shares of its adapters.
        """
        if self.cursor < len(self.queue):
            priority = self.queue[self.cursor][1].priority
        return FairShare._make_entry(self, priority)


Entry = tuple[int, float, int, FairShare]
"""Entry of the heap of a share's children: priority, position, ticket, child. No two have the same ticket."""


class ChildRows:
    """Rows of the children of a share.

    Args:
        node: The share.
    """

    def __init__(self, node: FairShare) -> None:
        self._node = node
        farthest = 0.0
        most = 0.0
        # There may be as many as rows; `share.now` would be a call for each.
        for share in node.stepping.values():
            position = share.counter + share.quantum * share.rows / share.weight
            rows = (share.rows - 1) / share.weight
            farthest = position if position > farthest else farthest
            most = rows if rows > most else most
        self.farthest = farthest
        """Position of the child that makes way first."""
        self.most = most
        """Most rows that a child keeps when it gives one, over its weight."""

    @cached_property
    def shares(self) -> list[FairShare]:
        """Children with rows, the one that makes way first at the beginning."""
        return sorted(self._node.stepping.values(), key=attrgetter("now"), reverse=True)


def charge_shares(units: Mapping[FairShare, float]) -> None:
    """Count service of shares below the root."""
    for share, amount in units.items():
        share.has_grown = True
        counter = share.counter = share.counter + amount / share.weight
        if share.parent is not None and counter > share.parent._ceiling:
            share.parent._ceiling = counter
