"""What the kernel benchmark calls and makes of its timings, on small shapes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from weft.benchmarks import kernels
from weft.benchmarks.kernels import KernelBench, Machine, Work, figures, main
from weft.benchmarks.model_shapes import ModelShape
from weft.errors import ConfigError

SMALL = ModelShape("small", num_layers=2, hidden=64, intermediate=160, num_heads=4, num_kv_heads=2)
CPU = torch.device("cpu")


def test_every_operation_is_timed_beside_its_floor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(kernels, "MODELS", (SMALL,))
    monkeypatch.setattr(kernels, "WARM_UP_STEPS", 20)
    monkeypatch.setattr(kernels, "CALLS", 2)
    monkeypatch.setattr(kernels, "PROMPT_TOKENS", 32)
    monkeypatch.setattr(kernels, "measure_machine", lambda _: Machine(1e10, 1e11, 0.0))
    options = kernels._parser()
    options.set_defaults(model="small")
    monkeypatch.setattr(kernels, "_parser", lambda: options)
    path = tmp_path / "r.json"
    assert main(["--device", "cpu", "--rows", "2,8", "--pages", "512", "--json", str(path)]) == 0
    operations = json.loads(path.read_text())["operations"]
    assert all(found["us"] > 0 and found["floor_us"] > 0 for found in operations.values())
    for name in ("rope, 2 rows", "attention, context 1024, 8 rows", "LoRA gate_up, 8 rows, 8 of ranks 8 to 64"):
        assert name in operations
    assert "LoRA qkv, 2 rows, 8 of rank 8" not in operations, "there are not rows enough for all adapters"
    assert capsys.readouterr().out.splitlines()[-1].startswith('{"benchmark": "kernels"')


def test_lora_reads_the_weights_of_the_adapters_of_its_rows() -> None:
    bench = KernelBench(SMALL, CPU, 2, 64)
    qkv, out, gate_up, down = bench.lora((8, 16), rows=4)
    x, y = 4 * 64 * 2, 4 * 64 * 2
    assert out.num_bytes == (8 + 16) * (64 + 64) * 2 + x + 2 * y
    assert down.num_bytes > gate_up.num_bytes / 4 > 0
    before = [work.run(0) for work in (qkv, out, gate_up, down)]
    assert before == [None] * 4


def test_the_floor_is_the_slowest_of_memory_arithmetic_and_launch() -> None:
    machine = Machine(bytes_per_s=1e9, flops_per_s=1e12, launch_s=1e-6)
    assert machine.floor_s(Work("", print, 1e6)) == pytest.approx(1e-3)
    assert machine.floor_s(Work("", print, 1e3, 1e10)) == pytest.approx(1e-2)
    assert machine.floor_s(Work("", print, 1.0)) == 1e-6
    found = figures(Work("", lambda _: None, 1e6), CPU, machine)
    assert found["ratio"] == pytest.approx(found["us"] / 1e3)


def test_adapters_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ConfigError, match="--pages"):
        KernelBench(SMALL, CPU, 2, 2).lora((64,) * 8, rows=8)
