"""What launchers take for their constants, and from where."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from weft.kernels.triton import plans


@pytest.fixture(autouse=True)
def measured_plans(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A file of plans for this architecture, which is read anew."""
    monkeypatch.setattr(plans, "PLANS", tmp_path / "plans.json")
    plans.measured.cache_clear()
    yield tmp_path / "plans.json"
    plans.measured.cache_clear()


def test_without_measurements_a_launcher_keeps_its_own() -> None:
    assert plans.plan("items", BLOCK_N=64, num_stages=2) == {"BLOCK_N": 64, "num_stages": 2}


def test_what_was_measured_on_this_architecture_takes_their_place(measured_plans: Path) -> None:
    other = {"items": {"num_stages": 9}}
    measured_plans.write_text(json.dumps({plans.architecture(): {"items": {"num_stages": 5}}, "sm00": other}))
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
    with pytest.raises(ValueError, match=r"plan of items: expected constants of \['num_stages'\], got \['BLOCK_S'\]"):
        plans.plan("items", num_stages=2)
