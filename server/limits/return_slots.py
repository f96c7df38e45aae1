"""When the refused requests of one tenant may come back, so that each who comes at the told time is let in.

A queue outside the engine that holds no requests, only times: each refusal takes the next time at which the tenant's
share of the engine can compute it. Not everybody comes back, so times are given out more densely by the share of those
who did, as seats are overbooked. Whoever sends the same body with the same key at its time or soon after is recognised.
"""

from __future__ import annotations

import heapq
import math
from collections import deque

GRACE_S = 5.0
"""A slot can be claimed until so long after its time."""
MISSED_S = 1.0
"""Who has not come so long after its time probably never comes; longer where others came later than that."""
EARLY_S = 0.05
"""Clocks and sleeps of clients are not exact: a claim counts from so long before its time."""
MAX_SLOT_S = 3600.0
"""No slot is further away."""
START_CLAIMED = 0.7
"""Expected share of claims before any is known. If too high, the first told times are too long for nothing; if too low,
the first who come back find no room and are told a second time."""
MIN_CLAIMED = 0.005
FIRST_ONLY = 16_384
NOISE = 1.25
"""Less change of what fits into a second is none."""
_CLAIMS = 6.0
"""The share of claimed slots is an average over about so many claims: the fewer there are, the more slots it takes."""
_MEMORY = 256
"""Most slots of that average."""
_NO_SLOT = [(-math.inf, 0, 0)]


class ReturnSlots:
    """Slots of one tenant. Each operation is O(log n) in the open slots, but for finding room anew (`NOISE`).

    Slots are of two kinds: the first of a request, and those of what was sent again before its time. The latter may be
    other requests with the same body, which come back, or an impatient client, who will have been served by then; each
    kind has a share of claims of its own.
    """

    def __init__(self) -> None:
        self.claimed_shares = [START_CLAIMED, START_CLAIMED]
        """By kind, of the slots whose time has come, the share that was claimed lately."""
        self._booked: dict[int, list[float]] = {}
        """Units of both kinds by second."""
        self._densities = (0.0, 0.0)
        self._first_free_s = 0
        """No second before has room; looked for anew when much more fits into a second."""
        self._pruned_s = 0
        self._now_s = -math.inf
        self._patience_s = MISSED_S
        self._again_s = 0.0
        self._by_time: list[tuple[float, int, int]] = []
        self._missed: deque[tuple[float, int]] = deque()
        self._num_known = [0, 0]
        """By kind, how often `claimed_shares` was changed."""
        self._by_key: dict[int, list[tuple[float, int, int]]] = {}
        self._num_open = 0

    def __len__(self) -> int:
        """Slots that are neither claimed nor expired."""
        return self._num_open

    def give(
        self, key: int, now_s: float, earliest_s: float, units: float, units_per_s: float, *, num_left: int
    ) -> float:
        """Take the next free time.

        Args:
            key: By which the request is recognised.
            now_s: Monotonic seconds.
            earliest_s: The slot is not before this.
            units: What the request costs.
            units_per_s: What can be computed for the tenant; above 0.
            num_left: Slots that may still be opened; the last `FIRST_ONLY` not for what is sent again. Without one,
                the time is told and nobody recognised.

        Returns:
            Monotonic second of the slot.
        """
        kind = int(key in self._by_key)
        second = max(int(earliest_s), self._first_with_room(units_per_s))
        while self._expected(second) >= units_per_s:
            second += 1
        self._first_free_s = second
        slot_s = min(max(earliest_s, second + self._expected(second) / units_per_s), now_s + MAX_SLOT_S)
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
        """The same for a request that came at its time, and found no room: it goes before all who have no slot yet."""
        self.claim(key)
        slot_s = max(self._again_s, earliest_s)
        self._again_s = slot_s + units / units_per_s
        return self._open(key, slot_s, turn=2, kind=0)

    def turn(self, key: int, now_s: float) -> int:
        """-1: its slot is to come; 0: it has none; 1: one has come; 2: one has, and the slot before it was in vain."""
        slot_s, turn, _ = self._by_key.get(key, _NO_SLOT)[0]
        return turn if slot_s <= now_s + EARLY_S else -1

    def claim(self, key: int) -> None:
        """Use up the first slot of this request, which must have one."""
        self._patience_s = max(self._patience_s, self._now_s - self._by_key[key][0][0] + MISSED_S / 2)
        kind = self._remove_first(key)
        self._learn(kind, was_claimed=True)

    def expire(self, now_s: float) -> None:
        """Close the slots that nobody claimed in time."""
        for second in range(self._pruned_s, min(int(now_s), self._pruned_s + 2 * int(MAX_SLOT_S)) * bool(self._booked)):
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
        """Units for which somebody will come in this second."""
        booked = self._booked.get(second)
        return booked[0] * self.claimed_shares[0] + booked[1] * self.claimed_shares[1] if booked else 0.0

    def _first_with_room(self, units_per_s: float) -> int:
        """The first second that may have room, from the start where much more fits into one than before."""
        densities = (units_per_s / self.claimed_shares[0], units_per_s / self.claimed_shares[1])
        changes = [new / old if old else math.inf for new, old in zip(densities, self._densities, strict=True)]
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
        """Whether a slot of this request, of this time or before, was not claimed."""
        slots = self._by_key.get(key)
        return slots is not None and slots[0][0] <= slot_s

    def _remove_first(self, key: int) -> int:
        """Close the first slot; returns its kind."""
        slots = self._by_key[key]
        _, _, kind = heapq.heappop(slots)
        if not slots:
            del self._by_key[key]
        self._num_open -= 1
        return kind
