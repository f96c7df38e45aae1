from __future__ import annotations

from pathlib import Path

import pytest

from manylora import LLM
from random_schemas import outcomes_of
from tiny_models import make_model

pytestmark = pytest.mark.no_cover

SETTINGS = {"device": "cpu", "dtype": "float32", "memory_gib": 0.05, "host_gib": 0.05, "threads": 1}


@pytest.mark.parametrize(("count", "start"), [(200, 0), pytest.param(400, 1000, marks=pytest.mark.slow)])
def test_every_answer_to_a_random_schema_fits_it_or_was_cut(tmp_path: Path, count: int, start: int) -> None:
    with LLM(make_model(tmp_path / "model"), max_waiting=2 * count, **SETTINGS) as llm:
        outcomes = outcomes_of(llm, range(start, start + count))
    assert outcomes.keys() <= {"stop", "length", "refused"}
    assert outcomes["stop"] > count // 2
    assert outcomes["refused"] < count // 10
