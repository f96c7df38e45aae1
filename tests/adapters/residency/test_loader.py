"""What a load works out once for all adapters of one shape, and what it does for each."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from adapters_factory import random_lora
from manylora.adapters.checkpoint.reader import Checkpoint, check_weights
from manylora.adapters.ref import AdapterRef
from manylora.adapters.residency import loader as loading
from manylora.errors import AdapterIncompatibleError
from residency_parts import ResidencyParts, store


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The alpha of every header that was checked."""
    alphas: list[float] = []

    def counted(spec, *rest, **named) -> Checkpoint:  # type: ignore[no-untyped-def]
        alphas.append(spec.alpha)
        return check_weights(spec, *rest, **named)

    monkeypatch.setattr(loading, "check_weights", counted)
    return alphas


def three_of_one_shape(folder: Path) -> tuple[ResidencyParts, list[AdapterRef]]:
    parts = ResidencyParts(folder, num_pages=60, slab_pages=60, slots=8)
    return parts, store(parts, folder, [random_lora(parts.base, 8, seed=seed) for seed in range(3)])


def test_a_header_is_checked_once_for_all_adapters_that_have_it(
    tmp_path: Path, checked: list[float]
) -> None:
    parts, refs = three_of_one_shape(tmp_path)
    for ref in refs:
        assert parts.matches(parts.load(ref), parts.loras[ref.digest])
    assert len(checked) == 1


def test_another_config_is_another_check(tmp_path: Path, checked: list[float]) -> None:
    parts, (ref, *_) = three_of_one_shape(tmp_path)
    config = replace(ref.config, alpha=ref.config.alpha * 2)
    other = replace(ref, digest="sha256:" + "0" * 64, config=config)
    scalings = [parts.loader.load(one).scalings for one in (ref, other, ref)]
    assert checked == [ref.config.alpha, config.alpha]
    assert scalings[1] == {module: 2 * scaling for module, scaling in scalings[0].items()}
    assert scalings[2] == scalings[0]


def test_what_is_refused_is_refused_each_time(tmp_path: Path, checked: list[float]) -> None:
    parts, (ref, *_) = three_of_one_shape(tmp_path)
    wrong = replace(ref, config=replace(ref.config, rank=ref.config.rank * 2))
    for _ in range(2):
        with pytest.raises(Exception, match="rank"):
            parts.loader.load(wrong)
    assert len(checked) == 2
    loader = ResidencyParts(tmp_path, max_rank=4).loader
    for _ in range(2):
        with pytest.raises(AdapterIncompatibleError, match=r"adapter\.max_rank"):
            loader.load(ref)
    assert parts.slab.num_free == parts.slab.num_pages
