"""Tables reach a GPU without a wait for the step that runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from adapters_factory import tiny_base
from manylora.adapters.lora.layout import plan_layout
from manylora.adapters.lora.step import AdapterTables
from manylora.memory.arena import mark
from residency_parts import tiny_geometry

BASE = tiny_base()


class Copies(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Copies to the device that are launched while it is on."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: list[tuple[torch.Tensor, torch.Tensor, bool]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (
            args
            and isinstance(args[0], torch.Tensor)
            and args[0].is_meta
            and func is torch.ops.aten.copy_.default
        ):
            target, source, *rest = args
            self.seen.append((target, source, bool(rest and rest[0])))
        return func(*args, **(kwargs or {}))


def test_an_adapter_is_three_copies_that_nobody_waits_for() -> None:
    tables = AdapterTables(3, BASE, 64, tiny_geometry(BASE), torch.device("meta"))
    ranks = {(0, 0): 20, (1, 6): 3}
    layout = plan_layout(ranks, BASE, tiny_geometry(BASE))
    with Copies() as copies:
        tables.write(
            1, layout, list(range(1, layout.num_pages + 1)), ranks, {(0, 0): 0.5, (1, 6): 2.0}
        )
    of_device = (tables.offsets, tables.ranks, tables.scalings)
    of_host = (tables.host_offsets, tables.host_ranks, tables.host_scalings)
    for (target, source, is_async), table, host in zip(
        copies.seen, of_device, of_host, strict=True
    ):
        assert is_async
        assert target.shape == table[1].shape
        assert target.storage_offset() == table[1].storage_offset()
        assert torch.equal(source, torch.from_numpy(host[1]))
        assert source.count_nonzero() > 0
        assert source.data_ptr() != host[1].ctypes.data, (
            "the host may change its row before it is copied"
        )


def test_on_a_cpu_tables_are_those_of_the_host() -> None:
    tables = AdapterTables(3, BASE, 64, tiny_geometry(BASE), torch.device("cpu"))
    layout = plan_layout({(0, 0): 8}, BASE, tiny_geometry(BASE))
    tables.write(1, layout, list(range(1, layout.num_pages + 1)), {(0, 0): 8}, {(0, 0): 0.5})
    assert tables.scalings[1, 0, 0] == 0.5
    assert tables.offsets.data_ptr() == tables.host_offsets.ctypes.data


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
