"""What launchers take for their constants, and from where."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from fake_triton import fake_triton
from implementations import BF16, F32, INTERPRETS, TRITON
from manylora.kernels.triton import plans
from scattered_kv import AttentionCase, ScatteredKv
from scattered_lora import LAYER, ScatteredLora, SgmvCase

pytest.importorskip("triton", reason="needs Triton, which is there on Linux")
without_interpreter = pytest.mark.skipif(INTERPRETS, reason="the interpreter compiles nothing")


@pytest.fixture(autouse=True)
def measured_plans(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A file of plans for this architecture, with nothing cached of another."""
    monkeypatch.setattr(plans, "PLANS", tmp_path / "plans.json")
    plans.measured.cache_clear()
    yield tmp_path / "plans.json"
    plans.measured.cache_clear()


def test_without_measurements_a_launcher_keeps_its_own() -> None:
    assert plans.plan("items", BLOCK_N=64, num_stages=2) == {"BLOCK_N": 64, "num_stages": 2}


def test_what_was_measured_on_this_architecture_takes_their_place(measured_plans: Path) -> None:
    other = {"items": {"num_stages": 9}}
    measured_plans.write_text(
        json.dumps({plans.architecture(): {"items": {"num_stages": 5}}, "sm00": other})
    )
    assert plans.plan("items", BLOCK_N=64, num_stages=2) == {"BLOCK_N": 64, "num_stages": 5}
    assert plans.plan("chunks", BLOCK_N=64) == {"BLOCK_N": 64}


def test_constants_under_test_win_until_the_block_is_left(measured_plans: Path) -> None:
    measured_plans.write_text(json.dumps({plans.architecture(): {"items": {"num_stages": 5}}}))
    with plans.trying("items", num_stages=3):
        assert plans.plan("items", BLOCK_N=64, num_stages=2) == {"BLOCK_N": 64, "num_stages": 3}
        assert plans.asked["items"] == {"BLOCK_N": 64, "num_stages": 3}
    assert plans.plan("items", num_stages=2) == plans.asked["items"] == {"num_stages": 5}


def test_a_constant_that_the_launcher_does_not_have_is_refused(measured_plans: Path) -> None:
    measured_plans.write_text(json.dumps({plans.architecture(): {"items": {"BLOCK_S": 5}}}))
    with pytest.raises(
        ValueError,
        match=r"plan of items: expected constants of \['num_stages'\], got \['BLOCK_S'\]",
    ):
        plans.plan("items", num_stages=2)


@without_interpreter
def test_launches_take_what_was_measured_of_their_dtype() -> None:
    kernels = TRITON.make()
    assert kernels.shrink is not None
    with fake_triton() as fake:
        for dtype in (BF16, F32):
            kv = ScatteredKv(AttentionCase(((1, 90), (70, 90)), 4, 2, 16, 16, dtype))
            lora = ScatteredLora(SgmvCase(7, "uniform", 4096, (128,), dtype))
            operands = lora.x, lora.operands()
            kv.attend(kernels.paged_attention)
            kernels.shrink(*operands)
            before = fake.variants.copy()
            plans.asked.clear()
            with (
                plans.trying("items", num_stages=3),
                plans.trying("chunks", BLOCK_N=64),
                plans.trying("shrink 4096 16", SPLIT_K=2),
            ):
                kv.attend(kernels.paged_attention)
                parts = kernels.shrink(*operands).planes.shape[0]
            assert plans.asked.keys() == (
                {"items", "chunks", "shrink 4096 16"} if dtype == BF16 else set()
            )
            assert parts == (2 if dtype == BF16 else 4)
            more = (
                {"item_kernel": 1, "chunk_kernel": 1, "shrink_kernel": 1} if dtype == BF16 else {}
            )
            assert fake.variants - before == more


@without_interpreter
def test_a_shrink_checks_operands_that_it_has_not_seen() -> None:
    kernels = TRITON.make()
    lora = ScatteredLora(SgmvCase(7, "uniform", 128, (128,), BF16))
    operands = lora.operands()
    assert kernels.shrink is not None
    with fake_triton() as fake:
        kernels.shrink(lora.x, operands)
        for x, arena, layer, expected in (
            (lora.x, lora.arena, 2, "layer: expected 0 to 1, got 2"),
            (lora.x, lora.arena, -1, "layer: expected 0 to 1, got -1"),
            (
                lora.x.float(),
                lora.arena,
                LAYER,
                "x: expected dtype torch.bfloat16, got torch.float32",
            ),
            (
                lora.x.T.contiguous().T,
                lora.arena,
                LAYER,
                "x: expected rows of consecutive elements",
            ),
            (lora.x.to("meta"), lora.arena, LAYER, "expected device meta, got cpu"),
            (
                lora.x,
                lora.arena.float(),
                LAYER,
                "x: expected dtype torch.float32, got torch.bfloat16",
            ),
        ):
            with pytest.raises(ValueError, match=expected):
                kernels.shrink(x, operands._replace(arena_elements=arena, layer=layer))
    assert fake.counts == {"shrink_kernel": 1}
