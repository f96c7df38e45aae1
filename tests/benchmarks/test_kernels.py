"""The operations that benchmarks time, and their floors, on small shapes; and how they are timed on a CPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from manylora.benchmarks.engine.kernels import KernelBench, Machine, Work, call_s
from manylora.benchmarks.gpu import kernels, setup
from manylora.benchmarks.gpu.case_log import DONE
from manylora.benchmarks.main import main
from manylora.benchmarks.model_shapes import ModelShape

SMALL = ModelShape("small", num_layers=2, hidden=64, intermediate=160, num_heads=4, num_kv_heads=2)
CPU = torch.device("cpu")
NUM_PAGES = 256


def test_lora_reads_the_weights_of_the_adapters_of_its_rows() -> None:
    bench = KernelBench(SMALL, CPU, NUM_PAGES)
    qkv, out, gate_up, down = bench.lora((8, 16), rows=4)
    x, y = 4 * 64 * 2, 4 * 64 * 2
    assert out.num_bytes == (8 + 16) * (64 + 64) * 2 + x + 2 * y
    assert down.num_bytes > gate_up.num_bytes / 4 > 0
    before = [work.run(0) for work in (qkv, out, gate_up, down)]
    assert before == [None] * 4


def test_adapters_that_the_pages_do_not_hold_are_refused() -> None:
    with pytest.raises(
        ValueError, match=r"expected adapters of fewer than \d+ pages, got \(64, 64, 64"
    ):
        KernelBench(SMALL, CPU, NUM_PAGES).lora((64,) * 32, rows=32)


def test_attention_reads_keys_and_values_as_they_are_stored() -> None:
    (wide,), (int8,) = (
        KernelBench(SMALL, CPU, NUM_PAGES, kv_dtype).attention(2, 1000)
        for kv_dtype in ("auto", "int8")
    )
    queries = 2 * 2 * 64 * 2
    assert wide.num_bytes == 2 * 1000 * 2 * 2 * (16 * 2) + queries
    assert int8.num_bytes == 2 * 1000 * 2 * 2 * (16 + 4) + queries
    assert (wide.name, int8.name) == ("attention, context 1000", "attention, context 1000 of int8")
    for work in (wide, int8):
        found = work.run(1)
        assert isinstance(found, torch.Tensor)
        assert (found.shape, bool(found.isfinite().all())) == ((2, 4, 16), True)


def test_the_floor_is_the_slowest_of_memory_arithmetic_and_launch() -> None:
    machine = Machine(bytes_per_s=1e9, flops_per_s=1e12, launch_s=1e-6)
    assert machine.floor_s(Work("", print, 1e6)) == pytest.approx(1e-3)
    assert machine.floor_s(Work("", print, 1e3, 1e10)) == pytest.approx(1e-2)
    assert machine.floor_s(Work("", print, 1.0)) == 1e-6


def test_on_a_cpu_as_many_calls_warm_up_as_are_timed() -> None:
    calls: list[int] = []
    assert call_s(calls.append, CPU) > 0
    assert calls == list(range(10))


@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
def test_operations_of_a_cpu_are_timed_in_the_shape_of_a_model_that_it_serves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kv_dtype: str
) -> None:
    monkeypatch.setattr(setup, "QWEN", SMALL)
    monkeypatch.setattr(setup, "MAX_TOKENS", 1 << 13)
    monkeypatch.setattr(kernels, "MAX_TOKENS", 1 << 13)
    monkeypatch.setattr(
        setup, "measure_machine", lambda _, num_bytes, side: Machine(float(num_bytes), float(side))
    )
    only = "greedy|norm|1.of.rank.8|8.rows,.context.1,024"
    options = f"kernels --cpu --kv-dtype {kv_dtype} --out {tmp_path} --only {only}"
    assert main("gpu", options.split()) == DONE
    found = json.loads(
        (tmp_path / f"kernels-cpu{'' if kv_dtype == 'auto' else '-int8'}.json").read_text()
    )
    assert (found["gpu"], found["machine"]["flops_per_s"]) == (None, 1536)
    assert list(found["cases"]) == [
        *("attention, 8 rows, context 1,024", "greedy sampling, 32 rows", "norm and SiLU, 32 rows"),
        "LoRA, 32 rows, 1 of rank 8",
    ]
    assert not any("goal" in case for case in found["cases"].values()), "these are of a GPU"
    (part,) = found["cases"]["attention, 8 rows, context 1,024"]["parts"]
    assert part["name"].endswith(" of int8") is (kv_dtype == "int8")
    assert all(case["measured"] > 0 and case["floor"] > 0 for case in found["cases"].values())


def test_other_verbs_want_a_gpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main("gpu", ["step", "--cpu", "--out", str(tmp_path)]) == 2
    assert "--cpu is for kernels alone" in capsys.readouterr().err
