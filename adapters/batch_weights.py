"""Adapters on the CPU: the weights of those in the running batch are held outside their pages, side by side.

Gathering rows from pages in every step costs more than the arithmetic. So adapters are copied once into banks, where
one product serves many of them; pages stay the truth, and what is held can be dropped at any time.

A new adapter goes to the first bank with free columns, so that a batch that changes all the time costs one copy per
change. Once nothing was missing for `STABLE_STEPS`, the banks are packed, one per step; where another grouping, for
just the adapters in use, costs much less, they are built anew before. Adapters beyond the limit are read from their
pages, which is right and slow.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from weft.adapters.bank_step import BankStep
from weft.adapters.base_shape import SITES, BaseShape
from weft.adapters.lora_step import LoraStep
from weft.adapters.paged_lora import PagedLora
from weft.adapters.product_cost import MAX_DECODE_ROWS, partition, product_cost
from weft.adapters.segments import Segment, build_segments
from weft.adapters.tables import AdapterTables
from weft.adapters.weight_bank import AdapterKey, MakeLinear, WeightBank, bank_bytes, column_widths
from weft.memory.arena import Arena

BANK_COLUMNS = 64
"""Columns per module of a bank for adapters that come and go."""
STABLE_STEPS = 8
"""Steps without a missing adapter after which banks are improved."""
RECENT_STEPS = 16
"""An adapter that was used in so many steps is reckoned to be used again."""


REGROUP_GAIN = 1.25
"""How much cheaper another grouping must be to copy all weights again."""


@dataclass(slots=True)
class _Held:
    key: AdapterKey
    bank: WeightBank
    last_use: int


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
        self._paged = PagedLora(arena, tables, base)
        row_weights = np.array([m.in_features + m.out_features for m in base.modules], dtype=np.int64)
        self._column_weights = row_weights * base.num_layers
        self._calls = (len(SITES) + len(base.modules)) * base.num_layers
        self._banks: list[WeightBank] = []
        self._held: dict[int, _Held] = {}
        """By slot."""
        self._step = 0
        self._last_miss = 0
        self._is_grouped = True
        self.rebuilds = 0
        """How often the banks were built anew since start."""

    @property
    def num_bytes(self) -> int:
        """Bytes held, at most `limit_bytes`."""
        return sum(bank.num_bytes for bank in self._banks)

    def prepare(self, row_slots: Sequence[int], generations: Mapping[int, int], /) -> LoraStep | None:
        """Prepare the adapters of a step, once for all layers; the contract is `LoraBatcher.prepare`."""
        ranks = self._tables.host_ranks
        segments = [segment for segment in build_segments(row_slots) if ranks[segment.slot].any()]
        if not segments:
            return None
        self._step += 1
        keys = [AdapterKey(segment.slot, generations[segment.slot]) for segment in segments]
        missing = self._touch(keys)
        for key in missing:
            self._hold(key)
        if missing:
            self._last_miss = self._step
        elif self._step - self._last_miss >= STABLE_STEPS and self._has_all_recent(len(keys)):
            self._improve(keys, segments)
        return self._make_step(keys, segments, len(row_slots))

    def _touch(self, keys: Sequence[AdapterKey]) -> list[AdapterKey]:
        """Mark adapters as used, drop what their slots held before, and return those that are not held."""
        missing = []
        for key in keys:
            held = self._held.get(key.slot)
            if held is not None and held.key != key:
                self._drop(held)
                held = None
            if held is None:
                missing.append(key)
            else:
                held.last_use = self._step
        return missing

    def _hold(self, key: AdapterKey) -> None:
        """Copy an adapter to where there is room; without room it stays in its pages only."""
        bank = self._add_to_a_bank(key)
        if bank is None:
            self._drop_unused_columns()
            bank = self._add_to_a_bank(key)
        widths = column_widths(self._tables, key.slot)
        roomy = np.where(widths > 0, np.maximum(widths, BANK_COLUMNS), 0)
        for capacity in (roomy, widths):
            if bank is None and self._make_room(bank_bytes(self._arena, self._tables, capacity)):
                bank = self._new_bank(capacity)
                bank.add(key)
        if bank is not None:
            self._held[key.slot] = _Held(key, bank, self._step)
            self._is_grouped = False

    def _add_to_a_bank(self, key: AdapterKey) -> WeightBank | None:
        return next((bank for bank in self._banks if not bank.is_packed and bank.add(key)), None)

    def _drop_unused_columns(self) -> None:
        for held in list(self._held.values()):
            if not held.bank.is_packed and held.last_use + RECENT_STEPS < self._step:
                self._drop(held)

    def _make_room(self, num_bytes: int) -> bool:
        """Drop banks that this step does not use, longest unused first, and then packed copies."""
        if num_bytes > self._limit_bytes:
            return False
        last_use = {id(bank): 0 for bank in self._banks}
        for held in self._held.values():
            last_use[id(held.bank)] = max(last_use[id(held.bank)], held.last_use)
        unused = [bank for bank in self._banks if last_use[id(bank)] < self._step]
        for bank in sorted(unused, key=lambda bank: last_use[id(bank)]):
            if self.num_bytes + num_bytes <= self._limit_bytes:
                return True
            self._drop_bank(bank)
        for bank in self._banks:
            if self.num_bytes + num_bytes <= self._limit_bytes:
                return True
            bank.unpack()
        return self.num_bytes + num_bytes <= self._limit_bytes

    def _new_bank(self, capacity: npt.NDArray[np.int64]) -> WeightBank:
        bank = WeightBank(self._arena, self._tables, capacity)
        self._banks.append(bank)
        return bank

    def _drop(self, held: _Held) -> None:
        held.bank.remove(held.key)
        del self._held[held.key.slot]
        if not held.bank.columns:
            self._banks.remove(held.bank)

    def _drop_bank(self, bank: WeightBank) -> None:
        self._banks.remove(bank)
        for key in bank.columns:
            del self._held[key.slot]

    def _has_all_recent(self, num_used: int) -> bool:
        """Whether this step has all adapters that were used of late."""
        return num_used == sum(held.last_use + RECENT_STEPS >= self._step for held in self._held.values())

    def _improve(self, keys: Sequence[AdapterKey], segments: Sequence[Segment]) -> None:
        if not self._is_grouped or len(self._held) > 2 * len(keys):
            rows = [min(segment.length, MAX_DECODE_ROWS) for segment in segments]
            widths = [column_widths(self._tables, key.slot) for key in keys]
            weights = [int((self._column_weights * columns).sum()) for columns in widths]
            groups = partition(rows, weights, self._calls)
            cost = sum(product_cost(sum(rows[group]), sum(weights[group]), self._calls) for group in groups)
            if len(self._held) > 2 * len(keys) or self._cost(keys, rows) > REGROUP_GAIN * cost:
                self._rebuild(keys, [(group, np.sum(widths[group], axis=0)) for group in groups])
            self._is_grouped = True
        elif self._make_linear is not None:
            self._pack_one(self._make_linear)

    def _cost(self, keys: Sequence[AdapterKey], rows: Sequence[int]) -> int:
        """Cost of a step with the banks as they are: a bank's product takes all rows from its first to its last."""
        cost = 0
        for bank in self._banks:
            places = [place for place, key in enumerate(keys) if key in bank.columns]
            if places:
                num_rows = sum(rows[places[0] : places[-1] + 1])
                num_weights = int((self._column_weights * np.array(bank.capacity)).sum())
                cost += product_cost(num_rows, num_weights, self._calls)
        return cost

    def _rebuild(self, keys: Sequence[AdapterKey], groups: Sequence[tuple[slice, npt.NDArray[np.int64]]]) -> None:
        """Build banks for just these adapters, which are in the arena now; the others may have left it."""
        self._banks.clear()
        self._held.clear()
        for group, capacity in groups:
            bank = self._new_bank(capacity)
            for key in keys[group]:
                bank.add(key)
                self._held[key.slot] = _Held(key, bank, self._step)
        self.rebuilds += 1

    def _pack_one(self, make_linear: MakeLinear) -> None:
        for bank in self._banks:
            if not bank.is_packed and self.num_bytes + bank.num_bytes <= self._limit_bytes:
                bank.pack(make_linear)
                return

    def _make_step(self, keys: Sequence[AdapterKey], segments: Sequence[Segment], num_rows: int) -> LoraStep:
        by_bank: dict[int, list[tuple[AdapterKey, Segment]]] = {}
        paged: list[Segment] = []
        for key, segment in zip(keys, segments, strict=True):
            held = self._held.get(key.slot)
            if held is None:
                paged.append(segment)
            else:
                by_bank.setdefault(id(held.bank), []).append((key, segment))
        parts: list[LoraStep] = [
            BankStep(bank, self._tables, by_bank[id(bank)]) for bank in self._banks if id(bank) in by_bank
        ]
        from_pages = self._paged.prepare_segments(paged, num_rows)
        if from_pages is not None:
            parts.append(from_pages)
        return parts[0] if len(parts) == 1 else _JoinedStep(parts)


class _JoinedStep:
    """Several parts of one step, for different rows."""

    def __init__(self, parts: Sequence[LoraStep]) -> None:
        self._parts = parts

    def apply(self, layer: int, site: int, x: torch.Tensor, y: torch.Tensor) -> None:
        for part in self._parts:
            part.apply(layer, site, x, y)
