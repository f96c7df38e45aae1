"""Adapters on the CPU: the weights of those in the running batch are held outside their pages, side by side.

One product serves many adapters whose weights lie in one bank, and packed weights are faster still. So adapters are
copied into banks; pages stay the truth, and what is held can be dropped at any time.

No step waits for that. An adapter that is not held, or not yet in whole, is read from its pages (`page_step`), and a
step moves a bounded number of bytes. A new adapter goes to the first bank with free columns, so that a batch that
changes all the time costs one copy per change. Once nothing was missing for `STABLE_STEPS`, the banks are packed; where
another grouping, for just the adapters in use, costs much less, new banks are built aside before and take the place of
the old ones when they are complete. Adapters beyond the limit stay in their pages.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from weft.adapters.bank_step import BankStep
from weft.adapters.base_shape import SITES, BaseShape
from weft.adapters.lora_step import LoraStep
from weft.adapters.page_step import PagedAdapter, PageStep
from weft.adapters.product_cost import MAX_DECODE_ROWS, ProductCost
from weft.adapters.segments import Segment, build_segments
from weft.adapters.tables import AdapterTables
from weft.adapters.weight_bank import AdapterKey, MakeLinear, WeightBank, bank_bytes, column_widths
from weft.memory.arena import Arena

STABLE_STEPS = 8
"""Steps without a missing adapter after which banks are improved."""
RECENT_STEPS = 16
"""An adapter that was used in so many steps is reckoned to be used again."""
REGROUP_GAIN = 1.25
"""How much cheaper another grouping must be to copy all weights again."""
WORK_SHARE = 12
"""A step may copy one in so many bytes of the base's linear weights, and free as many. Two cores of an EPYC copy 9 GB/s
into new memory and read weights in products at 7 GB/s, so copying makes a decode step at most a tenth longer."""
PACK_COST = 12
"""Packing a byte takes as long as copying so many."""


@dataclass(slots=True)
class StepWork:
    """Bytes of weights that steps moved for steps to come."""

    copied: int = 0
    """Into banks, their allocation included."""
    packed: int = 0
    freed: int = 0


@dataclass(slots=True)
class _Held:
    key: AdapterKey
    bank: WeightBank
    last_use: int
    num_filled: int = 0
    """Of its layers and sites, in order, those that are in the bank."""


@dataclass(slots=True)
class _Regroup:
    """Banks in the making, for just these adapters."""

    keys: list[AdapterKey]
    banks: list[WeightBank]
    held: list[_Held]


class BatchWeights:
    """Prepares steps on the CPU. Not thread-safe.

    Args:
        arena: Holds the adapters' pages.
        tables: Say where in it they are.
        base: Shape of the base model.
        limit_bytes: Most bytes that are held.
        make_linear: Lays out a weight for fast products; None keeps to plain ones.
    """

    def __init__(
        self,
        arena: Arena,
        tables: AdapterTables,
        base: BaseShape,
        limit_bytes: int,
        make_linear: MakeLinear | None = None,
    ) -> None:
        self._arena = arena
        self._tables = tables
        self._limit_bytes = limit_bytes
        self._make_linear = make_linear
        row_weights = np.array([m.in_features + m.out_features for m in base.modules], dtype=np.int64)
        self._column_weights = row_weights * base.num_layers
        self._calls = (len(SITES) + len(base.modules)) * base.num_layers
        self._costs = ProductCost.of(arena.dtype)
        self.bank_columns = self._costs.bank_columns(int(self._column_weights.sum()), self._calls)
        """Columns per module of a bank for adapters that come and go."""
        self._num_pieces = base.num_layers * len(SITES)
        base_weights = sum(m.in_features * m.out_features for m in base.modules) * base.num_layers
        self.step_bytes = base_weights * arena.dtype.itemsize // WORK_SHARE
        """Bytes that a step copies at most, but for the last piece."""
        self._banks: list[WeightBank] = []
        self._held: dict[int, _Held] = {}
        """By slot."""
        self._paged: dict[AdapterKey, PagedAdapter] = {}
        """Adapters that the last step read from their pages."""
        self._regroup: _Regroup | None = None
        self._discarded: deque[tuple[int, object]] = deque()
        """Weights to be freed, with their bytes."""
        self._discarded_bytes = 0
        self._step = 0
        self._last_miss = 0
        self._is_grouped = True
        self.rebuilds = 0
        """How often the banks were built anew since start."""
        self.work = StepWork()
        """What was done since start."""

    @property
    def num_bytes(self) -> int:
        """Bytes held, at most `limit_bytes`."""
        return self._live_bytes + self._discarded_bytes

    @property
    def _live_bytes(self) -> int:
        building = self._regroup.banks if self._regroup is not None else []
        return sum(bank.num_bytes for bank in (*self._banks, *building))

    def prepare(self, row_slots: Sequence[int], generations: Mapping[int, int], /) -> LoraStep | None:
        """Prepare the adapters of a step, once for all layers; the contract is `LoraBatcher.prepare`."""
        ranks = self._tables.host_ranks
        segments = [segment for segment in build_segments(row_slots) if ranks[segment.slot].any()]
        if not segments:
            return None
        self._step += 1
        self._free_discarded()
        keys = [AdapterKey(segment.slot, generations[segment.slot]) for segment in segments]
        if self._regroup is not None and self._regroup.keys != keys:
            self._give_up_regroup()
        missing = self._touch(keys)
        if self._regroup is not None:
            self._build(self._regroup)
        elif self._hold_all(keys, missing):
            self._last_miss = self._step
        elif self._step - self._last_miss >= STABLE_STEPS and self._has_all_recent(len(keys)):
            self._improve(keys, segments)
        return self._make_step(keys, segments)

    def _free_discarded(self) -> None:
        budget = self.step_bytes
        while self._discarded and budget > 0:
            num_bytes, _ = self._discarded.popleft()
            self._discarded_bytes -= num_bytes
            self.work.freed += num_bytes
            budget -= num_bytes

    def _discard(self, parts: Sequence[tuple[int, object]]) -> None:
        self._discarded.extend(parts)
        self._discarded_bytes += sum(num_bytes for num_bytes, _ in parts)

    def _touch(self, keys: Sequence[AdapterKey]) -> list[AdapterKey]:
        """Mark adapters as used, drop what their slots held before, and return those that are not held."""
        missing = []
        for key in keys:
            held = self._held.get(key.slot)
            # An adapter that was away while its columns were filled cannot go on in a bank that was packed since.
            if held is not None and (held.key != key or (not self._is_filled(held) and _has_packed(held.bank))):
                self._drop(held)
                held = None
            if held is None:
                missing.append(key)
            else:
                held.last_use = self._step
        return missing

    def _hold_all(self, keys: Sequence[AdapterKey], missing: Sequence[AdapterKey]) -> bool:
        """Give missing adapters columns and go on filling those; returns whether any was missing or not yet filled."""
        for key in missing:
            self._hold(key)
        is_filling = self._fill([self._held[key.slot] for key in keys if key.slot in self._held])
        return bool(missing) or is_filling

    def _is_filled(self, held: _Held) -> bool:
        return held.num_filled == self._num_pieces

    def _hold(self, key: AdapterKey) -> None:
        """Give an adapter columns where there is room; without room it stays in its pages only."""
        bank = self._reserve_in_a_bank(key)
        if bank is None:
            self._drop_unused_columns()
            bank = self._reserve_in_a_bank(key)
        widths = column_widths(self._tables, key.slot)
        roomy = np.where(widths > 0, np.maximum(widths, self.bank_columns), 0)
        for capacity in (roomy, widths):
            if bank is None and self._make_room(bank_bytes(self._arena, self._tables, capacity)):
                bank = WeightBank(self._arena, self._tables, capacity)
                bank.reserve(key)
                self._banks.append(bank)
        if bank is not None:
            self._held[key.slot] = _Held(key, bank, self._step)
            self._is_grouped = False

    def _reserve_in_a_bank(self, key: AdapterKey) -> WeightBank | None:
        return next((bank for bank in self._banks if not _has_packed(bank) and bank.reserve(key)), None)

    def _drop_unused_columns(self, *, packed: bool = False) -> None:
        for held in list(self._held.values()):
            if (packed or not _has_packed(held.bank)) and held.last_use + RECENT_STEPS < self._step:
                self._drop(held)

    def _make_room(self, num_bytes: int) -> bool:
        """Discard banks that this step does not use, longest unused first, and then packed copies.

        Returns:
            Whether there is room now; what is discarded takes some steps to be freed.
        """
        if num_bytes > self._limit_bytes:
            return False
        last_use = {id(bank): 0 for bank in self._banks}
        for held in self._held.values():
            last_use[id(held.bank)] = max(last_use[id(held.bank)], held.last_use)
        unused = [bank for bank in self._banks if last_use[id(bank)] < self._step]
        for bank in sorted(unused, key=lambda bank: last_use[id(bank)]):
            if self._live_bytes + num_bytes > self._limit_bytes:
                self._drop_bank(bank)
        for bank in self._banks:
            if self._live_bytes + num_bytes > self._limit_bytes:
                self._discard(bank.unpack())
        return self.num_bytes + num_bytes <= self._limit_bytes

    def _drop(self, held: _Held) -> None:
        held.bank.remove(held.key)
        del self._held[held.key.slot]
        if not held.bank.columns:
            self._banks.remove(held.bank)
            self._discard(held.bank.take_apart())

    def _drop_bank(self, bank: WeightBank) -> None:
        self._banks.remove(bank)
        for key in bank.columns:
            del self._held[key.slot]
        self._discard(bank.take_apart())

    def _fill(self, held_adapters: Sequence[_Held]) -> bool:
        """Copy weights of adapters that are in this step, so that their pages are theirs, into their columns.

        Returns:
            Whether there was anything to copy.
        """
        budget = self.step_bytes
        waiting = [held for held in held_adapters if not self._is_filled(held)]
        for held in waiting:
            while budget > 0 and not self._is_filled(held):
                copied = held.bank.fill(held.key, *divmod(held.num_filled, len(SITES)))
                held.num_filled += 1
                self.work.copied += copied
                budget -= copied
        return bool(waiting)

    def _has_all_recent(self, num_used: int) -> bool:
        """Whether this step has all adapters that were used of late."""
        return num_used == sum(held.last_use + RECENT_STEPS >= self._step for held in self._held.values())

    def _improve(self, keys: list[AdapterKey], segments: Sequence[Segment]) -> None:
        has_left_overs = len(self._held) > 2 * len(keys)
        if not self._is_grouped or has_left_overs:
            if has_left_overs:
                self._drop_unused_columns(packed=True)
            rows = [min(segment.length, MAX_DECODE_ROWS) for segment in segments]
            widths = [column_widths(self._tables, key.slot) for key in keys]
            weights = [int((self._column_weights * columns).sum()) for columns in widths]
            groups = self._costs.partition(rows, weights, self._calls)
            cost = sum(self._costs.product(sum(rows[group]), sum(weights[group]), self._calls) for group in groups)
            is_wasteful = has_left_overs and self._num_columns() > 2 * sum(columns.sum() for columns in widths)
            self._is_grouped = self._cost(keys, rows) <= REGROUP_GAIN * cost and not is_wasteful
            if not self._is_grouped:
                self._start_regroup(keys, [(group, np.sum(widths[group], axis=0)) for group in groups])
        elif self._make_linear is not None:
            self._pack(self._make_linear)

    def _num_columns(self) -> int:
        return sum(sum(bank.capacity) for bank in self._banks)

    def _cost(self, keys: Sequence[AdapterKey], rows: Sequence[int]) -> int:
        """Cost of a step with the banks as they are: a bank's product takes all rows from its first to its last."""
        cost = 0
        for bank in self._banks:
            places = [place for place, key in enumerate(keys) if key in bank.columns]
            if places:
                num_rows = sum(rows[places[0] : places[-1] + 1])
                num_weights = int((self._column_weights * np.array(bank.capacity)).sum())
                cost += self._costs.product(num_rows, num_weights, self._calls)
        return cost

    def _start_regroup(self, keys: list[AdapterKey], groups: Sequence[tuple[slice, npt.NDArray[np.int64]]]) -> None:
        """Begin banks for just these adapters, beside those that there are if both have room."""
        num_bytes = sum(bank_bytes(self._arena, self._tables, capacity) for _, capacity in groups)
        if not self._make_room(num_bytes):
            if self._discarded:
                return  # there may be room once it is freed
            # The old ones make way, at once; all is read from pages until the new ones are complete.
            for bank in list(self._banks):
                self._drop_bank(bank)
            self.work.freed += self._discarded_bytes
            self._discarded.clear()
            self._discarded_bytes = 0
        regroup = _Regroup(keys, [], [])
        for group, capacity in groups:
            bank = WeightBank(self._arena, self._tables, capacity)
            regroup.banks.append(bank)
            for key in keys[group]:
                bank.reserve(key)
                regroup.held.append(_Held(key, bank, self._step))
        self._regroup = regroup

    def _build(self, regroup: _Regroup) -> None:
        """Go on with new banks, and let them take the place of the old ones when they are complete."""
        if self._fill(regroup.held):
            return
        self._regroup = None
        for bank in list(self._banks):
            self._drop_bank(bank)
        self._banks = regroup.banks
        for held in regroup.held:
            held.last_use = self._step
            self._held[held.key.slot] = held
        self._is_grouped = True
        self.rebuilds += 1

    def _give_up_regroup(self) -> None:
        if self._regroup is not None:
            for bank in self._regroup.banks:
                self._discard(bank.take_apart())
            self._regroup = None

    def _pack(self, make_linear: MakeLinear) -> None:
        budget = self.step_bytes
        for bank in self._banks:
            if bank.is_packed or (not bank.is_packing and self.num_bytes + bank.plain_bytes > self._limit_bytes):
                continue
            while budget > 0 and not bank.is_packed:
                packed = bank.pack_next(make_linear)
                self.work.packed += packed
                budget -= PACK_COST * packed

    def _make_step(self, keys: Sequence[AdapterKey], segments: Sequence[Segment]) -> LoraStep:
        by_bank: dict[int, list[tuple[AdapterKey, Segment]]] = {}
        paged: list[tuple[AdapterKey, Segment]] = []
        for key, segment in zip(keys, segments, strict=True):
            held = self._held.get(key.slot)
            if held is None or not self._is_filled(held):
                paged.append((key, segment))
            else:
                by_bank.setdefault(id(held.bank), []).append((key, segment))
        parts: list[LoraStep] = [
            BankStep(bank, self._tables, by_bank[id(bank)]) for bank in self._banks if id(bank) in by_bank
        ]
        self._paged = {
            key: self._paged.get(key) or PagedAdapter(self._arena, self._tables, key.slot) for key, _ in paged
        }
        if paged:
            parts.append(PageStep([(self._paged[key], segment) for key, segment in paged]))
        return parts[0] if len(parts) == 1 else _JoinedStep(parts)


def _has_packed(bank: WeightBank) -> bool:
    return bank.is_packed or bank.is_packing


class _JoinedStep:
    """Several parts of one step, for different rows."""

    def __init__(self, parts: Sequence[LoraStep]) -> None:
        self._parts = parts

    def apply(self, layer: int, site: int, x: torch.Tensor, y: torch.Tensor) -> None:
        """Add the deltas of all parts; the contract is `LoraStep.apply`."""
        for part in self._parts:
            part.apply(layer, site, x, y)
