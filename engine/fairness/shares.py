"""The tree of shares that the fair order keeps: lanes, tenants in them, their adapters, and the requests of these.

A share knows how much service it was given, how many rows it has in the step, and which of its children is next.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from operator import attrgetter, itemgetter
from typing import TypeVar, cast

from manylora.engine.fairness.inner_order import SortKey
from manylora.engine.scheduling.request_state import RequestState
from manylora.errors import EngineError

MAX_IDLE_SHARES = 4096
"""If there are more idle shares than this, only those with a counter ahead of all active ones are remembered."""
ShareT = TypeVar("ShareT", bound="Share")
_sort_key = itemgetter(0)
"""Of an entry of a queue."""


@dataclass(eq=False, repr=False, slots=True)
class Share:
    """A lane, a tenant in it, or an adapter of that tenant: what it was given, and what it has in the step."""

    parent: Share | None
    """What it is a part of; None for the root."""
    key: object
    """Its name in the parent."""
    weight: float
    """Its part of the parent's service, in proportion to its siblings' weights."""
    quantum: float
    """Units of service; see `manylora.engine.fairness.fair_order`."""
    ticket: int
    """Counts up; breaks ties."""
    counter: float = 0.0
    """Units of service over weight."""
    rows: int = 0
    """Requests of it in the step."""
    promised: int = 0
    """Requests of it that were looked at in this plan and have no row."""
    num_alive: int = 0
    """Requests of it, waiting or running."""
    num_queued: int = 0
    """Requests of it without a row."""
    is_closed: bool = False
    """Whether this plan looks at no more requests of it."""
    has_grown: bool = False
    """Whether its place became larger since the parent last had it in order."""
    children: dict[object, Share] = field(default_factory=dict)
    stepping: dict[object, Share] = field(default_factory=dict)
    """Children with rows."""
    idle: dict[object, Share] = field(default_factory=dict)
    """Children without requests that are remembered."""
    ready: list[Entry] = field(default_factory=list)
    """A heap of the children that have queued requests: priority, place, ticket. Only a child's last entry counts,
    and its place has become larger since if it `has_grown`."""
    _ceiling: float = 0.0
    """The largest counter that a child ever had."""
    _touched: list[Share] = field(default_factory=list)
    """Children whose last entry may be too large, or missing."""
    _is_touched: bool = False
    _entry: Entry | None = None
    """The last one in the parent's heap."""

    @property
    def now(self) -> float:
        """Its place with the rows that it has: the largest makes way first."""
        return self.counter + self.quantum * self.rows / self.weight

    @property
    def after(self) -> float:
        """Its place with one more row: the smallest gets the next one."""
        return self.counter + self.quantum * (self.rows + 1) / self.weight

    def child(
        self, kind: type[ShareT], key: object, weight: float, credit: float, ticket: int
    ) -> ShareT:
        """The child of that name, with this weight from now on, for a request that comes; counters of the past stay.

        One that had all it wanted so far keeps at most `credit` units of what it left to others.
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

    def retire(self, child: Share) -> None:
        """A child has no requests any more. Its counter is remembered as long as it could matter."""
        del self.children[child.key]
        self.idle[child.key] = child
        if not self.children and self.parent is not None:
            # The next child is lifted to the largest counter, which is at least that of each of these.
            self.idle.clear()
            self.ready.clear()
            self._touched.clear()
        elif len(self.idle) > MAX_IDLE_SHARES:
            least = self.now_served()
            self.idle = {key: idle for key, idle in self.idle.items() if idle.counter > least}
            for key in list(self.idle)[: len(self.idle) - MAX_IDLE_SHARES // 2]:
                del self.idle[key]

    def now_served(self) -> float:
        """The least counter of all children that have rows and want more, or the largest of all where none does."""
        counters = (child.counter for child in self.stepping.values() if child.num_queued)
        return min(counters, default=self._ceiling)

    def check(self) -> tuple[int, int, set[str]]:
        """Verify the counts of this share and of all below it.

        Returns:
            Requests without a row, requests in the step, and the ids of all.

        Raises:
            EngineError: A share counts other requests than it has.
        """
        parts = [child.check() for child in self.children.values()]
        queued, rows = sum(part[0] for part in parts), sum(part[1] for part in parts)
        return self._check_counts(queued, rows, set().union(*(part[2] for part in parts)))

    def _check_counts(
        self, queued: int, rows: int, request_ids: set[str]
    ) -> tuple[int, int, set[str]]:
        counted = (self.num_queued, self.rows, self.num_alive)
        if self.parent is not None and counted != (queued, rows, queued + rows):
            raise EngineError(
                f"a share has {queued} requests queued and {rows} in the step, and counts {counted}"
            )
        return queued, rows, request_ids

    def touch(self) -> None:
        """Its place may be smaller now, or it has queued requests again."""
        if not self._is_touched and self.parent is not None:
            self._is_touched = True
            self.parent._touched.append(self)

    def first(self) -> Share | None:
        """The child whose request is next."""
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
        place = self.counter + self.quantum * (self.rows + self.promised + 1) / self.weight
        self._entry, self.has_grown = (priority, place, self.ticket, self), False
        return self._entry


@dataclass(eq=False, repr=False, slots=True)
class Flow(Share):
    """The requests of one adapter, or of the base, of one tenant in one lane."""

    in_step: dict[str, RequestState] = field(default_factory=dict)
    """By request id."""
    cursor: int = 0
    """How many of the queue this plan has looked at."""
    path: tuple[Flow, Share, Share] = field(init=False)
    """Itself, its tenant and its lane."""
    queue: list[tuple[SortKey, RequestState]] = field(default_factory=list)
    """Requests without a row, first to be served first."""

    def __post_init__(self) -> None:
        tenant = self.parent
        if tenant is None or tenant.parent is None:
            raise ValueError("a flow belongs to a tenant, and a tenant to a lane")
        self.path = (self, tenant, tenant.parent)

    def check(self) -> tuple[int, int, set[str]]:
        """See `Share.check`."""
        queued = [state.request_id for _, state in self.queue]
        return self._check_counts(len(queued), len(self.in_step), {*queued, *self.in_step})

    def push(self, key: SortKey, state: RequestState) -> None:
        """Queue a request."""
        index = bisect_left(self.queue, key, key=_sort_key)
        self.queue.insert(index, (key, state))
        if index < self.cursor:
            self.cursor += 1  # it lost its row in this plan, and waits for the next

    def pop(self, state: RequestState) -> None:
        """Take a request out of the queue."""
        index = bisect_left(self.queue, state.queue_key, key=_sort_key)
        del self.queue[index]
        if index < self.cursor:
            self.cursor -= 1

    def look(self) -> RequestState | None:
        """The next request that this plan has not looked at."""
        if self.cursor >= len(self.queue):
            return None
        self.cursor += 1
        return self.queue[self.cursor - 1][1]

    def _make_entry(self, priority: int = 0) -> Entry:
        """With the priority of the next request: a tenant's own priorities go before the shares of its adapters."""
        if self.cursor < len(self.queue):
            priority = self.queue[self.cursor][1].priority
        return Share._make_entry(self, priority)


Entry = tuple[int, float, int, Share]
"""Of the heap of a share's children: priority, place, ticket, child. No two have the same ticket."""


class ChildRows:
    """What the children of a share have in the step.

    Args:
        node: The share.
    """

    def __init__(self, node: Share) -> None:
        self._node = node
        farthest = most = 0.0
        for share in (
            node.stepping.values()
        ):  # there may be as many as rows; `share.now` would be a call for each
            place = share.counter + share.quantum * share.rows / share.weight
            rows = (share.rows - 1) / share.weight
            farthest = place if place > farthest else farthest
            most = rows if rows > most else most
        self.farthest = farthest
        """The place of the child that makes way first."""
        self.most = most
        """The most rows that a child keeps when it gives one, over its weight."""

    @cached_property
    def shares(self) -> list[Share]:
        """Children with rows, the one that makes way first at the beginning."""
        return sorted(self._node.stepping.values(), key=attrgetter("now"), reverse=True)


def charge_shares(units: Mapping[Share, float]) -> None:
    """Count service of shares that have a parent."""
    for share, amount in units.items():
        share.has_grown = True
        counter = share.counter = share.counter + amount / share.weight
        if share.parent is not None and counter > share.parent._ceiling:
            share.parent._ceiling = counter
