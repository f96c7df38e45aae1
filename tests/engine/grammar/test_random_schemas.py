"""Answers held to random schemas fit them. `MANYLORA_RANDOM_SCHEMAS=10000` in the environment makes it so many."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

import pytest

from manylora import LLM
from random_schemas import outcomes_of
from tiny_models import make_model

pytestmark = pytest.mark.no_cover

COUNT = int(os.environ.get("MANYLORA_RANDOM_SCHEMAS", "500"))  # noqa: TID251 - of the test, no setting
AT_ONCE = 200
SETTINGS = {"device": "cpu", "dtype": "float32", "memory_gib": 0.05, "host_gib": 0.05, "threads": 1}


@pytest.mark.timeout(60 + COUNT)
def test_every_answer_to_a_random_schema_fits_it_or_was_cut(tmp_path: Path) -> None:
    outcomes: Counter[str] = Counter()
    with LLM(make_model(tmp_path / "model"), max_waiting=AT_ONCE, **SETTINGS) as llm:
        for start in range(0, COUNT, AT_ONCE):
            outcomes += outcomes_of(llm, range(start, min(start + AT_ONCE, COUNT)))
    print(dict(outcomes))
    assert outcomes.keys() <= {"stop", "length", "refused", "calls"}
    assert outcomes["stop"] > COUNT // 2
    assert outcomes["calls"] > COUNT // 50
    assert outcomes["refused"] < COUNT // 4
