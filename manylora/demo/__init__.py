"""The small model and the adapters that ship with Manylora, and where they lie."""

from __future__ import annotations

from pathlib import Path

FOLDER = Path(__file__).resolve().parent
MODEL = FOLDER / "manylora-demo"
"""A Hugging Face checkpoint of about 0.8M parameters, which calls `where_is(item)` and `price_of(item)` where they are
offered; clients name it as its folder is named."""
ADAPTERS = FOLDER / "adapters"
"""One PEFT checkpoint per folder."""
QUESTIONS = FOLDER / "questions.json"
"""What customers of the shop ask, and the system messages under which the base knows each adapter's style."""
EXPECTED = FOLDER / "expected.json"
"""Questions with the exact greedy answers of base and adapters in float32."""
