"""What the kernel benchmark calls and makes of its timings, on small shapes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from weft.adapters.lora.layout import adapter_pages
from weft.benchmarks.engine import kernels
from weft.benchmarks.engine.kernels import MIXES, KernelBench, Machine, Work, arena_pages, figures
from weft.benchmarks.main import main
from weft.benchmarks.model_shapes import MODELS, ModelShape

SMALL = ModelShape("small", num_layers=2, hidden=64, intermediate=160, num_heads=4, num_kv_heads=2)
CPU = torch.device("cpu")


def test_every_operation_is_timed_beside_its_floor(
    measure: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(kernels, "MODELS", (SMALL,))
    monkeypatch.setattr(kernels, "CALLS", 2)
    monkeypatch.setattr(kernels, "PROMPT_TOKENS", 32)
    monkeypatch.setattr(kernels, "measure_machine", lambda _: Machine(1e10, 1e11, 0.0))
    operations = measure("kernels", "--model small --rows 2,8")["operations"]
    assert all(found["us"] > 0 and found["floor_us"] > 0 for found in operations.values())
    for name in (
        "SiLU and product, 2 rows",
        "attention, context 1024, 8 rows",
        "LoRA gate_up, 8 rows, 8 of ranks 8 to 64",
    ):
        assert name in operations
    assert "LoRA qkv, 2 rows, 8 of rank 8" not in operations, "there are not rows enough for all adapters"
    assert capsys.readouterr().out.splitlines()[-1].startswith('{"benchmark": "kernels"')


def test_int8_is_timed_beside_bfloat16(measure: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "MODELS", (SMALL,))
    monkeypatch.setattr(kernels, "CALLS", 2)
    monkeypatch.setattr(kernels, "measure_machine", lambda _: Machine(1e10, 1e11, 0.0))
    result = measure("kernels", "--model small --rows 2 --contexts 300,1000 --kv-dtype int8")
    wide, int8 = (result["operations"][f"attention, context 1000{kind}, 2 rows"] for kind in ("", " of int8"))
    queries = 2 * 2 * 64 * 2
    assert int8["floor_us"] == pytest.approx((2 * 1000 * 2 * 2 * (16 + 4) + queries) / 1e10 * 1e6)
    assert wide["floor_us"] == pytest.approx((2 * 1000 * 2 * 2 * (16 * 2) + queries) / 1e10 * 1e6)


def test_a_context_that_the_pages_do_not_hold_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(kernels, "MODELS", (SMALL,))
    longest = (arena_pages(SMALL) - 1) * SMALL.geometry().page_tokens
    assert main("kernels", ["--model", "small", "--contexts", f"8,{longest + 1}"]) == 2
    assert f"--contexts must be at most {longest}" in capsys.readouterr().err


def test_lora_reads_the_weights_of_the_adapters_of_its_rows() -> None:
    bench = KernelBench(SMALL, CPU)
    qkv, out, gate_up, down = bench.lora((8, 16), rows=4)
    x, y = 4 * 64 * 2, 4 * 64 * 2
    assert out.num_bytes == (8 + 16) * (64 + 64) * 2 + x + 2 * y
    assert down.num_bytes > gate_up.num_bytes / 4 > 0
    before = [work.run(0) for work in (qkv, out, gate_up, down)]
    assert before == [None] * 4


def test_adapters_that_the_pages_do_not_hold_are_refused() -> None:
    with pytest.raises(ValueError, match=r"expected adapters of fewer than \d+ pages, got \(64, 64, 64"):
        KernelBench(SMALL, CPU).lora((64,) * 32, rows=32)


def test_the_floor_is_the_slowest_of_memory_arithmetic_and_launch() -> None:
    machine = Machine(bytes_per_s=1e9, flops_per_s=1e12, launch_s=1e-6)
    assert machine.floor_s(Work("", print, 1e6)) == pytest.approx(1e-3)
    assert machine.floor_s(Work("", print, 1e3, 1e10)) == pytest.approx(1e-2)
    assert machine.floor_s(Work("", print, 1.0)) == 1e-6
    found = figures([Work("nothing", lambda _: None, 1e6)], machine, " at all")["nothing at all"]
    assert found["ratio"] == pytest.approx(found["us"] / 1e3)


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_the_arena_holds_the_adapters_of_every_mix(model: ModelShape) -> None:
    pages = arena_pages(model)
    base, geometry = model.base(), model.geometry()
    largest = 32 * adapter_pages({(i, m): 16 for i in range(base.num_layers) for m in range(7)}, base, geometry)
    assert largest < pages < 2 * max(largest, 512)


def test_each_mix_is_timed_before_the_next_takes_its_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks: list[int] = []
    benches: list[KernelBench] = []

    def bench(*arguments: Any) -> KernelBench:
        benches.append(KernelBench(*arguments))
        return benches[0]

    def note(works: Sequence[Work], *_: object) -> dict[str, dict[str, float]]:
        if works[0].name.startswith("LoRA qkv"):
            ranks.append(int(benches[0].tables.host_ranks[0, 0, 0]))
        return {works[0].name: {"us": 1.0, "floor_us": 1.0, "ratio": 1.0}}

    monkeypatch.setattr(kernels, "MODELS", (SMALL,))
    monkeypatch.setattr(kernels, "measure_machine", lambda _: Machine(1e10, 1e11, 0.0))
    monkeypatch.setattr(kernels, "KernelBench", bench)
    monkeypatch.setattr(kernels, "figures", note)
    assert main("kernels", ["--model", "small", "--rows", "32"]) == 0
    assert ranks == [mix[0] for mix in MIXES.values()] == [16, 8, 8, 24, 16]
