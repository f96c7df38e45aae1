"""Chooses a replica for each request: those of an adapter in rendezvous order, others where least runs.

Thaler and Ravishankar, "Using Name-Based Mappings to Increase Hit Rates" (1998).
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """What decides where a request goes."""

    adapter: str | None
    """Digest of the adapter version; None is the base."""
    units: float
    """Predicted work, about one unit per prompt token and two per token of output."""
    tenant: str = ""
    affinity: bytes | None = None
    """Requests with one value go to one replica."""
    held_by: str | None = None
    """The only server that has the weights."""
    copies: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Replica:
    """A replica that may be asked."""

    name: str
    boot_id: str
    url: str
    is_ready: bool


class Router:
    """Knows the replicas, and what this gateway has sent to each."""

    def __init__(self) -> None:
        self._replicas: list[Replica] = []
        self._in_flight = Counter[str]()

    def set_replicas(self, replicas: Iterable[Replica]) -> None:
        """Replace all."""
        self._replicas = list(replicas)

    def report(self, name: str, boot_id: str, *, backlog_s: float, rate: float, tiers: Mapping[str, str]) -> None:
        """Take what a replica says of itself."""

    def order(self, target: Target, exclude: Collection[str] = ()) -> list[Replica]:
        """The replica to ask, and those to ask after it; empty if none is ready."""
        ready = [each for each in self._replicas if each.is_ready and each.name not in exclude]
        if target.held_by is not None:
            return [each for each in ready if each.name == target.held_by]
        if target.adapter is None:
            return sorted(ready, key=lambda each: self._in_flight[each.name])
        key = target.adapter
        return sorted(ready, key=lambda each: hashlib.blake2b(f"{key} {each.name}".encode()).digest())

    def sent(self, name: str, _target: Target) -> None:
        """Count a request in flight."""
        self._in_flight[name] += 1

    def ended(self, name: str, _target: Target) -> None:
        """Count its end."""
        self._in_flight[name] -= 1

    def failed(self, name: str) -> None:
        """A replica could not be reached."""

    def answered(self, name: str) -> None:
        """A replica answered."""

    def weight_share(self, _tenant: str, _name: str) -> float:
        """The part of the tenant's work that goes to this replica."""
        return 1.0

    def may_retry(self) -> bool:
        """Whether another try is within the budget."""
        return True

    def snapshot(self) -> dict[str, dict[str, Any]]:
        """What is known of each replica, by name."""
        return {name: {"in_flight": count} for name, count in self._in_flight.items()}
