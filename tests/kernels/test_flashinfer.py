"""When FlashInfer computes the attention of prompts, what it is given, and that it computes what Triton does."""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fake_flashinfer import FakeFlashInfer
from implementations import BF16, CPU, F16, F32, FLASHINFER, TORCH, TRITON, Implementation
from manylora.errors import ConfigError
from manylora.kernels.attention_batch import AttentionBatch
from manylora.kernels.dispatch import Kernels, kernels_for, with_flashinfer
from manylora.kernels.flashinfer import attention as flashinfer_attention
from manylora.kernels.flashinfer.attention import HEAD_DIMS, NUM_PLANS, FlashInferAttention
from manylora.kernels.flashinfer.probe import open_flashinfer
from manylora.kernels.kv_layer import AttentionNeeds, KvLayer
from numerics import assert_rows_close
from oracles import ORACLES
from scattered_kv import AttentionCase, ScatteredKv

IMPLEMENTATIONS = [FLASHINFER]
KERNELS = FLASHINFER.make()
"""With the stand-in, which computes what it should whatever becomes of the module that is tried."""
NEEDS = AttentionNeeds(
    setting="auto",
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    page_tokens=16,
    windows=(None, 4096, None),
    is_kv_int8=False,
)
CHUNKS = AttentionCase(((20, 50), (12, 12)), 4, 2, 64, 16, BF16)
AMONG_ITEMS = AttentionCase(((1, 30), (20, 50), (2, 40), (12, 12), (1, 0)), 4, 2, 64, 16, BF16)


@pytest.fixture
def module() -> FakeFlashInfer:
    return FakeFlashInfer()


@pytest.fixture
def machine(module: FakeFlashInfer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """One that has all that FlashInfer needs; its CUDA toolkit is in the folder."""
    compiler = tmp_path / "bin" / "nvcc"
    compiler.parent.mkdir()
    compiler.touch(mode=0o755)
    monkeypatch.setitem(sys.modules, "flashinfer", module)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    return tmp_path


def chosen(needs: AttentionNeeds = NEEDS, dtype: torch.dtype = BF16) -> Kernels:
    """What is chosen for a CPU, where other operations are in place of Triton."""
    return with_flashinfer(KERNELS, CPU, dtype, needs)


@pytest.mark.parametrize("setting", ["auto", "flashinfer"])
@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
def test_flashinfer_is_chosen_after_a_trial(
    setting: Any,
    dtype: torch.dtype,
    module: FakeFlashInfer,
    machine: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    kernels = chosen(replace(NEEDS, setting=setting), dtype)
    assert kernels == replace(
        KERNELS, paged_attention=kernels.paged_attention, attend=kernels.attend
    )
    assert kernels.attend.keywords == {"paged_attention": kernels.paged_attention}  # type: ignore[attr-defined]
    assert kernels.paged_attention.__func__ is FlashInferAttention.paged_attention  # type: ignore[attr-defined]
    assert module.num_runs == 2, "one for the layers with a window, and one for those without"
    assert [record.message for record in caplog.records] == [
        "attention of prompts runs in FlashInfer"
    ]


def test_flashinfer_can_be_ruled_out(module: FakeFlashInfer, machine: Path) -> None:
    assert chosen(replace(NEEDS, setting="triton")) is KERNELS
    assert module.num_wrappers == 0


def gone(monkeypatch: pytest.MonkeyPatch, module: FakeFlashInfer, machine: Path) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", None)


def broken(monkeypatch: pytest.MonkeyPatch, module: FakeFlashInfer, machine: Path) -> None:
    monkeypatch.delitem(sys.modules, "flashinfer")
    (machine / "flashinfer.py").write_text("raise OSError('no libcuda')\n")
    monkeypatch.syspath_prepend(str(machine))


def old(monkeypatch: pytest.MonkeyPatch, module: FakeFlashInfer, machine: Path) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (7, 5))


def without_compiler(
    monkeypatch: pytest.MonkeyPatch, module: FakeFlashInfer, machine: Path
) -> None:
    (machine / "bin" / "nvcc").unlink()


def without_toolkit(monkeypatch: pytest.MonkeyPatch, module: FakeFlashInfer, machine: Path) -> None:
    monkeypatch.delenv("CUDA_HOME")
    monkeypatch.delenv("CUDA_PATH", raising=False)
    monkeypatch.setenv("PATH", str(machine))
    monkeypatch.setattr("manylora.kernels.flashinfer.probe.TOOLKIT", str(machine / "cuda"))


def wrong(by: float) -> Callable[[pytest.MonkeyPatch, FakeFlashInfer, Path], None]:
    def arrange(monkeypatch: pytest.MonkeyPatch, module: FakeFlashInfer, machine: Path) -> None:
        module.spoil = by

    return arrange


def failing(monkeypatch: pytest.MonkeyPatch, module: FakeFlashInfer, machine: Path) -> None:
    module.failure = RuntimeError("Ninja build failed")


FAILURES = {
    "gone": (gone, r"it is not installed; pip install 'manylora\[cuda\]'"),
    "broken": (broken, "a trial of it failed: OSError: no libcuda"),
    "old device": (old, r"it needs a GPU of compute capability 8\.0 or more, this one has 7\.5"),
    "no compiler": (
        without_compiler,
        "nvcc, which is not found; install the CUDA toolkit, or set CUDA_HOME to it",
    ),
    "no toolkit": (without_toolkit, "nvcc, which is not found"),
    "wrong": (
        wrong(0.1),
        r"in a trial, it differed from Triton by 0\.\d+ of the largest value, more than 0\.0078",
    ),
    "NaN": (wrong(torch.nan), "in a trial, it differed from Triton by nan of the largest value"),
    "failing": (failing, "a trial of it failed: RuntimeError: Ninja build failed"),
}


@pytest.mark.parametrize("failure", FAILURES)
def test_where_flashinfer_fails_others_serve_and_who_asked_for_it_is_told(
    failure: str,
    module: FakeFlashInfer,
    machine: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    arrange, reason = FAILURES[failure]
    arrange(monkeypatch, module, machine)
    caplog.set_level(logging.INFO)
    assert chosen() is KERNELS
    (record,) = caplog.records
    assert re.match(
        f"attention of prompts runs in Triton, not in FlashInfer: .*{reason}", record.message
    )
    with pytest.raises(
        ConfigError, match=rf"model\.attention: flashinfer cannot be used: .*{reason}"
    ) as raised:
        chosen(replace(NEEDS, setting="flashinfer"))
    assert raised.value.param == "model.attention"
    assert raised.value.message.endswith("; or take auto or triton")


@pytest.mark.parametrize(
    ("needs", "dtype", "reason"),
    [
        (NEEDS, F32, "it computes float16 and bfloat16, but model.dtype is float32"),
        (
            replace(NEEDS, head_dim=80),
            BF16,
            "it computes heads of 64, 128 and 256, but the model's are 80",
        ),
        (replace(NEEDS, is_kv_int8=True), BF16, "it does not read keys and values of int8"),
    ],
    ids=["dtype", "head_dim", "int8"],
)
def test_models_that_flashinfer_does_not_take_need_no_trial(
    needs: AttentionNeeds, dtype: torch.dtype, reason: str, module: FakeFlashInfer, machine: Path
) -> None:
    assert chosen(needs, dtype) is KERNELS
    with pytest.raises(ConfigError, match=reason):
        chosen(replace(needs, setting="flashinfer"), dtype)
    assert module.num_wrappers == 0


def test_a_compiler_is_found_where_flashinfer_looks_for_it(
    machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_toolkit(monkeypatch, FakeFlashInfer(), machine)
    for name, value in (
        ("CUDA_PATH", machine),
        ("PATH", machine / "bin"),
        ("TOOLKIT", machine),
    ):
        with monkeypatch.context() as patched:
            if name == "TOOLKIT":
                patched.setattr("manylora.kernels.flashinfer.probe.TOOLKIT", str(value))
            else:
                patched.setenv(name, str(value))
            assert chosen() is not KERNELS, name


def attention_of(module: FakeFlashInfer) -> Callable[..., torch.Tensor]:
    return FlashInferAttention(module, CPU, TORCH.make().paged_attention).paged_attention


def test_a_step_is_planned_once_for_the_layers_of_a_window(module: FakeFlashInfer) -> None:
    attention, operands = attention_of(module), ScatteredKv(AMONG_ITEMS)
    for window in (None, 20, None, 20, None):
        operands.case = replace(AMONG_ITEMS, window=window)
        expected = operands.attend(ORACLES.paged_attention)
        assert_rows_close(operands.attend(attention), expected, 2.5)
    assert (module.num_plans, module.num_runs) == (2, 5)
    assert module.num_wrappers == NUM_PLANS


def test_more_steps_than_plans_are_planned_again(module: FakeFlashInfer) -> None:
    """Which is slow, but right: what another step has planned is not used."""
    attention = attention_of(module)
    steps = [
        ScatteredKv(replace(CHUNKS, requests=((10 + i, 40 + i),)), seed=i)
        for i in range(NUM_PLANS + 1)
    ]
    for _ in range(2):
        for step in steps:
            assert_rows_close(step.attend(attention), step.attend(ORACLES.paged_attention))
    assert module.num_plans == 2 * len(steps)


def test_a_plan_that_failed_is_not_used(module: FakeFlashInfer) -> None:
    attention, step = attention_of(module), ScatteredKv(CHUNKS)
    for _ in range(NUM_PLANS):  # each wrapper has a plan
        operands = ScatteredKv(CHUNKS)
        operands.attend(attention)
    module.failure = RuntimeError("no memory")
    for _ in range(2):
        with pytest.raises(RuntimeError, match="no memory"):
            step.attend(attention)
    module.failure = None
    assert_rows_close(step.attend(attention), step.attend(ORACLES.paged_attention))


def test_a_plan_is_overwritten_when_the_device_has_read_it(
    module: FakeFlashInfer, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Event:
        is_waited_for = False

        def synchronize(self) -> None:
            self.is_waited_for = True

    events: list[Event] = []

    def mark(device: torch.device) -> Event:
        assert module.num_plans == len(events) + 1
        events.append(Event())
        return events[-1]

    monkeypatch.setattr(flashinfer_attention, "_mark", mark)
    attention = attention_of(module)
    for step in range(2 * NUM_PLANS):
        operands = ScatteredKv(CHUNKS)
        operands.attend(attention)
        assert [event.is_waited_for for event in events] == [
            index <= step - NUM_PLANS for index in range(len(events))
        ]


def test_what_flashinfer_does_not_take_is_left_to_others(module: FakeFlashInfer) -> None:
    attention = attention_of(module)
    for case in (
        replace(CHUNKS, dtype=F32),
        replace(CHUNKS, head_dim=32),
        replace(CHUNKS, is_int8=True),
        AttentionCase(((1, 30), (8, 20)), 4, 2, 64, 16, BF16),
    ):
        operands = ScatteredKv(case)
        assert torch.equal(
            operands.attend(attention), operands.attend(TORCH.make().paged_attention)
        )
    assert module.num_plans == 0


def cases(impl: Implementation) -> list[AttentionCase]:
    return [CHUNKS] if impl.is_interpreted else [CHUNKS, AMONG_ITEMS]


def only_items(q: torch.Tensor, kv: KvLayer, batch: AttentionBatch, *_: Any) -> torch.Tensor:
    """In place of Triton, which reads rows: what it is to leave out is left as memory is."""
    assert (batch.chunks, batch.rows(2, 0).tiles.shape) == ((), (4, 0))
    out = torch.full_like(q, torch.nan)
    out[batch.rows(2, 0).item_rows.long()] = 0
    return out


def test_a_step_whose_numbers_are_on_a_device_brings_its_chunks_too(
    impl: Implementation, case: AttentionCase
) -> None:
    module, operands = FakeFlashInfer(), ScatteredKv(case)
    built, expected = operands.batch, operands.attend(ORACLES.paged_attention)
    chunks = [replace(chunk, request=index) for index, chunk in enumerate(built.chunks)]
    tables = [
        np.array(operands.block_tables[chunk.request], dtype=np.int32) for chunk in built.chunks
    ]
    operands.batch = AttentionBatch.of_rows(built.rows(2, 0), built.num_rows, chunks, tables)
    others = TRITON.make().paged_attention if impl.is_interpreted else only_items
    out = operands.attend(FlashInferAttention(module, CPU, others).paged_attention)
    rows = torch.cat([torch.arange(chunk.row, chunk.row + chunk.query_len) for chunk in chunks])
    assert_rows_close(out[rows], expected[rows])
    assert module.num_runs == 1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.timeout(580)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
def test_flashinfer_equals_the_oracle_on_a_gpu(dtype: torch.dtype, head_dim: int) -> None:
    """The first run compiles four modules for each kind of head."""
    pytest.importorskip("flashinfer", reason="needs the extra cuda")
    cuda = torch.device("cuda", torch.cuda.current_device())
    needs = replace(NEEDS, num_heads=14, head_dim=head_dim)
    others = kernels_for(cuda, dtype).paged_attention
    opened = open_flashinfer(needs, cuda, dtype, others)
    assert isinstance(opened, FlashInferAttention), opened
    attention = opened.paged_attention
    for requests in (
        AMONG_ITEMS.requests,
        ((512, 2048), (1, 300), (9, 9), (129, 1000)),
        ((100, 100),),
    ):
        for window in (None, 100, 1):
            case = AttentionCase(requests, 14, 2, head_dim, 16, dtype, window, padding_rows=2)
            operands = ScatteredKv(case, cuda)
            out = operands.attend(attention)
            assert_rows_close(out, operands.attend(ORACLES.paged_attention), 2.5)
            assert torch.equal(operands.attend(attention), out), "results repeat"
