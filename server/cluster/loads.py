"""Knowledge of a router: replicas with their loads, and sums that fade.

A replica's load is the work of all gateways there, in seconds. Reports say how much that is, but they may be seconds
old. This gateway's own requests are known exactly, so a report counts only for what it has beyond them.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from manylora.registry.servers import Server

SPAN_S = 10.0
"""An amount counts as 1/e of itself after this time."""
START_RATE = 20_000.0
"""Units per second of replicas while no rate is known: one is measured when steps are full, so before there is room."""
COLD_S = {"device": 0.0, "host": 0.005}
"""Seconds until an adapter in this place can be used."""
FETCH_S = 0.3
"""Seconds until an adapter can be used that is in neither place, or whose place is unknown."""
FIRST_EJECTION_S = 1.0
LONGEST_EJECTION_S = 30.0
_MASK = (1 << 64) - 1

Key = TypeVar("Key", bound=Hashable)
Entry = TypeVar("Entry")


@dataclass(slots=True, eq=False)
class ReplicaState:
    """One process of a replica as this gateway sees it."""

    server: Server
    """Its row; its state is what it reports."""
    in_flight: int = 0
    """Requests of this gateway there; those that were sent to an earlier process count until they end."""
    units: float = 0.0
    """Their predicted work."""
    load_s: float = 0.0
    """Predicted work of all gateways there."""
    others_s: float = 0.0
    """Work of other gateways there, in seconds."""
    rate: float = 0.0
    """Units per second; 0 is unknown."""
    tiers: Mapping[str, str] = field(default_factory=dict)
    """Where its adapters are, by digest."""
    reported_at_s: float | None = None
    """When its last report came; None before the first."""
    failures: int = 0
    """Ejections since the last answer."""
    ejected_until_s: float = -math.inf
    """When it is asked again."""
    hash: int = field(init=False)

    def __post_init__(self) -> None:
        self.hash = hash64(self.server.name.encode())

    def cold_s(self, digest: str) -> float:
        """Seconds until this adapter can be used there."""
        return COLD_S.get(self.tiers.get(digest, ""), FETCH_S)

    def eject(self, now_s: float) -> None:
        """Ask it no more for a while. Requests that fail together count once."""
        if now_s >= self.ejected_until_s:
            self.ejected_until_s = now_s + min(
                FIRST_EJECTION_S * 2**self.failures, LONGEST_EJECTION_S
            )
            self.failures += 1

    def admit(self) -> None:
        """Ask it again, and forget its failures."""
        self.failures = 0
        self.ejected_until_s = -math.inf


class FadingSum:
    """A sum of amounts, each of which counts less as time passes."""

    __slots__ = ("_at_s", "_value")

    def __init__(self) -> None:
        self._value = 0.0
        self._at_s = 0.0

    def add(self, amount: float, now_s: float) -> None:
        """Add an amount that counts in full now."""
        self._value = self.at(now_s) + amount
        self._at_s = now_s

    def at(self, now_s: float) -> float:
        """The sum now."""
        return self._value * math.exp((self._at_s - now_s) / SPAN_S)


def hash64(text: bytes) -> int:
    """64 bits that are the same in every process."""
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest())


def mix(left: int, right: int) -> int:
    """64 bits out of two hashes: the last steps of splitmix64, a tenth of the time of hashing both together."""
    mixed = ((left ^ right) * 0xBF58476D1CE4E5B9) & _MASK
    mixed = ((mixed ^ mixed >> 31) * 0x94D049BB133111EB) & _MASK
    return mixed ^ mixed >> 30


def ranked(digest: str, names: Iterable[str]) -> list[str]:
    """Names of replicas in the order of an adapter: its copies are on the first ones."""
    adapter = hash64(digest.encode())
    return sorted(names, key=lambda name: mix(adapter, hash64(name.encode())))


def drop_smaller_half(entries: dict[Key, Entry], units_of: Callable[[Entry], float]) -> None:
    """Delete the half of the entries that has the fewest units."""
    for key in sorted(entries, key=lambda key: units_of(entries[key]))[: len(entries) // 2]:
        del entries[key]
