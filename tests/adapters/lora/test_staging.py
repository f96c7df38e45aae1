"""Tables reach a GPU without a wait for the step that runs, and no staged row is overwritten before it was copied."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from adapters_factory import tiny_base
from residency_parts import tiny_geometry
from weft.adapters.lora import tables as tables_module
from weft.adapters.lora.layout import plan_layout
from weft.adapters.lora.tables import NUM_STAGED, AdapterTables, StagingRing
from weft.memory.arena import mark

BASE = tiny_base()


class Stream:
    """A stream of a GPU that is busy with a step: nothing launched on it is done before somebody waits for it."""

    def __init__(self) -> None:
        self.launched: list[Callable[[], object]] = []
        self.num_done = 0
        self.num_waits = 0

    def run_until(self, end: int) -> None:
        for work in self.launched[self.num_done : end]:
            work()
        self.num_done = max(self.num_done, end)

    def mark(self, device: torch.device) -> Event:
        assert device.type == "cuda"
        return Event(self, len(self.launched))


class Event:
    """Occurs when what was launched before it is done."""

    def __init__(self, stream: Stream, position: int) -> None:
        self._stream, self._position = stream, position

    def synchronize(self) -> None:
        self._stream.num_waits += 1
        self._stream.run_until(self._position)


class DeviceRow:
    """A row of a table on the device."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self.content: torch.Tensor | None = None

    def copy_(self, source: torch.Tensor, *, non_blocking: bool) -> None:
        assert non_blocking
        self._stream.launched.append(lambda: self._read(source))

    def _read(self, source: torch.Tensor) -> None:
        self.content = source.clone()


def test_each_copy_gets_what_was_staged_for_it_however_long_the_step_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    stream, empty = Stream(), torch.empty
    monkeypatch.setattr(tables_module, "mark", stream.mark)
    are_pinned: list[bool] = []

    def unpinned(*shape: Any, pin_memory: bool, **named: Any) -> torch.Tensor:
        are_pinned.append(pin_memory)
        return empty(*shape, **named)

    monkeypatch.setattr(torch, "empty", unpinned)
    ring = StagingRing(6, torch.device("cuda"))
    assert are_pinned == [True]
    published: list[tuple[Any, list[torch.Tensor]]] = []
    for number in range(NUM_STAGED * 5 // 2):
        numbers = torch.full((2, 2), number, dtype=torch.int32), torch.full((2,), number / 2)
        rows: Any = DeviceRow(stream), DeviceRow(stream)
        ring.copy(list(zip(rows, numbers, strict=True)))
        published.append((rows, [each.clone() for each in numbers]))
        for each in numbers:
            each.zero_()
        assert stream.num_waits == max(number + 1 - NUM_STAGED, 0), "nobody waits before the ring is full"
    stream.run_until(len(stream.launched))
    for copied, wanted in published:
        for row, each in zip(copied, wanted, strict=True):
            assert torch.equal(row.content, each)
            assert row.content.dtype == each.dtype


class Copies(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Copies to the device that are launched while it is on."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: list[tuple[torch.Tensor, torch.Tensor, bool]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if args and isinstance(args[0], torch.Tensor) and args[0].is_meta and func is torch.ops.aten.copy_.default:
            target, source, *rest = args
            self.seen.append((target, source.clone(), bool(rest and rest[0])))
        return func(*args, **(kwargs or {}))


def test_an_adapter_is_three_copies_that_nobody_waits_for() -> None:
    tables = AdapterTables(3, BASE, 64, tiny_geometry(BASE), torch.device("meta"))
    ranks = {(0, 0): 20, (1, 6): 3}
    layout = plan_layout(ranks, BASE, tiny_geometry(BASE))
    with Copies() as copies:
        tables.write(1, layout, list(range(1, layout.num_pages + 1)), ranks, {(0, 0): 0.5, (1, 6): 2.0})
    of_device = (tables.offsets, tables.ranks, tables.scalings)
    of_host = (tables.host_offsets, tables.host_ranks, tables.host_scalings)
    for (target, source, is_async), table, host in zip(copies.seen, of_device, of_host, strict=True):
        assert is_async
        assert target.shape == table[1].shape
        assert target.storage_offset() == table[1].storage_offset()
        assert torch.equal(source, torch.from_numpy(host[1]))
        assert source.count_nonzero() > 0


def test_on_a_cpu_nothing_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StagingRing, "copy", lambda *_: 1 / 0)
    tables = AdapterTables(3, BASE, 64, tiny_geometry(BASE), torch.device("cpu"))
    layout = plan_layout({(0, 0): 8}, BASE, tiny_geometry(BASE))
    tables.write(1, layout, list(range(1, layout.num_pages + 1)), {(0, 0): 8}, {(0, 0): 0.5})
    assert tables.scalings[1, 0, 0] == 0.5


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_table_is_written_while_a_step_runs_and_seen_by_the_next_one() -> None:
    device = torch.device("cuda")
    tables = AdapterTables(3, BASE, 64, tiny_geometry(BASE), device)
    layout = plan_layout({(0, 0): 8}, BASE, tiny_geometry(BASE))
    torch.cuda.synchronize()
    torch.cuda._sleep(1_000_000_000)  # type: ignore[no-untyped-call]
    running = mark(device)
    tables.write(1, layout, list(range(1, layout.num_pages + 1)), {(0, 0): 8}, {(0, 0): 0.5})
    seen = tables.scalings.clone()
    is_running = not running.query()  # type: ignore[no-untyped-call]
    assert is_running, "the write waited for the step"
    tables.write(1, layout, list(range(1, layout.num_pages + 1)), {(0, 0): 8}, {(0, 0): 0.25})
    assert seen[1, 0, 0].item() == 0.5
    assert tables.scalings[1, 0, 0].item() == 0.25
