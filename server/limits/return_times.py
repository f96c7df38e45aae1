"""Times at which the refused requests of one tenant may come back: a request that comes at its time is let in.

A slot is a time without a request: each refusal takes the next time at which the tenant's share of the engine can
compute it. Not every client comes back, so slots are overbooked, by the share of slots that were claimed lately. A
request is recognised at its time, or soon after, by the same body sent with the same key.
"""

from __future__ import annotations

import heapq
import math
from collections import deque

GRACE_S = 5.0
"""Seconds after its time for which a slot can be claimed."""
MISSED_S = 1.0
"""Seconds after which a request that has not come probably never comes; more if others came later than that."""
EARLY_S = 0.05
"""Seconds that a request may come before its time: clocks and sleeps of clients are not exact."""
MAX_SLOT_S = 3600.0
"""Seconds until the latest slot."""
START_CLAIMED = 0.7
"""Expected share of claims before any is known. If it is too high, the first times are longer than necessary; if too
low, the first requests that come back find no room."""
MIN_CLAIMED = 0.005
FIRST_ONLY = 16_384
NOISE = 1.25
"""A smaller change of what fits into a second is ignored."""
_CLAIMS = 6.0
"""Claims over which the share of claimed slots is averaged."""
_MEMORY = 256
"""Most slots in that average."""
_NO_SLOT = [(-math.inf, 0, 0)]


class ReturnTimes:
    """Slots of one tenant. Each operation is O(log n) in the open slots, except a new search for room (`NOISE`).

    There are two kinds of slots, each with its own share of claims: 0 is the first slot of a body, 1 is for a body that
    was sent again before its time. That may be another request with the same body, which comes back, or an impatient
    client, which does not.
    """

    def __init__(self) -> None:
        self.claimed_shares = [START_CLAIMED, START_CLAIMED]
        """By kind: the share of the latest slots that was claimed."""
        self._booked: dict[int, list[float]] = {}
        """Units of both kinds by second."""
        self._densities = (0.0, 0.0)
        self._first_free_s = 0
        """No earlier second has room; searched again when much more fits into a second."""
        self._pruned_s = 0
        self._now_s = -math.inf
        self._patience_s = MISSED_S
        self._again_s = 0.0
        self._by_time: list[tuple[float, int, int]] = []
        self._missed: deque[tuple[float, int]] = deque()
        self._num_known = [0, 0]
        """By kind: number of changes of `claimed_shares`."""
        self._by_key: dict[int, list[tuple[float, int, int]]] = {}
        self._num_open = 0

    def __len__(self) -> int:
        """Number of slots that are neither claimed nor expired."""
        return self._num_open

    def give(
        self,
        key: int,
        now_s: float,
        earliest_s: float,
        units: float,
        units_per_s: float,
        *,
        num_left: int,
    ) -> float:
        """Take the next free time.

        Args:
            key: Recognises the request.
            now_s: Monotonic seconds.
            earliest_s: Earliest time of the slot.
            units: Cost of the request.
            units_per_s: What the engine computes for the tenant; above 0.
            num_left: Slots that may still be opened. The last `FIRST_ONLY` are only for first slots. Without a slot the
                request is told a time and is not recognised.

        Returns:
            Monotonic second of the slot.
        """
        kind = int(key in self._by_key)
        second = max(int(earliest_s), self._first_with_room(units_per_s))
        while self._expected(second) >= units_per_s:
            second += 1
        self._first_free_s = second
        slot_s = min(
            max(earliest_s, second + self._expected(second) / units_per_s), now_s + MAX_SLOT_S
        )
        if num_left <= kind * FIRST_ONLY:
            return max(self._by_key[key][0][0], now_s + 1) if kind else slot_s
        while units > 0 and second < now_s + MAX_SLOT_S:
            taken = min(units, (units_per_s - self._expected(second)) / self.claimed_shares[kind])
            if taken > 0:
                self._booked.setdefault(second, [0.0, 0.0])[kind] += taken
                units -= taken
            second += 1
        return self._open(key, slot_s, turn=1, kind=kind)

    def give_again(self, key: int, earliest_s: float, units: float, units_per_s: float) -> float:
        """Like `give`, for a request that came at its time and found no room: before all requests without a slot."""
        self.claim(key)
        slot_s = max(self._again_s, earliest_s)
        self._again_s = slot_s + units / units_per_s
        return self._open(key, slot_s, turn=2, kind=0)

    def turn(self, key: int, now_s: float) -> int:
        """-1: too early for its slot; 0: no slot; 1: in time for its slot; 2: in time for the slot of `give_again`."""
        slot_s, turn, _ = self._by_key.get(key, _NO_SLOT)[0]
        return turn if slot_s <= now_s + EARLY_S else -1

    def claim(self, key: int) -> None:
        """Use the first slot of this request, which must have one."""
        self._patience_s = max(
            self._patience_s, self._now_s - self._by_key[key][0][0] + MISSED_S / 2
        )
        kind = self._remove_first(key)
        self._learn(kind, was_claimed=True)

    def expire(self, now_s: float) -> None:
        """Close the slots that were not claimed in time."""
        for second in range(
            self._pruned_s,
            min(int(now_s), self._pruned_s + 2 * int(MAX_SLOT_S)) * bool(self._booked),
        ):
            self._booked.pop(second, None)
        self._pruned_s = int(now_s)
        self._now_s = now_s
        while self._by_time and self._by_time[0][0] < now_s - self._patience_s:
            slot_s, key, kind = heapq.heappop(self._by_time)
            if self._is_open(slot_s, key):
                self._learn(kind, was_claimed=False)
                self._missed.append((slot_s, key))
        while self._missed and self._missed[0][0] < now_s - GRACE_S:
            slot_s, key = self._missed.popleft()
            if self._is_open(slot_s, key):
                self._remove_first(key)

    def _learn(self, kind: int, *, was_claimed: bool) -> None:
        share = self.claimed_shares[kind]
        self._num_known[kind] += 1
        self._patience_s += (MISSED_S - self._patience_s) / _MEMORY
        weight = max(share / _CLAIMS, 1 / _MEMORY, 1 / (3 + self._num_known[kind]))
        self.claimed_shares[kind] = max(MIN_CLAIMED, share + (was_claimed - share) * weight)

    def _expected(self, second: int) -> float:
        """Units that will probably be claimed in this second."""
        booked = self._booked.get(second)
        return (
            booked[0] * self.claimed_shares[0] + booked[1] * self.claimed_shares[1]
            if booked
            else 0.0
        )

    def _first_with_room(self, units_per_s: float) -> int:
        """The first second that may have room; searched from the start if much more fits into a second than before."""
        densities = (units_per_s / self.claimed_shares[0], units_per_s / self.claimed_shares[1])
        changes = [
            new / old if old else math.inf
            for new, old in zip(densities, self._densities, strict=True)
        ]
        if max(changes) > NOISE:
            self._first_free_s = 0
        if max(changes) > NOISE or min(changes) < 1 / NOISE:
            self._densities = densities
        return self._first_free_s

    def _open(self, key: int, slot_s: float, *, turn: int, kind: int) -> float:
        heapq.heappush(self._by_time, (slot_s, key, kind))
        heapq.heappush(self._by_key.setdefault(key, []), (slot_s, turn, kind))
        self._num_open += 1
        return slot_s

    def _is_open(self, slot_s: float, key: int) -> bool:
        """Return true if the request has an unclaimed slot of this time or earlier."""
        slots = self._by_key.get(key)
        return slots is not None and slots[0][0] <= slot_s

    def _remove_first(self, key: int) -> int:
        """Close the first slot of the request; returns its kind."""
        slots = self._by_key[key]
        _, _, kind = heapq.heappop(slots)
        if not slots:
            del self._by_key[key]
        self._num_open -= 1
        return kind
