"""Which replica serves a request: highest random weight among replicas, k copies of a hot adapter, bounded load.

Each adapter has its own order of all replicas, by a hash of digest and name, so gateways agree without talking to each
other. Its requests go to the first k replicas of that order: k is 1 for most adapters, and more for those with a large
share of the work. If these have too much to do, the request goes to the first after them that has room, if that is
sooner even with the time to load the adapter. (Rendezvous hashing, with the bounded loads of Mirrokni et al.,
arXiv:1608.01350.) The router does no IO and is given its clock. Thread: one event loop.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from operator import attrgetter

from manylora.registry.servers import Server
from manylora.server.cluster.loads import (
    START_RATE,
    FadingSum,
    ReplicaState,
    drop_smaller_half,
    hash64,
    mix,
)

COPIES_PER_SHARE = 1.5
"""Copies of an adapter per replica that its work would fill."""
KEEP_COPIES_S = 60.0
"""Time for which an adapter keeps its copies after it needs fewer."""
BOUND = 1.15
"""Factor of the mean load above which, with `SLACK_S` more, a load is too high."""
SLACK_S = 0.05
"""Seconds above `BOUND` times the mean load from which a load is too high."""
EVEN = 1.05
"""Loads that differ by less than this factor, and by less than the slack, count as the same."""
SMOOTH_S = 10.0
"""Time over which reports of others' work are averaged. All gateways act on the same reports: if these are older than
this average, every gateway leaves and fills the same replicas at the same time, again and again."""
SURE_REQUESTS = 100
"""Recent requests with which the measured share of an adapter counts by half: few requests say little."""
RETRY_SHARE = 0.1
"""Retries per recent request."""
FREE_RETRIES = 3
"""Recent retries that are allowed in any case."""
MAX_ADAPTERS = 20_000
"""Adapters whose share and order are kept."""
SMALLEST_SHARE = 0.01
"""Least part of a tenant's weight at a replica."""

_load_of = attrgetter("load_s")


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Facts of a request that decide where it goes."""

    adapter: str | None
    """Digest of the adapter version; None is the base."""
    units: float
    """Predicted work: about one unit per prompt token and two per output token."""
    tenant: str = ""
    affinity: bytes | None = None
    """A session, or a hash of the prompt's beginning: requests with the same value go to the same replica while its
    load allows."""
    held_by: str | None = None
    """The only server that has the weights."""
    copies: int = 1
    """Replicas that a pin asks for."""


@dataclass(slots=True, eq=False)
class _Adapter:
    """Memory of one adapter."""

    hash: int
    units: FadingSum = field(default_factory=FadingSum)
    copies: int = 1
    copies_at_s: float = 0.0
    """Time at which it last needed all its copies."""
    ranked: list[ReplicaState] = field(default_factory=list)
    """All ready replicas; its copies are on the first ones."""
    epoch: int = 0
    """The membership that `ranked` is of."""


class Router:
    """Chooses replicas for the requests of one gateway."""

    def __init__(
        self, clock: Callable[[], float], random_source: random.Random | None = None
    ) -> None:
        self._clock = clock
        self._random = random_source or random.SystemRandom()
        self.states: dict[str, ReplicaState] = {}
        """States of replicas by name, to be read only; those that have left stay until their requests end."""
        self._ready: list[ReplicaState] = []
        self._epoch = 0
        """Counts changes of `_ready`."""
        self._ejected_until_s = -math.inf
        """When the last ejection ends."""
        self._adapters: dict[str, _Adapter] = {}
        self._running: dict[tuple[str, str], tuple[int, float]] = {}
        """Requests that run and their units, by tenant and replica; the replica is empty for the tenant's sum."""
        self._units = FadingSum()
        self._requests = FadingSum()
        self._retries = FadingSum()

    def set_replicas(self, replicas: Iterable[Server]) -> None:
        """Set the membership. A replica with a new boot id starts without load, tiers and failures."""
        members = {server.name: server for server in replicas}
        for name, server in members.items():
            state = self.states.get(name)
            if state is None:
                self.states[name] = ReplicaState(server)
            elif state.server.boot_id != server.boot_id:
                self.states[name] = ReplicaState(server, state.in_flight, state.units)
            else:
                state.server = server
        self.states = {
            name: state for name, state in self.states.items() if name in members or state.in_flight
        }
        ready = [self.states[name] for name in sorted(members) if members[name].state == "ready"]
        if ready != self._ready:
            self._ready = ready
            self._epoch += 1
        for state in ready:
            self._set_load(state)

    def report(
        self, name: str, boot_id: str, *, backlog_s: float, rate: float, tiers: Mapping[str, str]
    ) -> None:
        """Take in the newest state of a replica; ignored if it is of another process than the member's.

        Args:
            name: Its name.
            boot_id: Of the process that reports.
            backlog_s: Predicted work of its waiting and running requests, in seconds at `rate`.
            rate: Units per second that it computes when it is busy; 0 is unknown.
            tiers: Where its adapters are, by digest: `device`, `host`, or another word. Not copied.
        """
        state = self.states.get(name)
        if state is None or state.server.boot_id != boot_id:
            return
        state.rate = rate or state.rate
        state.tiers = tiers
        now_s = self._clock()
        others_s = max(0.0, backlog_s - state.units / self._rate(state))
        if state.reported_at_s is None:
            state.others_s = others_s
        else:
            state.others_s += (others_s - state.others_s) * -math.expm1(
                (state.reported_at_s - now_s) / SMOOTH_S
            )
        state.reported_at_s = now_s
        self._set_load(state)

    def order(self, target: Target, exclude: Collection[str] = ()) -> list[Server]:
        """The replica to ask, then those to try next; empty if there is none.

        Replicas that are ejected are in it only if there is no other.
        """
        now_s = self._clock()
        adapter = None if target.adapter is None else self._adapter(target.adapter, now_s)
        candidates = self._candidates(target, adapter, exclude, now_s)
        if not candidates:
            return []
        bound_s = BOUND * sum(map(_load_of, candidates)) / len(candidates) + SLACK_S
        if adapter is None:
            picked = self._pick_for_base(candidates, target.affinity, bound_s)
            candidates = sorted(candidates, key=_load_of)
        else:
            copies = self._copies(adapter, target.copies, now_s)
            picked = self._pick_home(candidates, copies, target, adapter.hash, bound_s)
        return [picked.server, *[state.server for state in candidates if state is not picked]]

    def sent(self, name: str, target: Target) -> None:
        """Count a request that is sent to this replica; called right after `order`, in the same membership."""
        now_s = self._clock()
        self._requests.add(1.0, now_s)
        self._units.add(target.units, now_s)
        if target.adapter is not None:
            self._adapter(target.adapter, now_s).units.add(target.units, now_s)
        self._count(name, 1, target)

    def ended(self, name: str, target: Target) -> None:
        """Count that a request which was sent there has ended, in whatever way."""
        self._count(name, -1, target)

    def failed(self, name: str) -> None:
        """Eject a replica that could not be reached or lost its connection: for 1 s, doubling to 30 s."""
        if state := self.states.get(name):
            state.eject(self._clock())
            self._ejected_until_s = max(self._ejected_until_s, state.ejected_until_s)

    def answered(self, name: str) -> None:
        """End the ejection of a replica and forget its failures."""
        if state := self.states.get(name):
            state.admit()

    def is_ejected(self, name: str) -> bool:
        """True if a replica that failed is still left out."""
        return name in self.states and self._clock() < self.states[name].ejected_until_s

    def weight_share(self, tenant: str, name: str) -> float:
        """The part of the tenant's running units that is at this replica, in (0, 1]; asked after `sent`."""
        total = self._units_of(tenant, "")
        return min(1.0, max(SMALLEST_SHARE, self._units_of(tenant, name) / total)) if total else 1.0

    def may_retry(self) -> bool:
        """Take one retry from the budget; False if nothing is left of it."""
        now_s = self._clock()
        if self._retries.at(now_s) + 1 > RETRY_SHARE * self._requests.at(now_s) + FREE_RETRIES:
            return False
        self._retries.add(1.0, now_s)
        return True

    def _candidates(
        self, target: Target, adapter: _Adapter | None, exclude: Collection[str], now_s: float
    ) -> list[ReplicaState]:
        """The replicas that may be asked, those with copies of the adapter first."""
        found = self._ready if adapter is None else self._ranked(adapter)
        if target.held_by is not None:
            found = [state for state in found if state.server.name == target.held_by]
        if exclude:
            found = [state for state in found if state.server.name not in exclude]
        if now_s < self._ejected_until_s:
            found = [state for state in found if now_s >= state.ejected_until_s] or found
        return found

    def _pick_for_base(
        self, candidates: list[ReplicaState], affinity: bytes | None, bound_s: float
    ) -> ReplicaState:
        if affinity is not None:
            favourite = _favourite(candidates, hash64(affinity))
            if favourite.load_s <= bound_s:
                return favourite
        first = int(self._random.random() * len(candidates))
        second = (first + 1 + int(self._random.random() * (len(candidates) - 1))) % len(candidates)
        return min(candidates[first], candidates[second], key=_load_of)

    def _pick_home(
        self,
        candidates: list[ReplicaState],
        copies: int,
        target: Target,
        adapter_hash: int,
        bound_s: float,
    ) -> ReplicaState:
        """The replica for an adapter's request: one with a copy, unless all of these have too much to do.

        Among copies that are about as loaded as the least loaded one, that where the tenant has the least: tenants that
        are spread alike over the replicas get service by their weights.
        """
        homes = candidates[:copies]
        if target.affinity is not None:
            favourite = _favourite(homes, mix(adapter_hash, hash64(target.affinity)))
            if favourite.load_s <= bound_s:
                return favourite
        picked = min(homes, key=_load_of)
        if picked.load_s <= bound_s:
            even = [state for state in homes if state.load_s <= EVEN * picked.load_s + SLACK_S]
            return min(
                even,
                key=lambda state: (self._units_of(target.tenant, state.server.name), state.load_s),
            )
        if target.adapter is not None:
            for state in candidates[copies:]:
                if (
                    state.load_s <= bound_s
                    and state.load_s + state.cold_s(target.adapter) < picked.load_s
                ):
                    return state
        return picked

    def _ranked(self, adapter: _Adapter) -> list[ReplicaState]:
        """The ready replicas in this adapter's order, which is kept until the membership changes."""
        if adapter.epoch != self._epoch:
            adapter.ranked = sorted(self._ready, key=lambda state: mix(adapter.hash, state.hash))
            adapter.epoch = self._epoch
        return adapter.ranked

    def _adapter(self, digest: str, now_s: float) -> _Adapter:
        adapter = self._adapters.get(digest)
        if adapter is None:
            if len(self._adapters) >= MAX_ADAPTERS:
                drop_smaller_half(self._adapters, lambda entry: entry.units.at(now_s))
            adapter = self._adapters[digest] = _Adapter(hash64(digest.encode()))
        return adapter

    def _share(self, adapter: _Adapter, now_s: float) -> float:
        """The adapter's part of all recent units."""
        units = self._units.at(now_s)
        requests = self._requests.at(now_s)
        return (
            adapter.units.at(now_s) / units * requests / (requests + SURE_REQUESTS)
            if units
            else 0.0
        )

    def _copies(self, adapter: _Adapter, pinned: int, now_s: float) -> int:
        """Number of replicas for its requests: it grows at once, and falls after `KEEP_COPIES_S` of less need."""
        share = self._share(adapter, now_s)
        needed = min(
            len(self._ready), max(1, pinned, math.ceil(COPIES_PER_SHARE * share * len(self._ready)))
        )
        if needed >= adapter.copies or now_s - adapter.copies_at_s > KEEP_COPIES_S:
            adapter.copies = needed
            adapter.copies_at_s = now_s
        return adapter.copies

    def _count(self, name: str, requests: int, target: Target) -> None:
        units = requests * target.units
        for key in ((target.tenant, ""), (target.tenant, name)):
            num, sum_units = self._running.get(key, (0, 0.0))
            self._running[key] = num + requests, sum_units + units
            if not num + requests:
                del self._running[key]
        if state := self.states.get(name):
            state.in_flight += requests
            state.units = state.units + units if state.in_flight else 0.0
            self._set_load(state)

    def _units_of(self, tenant: str, name: str) -> float:
        return self._running.get((tenant, name), (0, 0.0))[1]

    def _set_load(self, state: ReplicaState) -> None:
        state.load_s = state.others_s + state.units / self._rate(state)

    def _rate(self, state: ReplicaState) -> float:
        """Units per second of a replica; while it has not reported, the others' mean."""
        if state.rate:
            return state.rate
        rates = [other.rate for other in self._ready if other.rate]
        return sum(rates) / len(rates) if rates else START_RATE


def _favourite(candidates: list[ReplicaState], affinity: int) -> ReplicaState:
    return min(candidates, key=lambda state: mix(affinity, state.hash))
