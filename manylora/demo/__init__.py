"""The small model and the adapters that ship with Manylora, and their places."""

from __future__ import annotations

from pathlib import Path

FOLDER = Path(__file__).resolve().parent
MODEL = FOLDER / "manylora-demo"
"""A Hugging Face checkpoint of about 0.8M parameters, which calls `where_is(item)` and `price_of(item)` if they are
offered. Its name for clients is that of its folder."""
ADAPTERS = FOLDER / "adapters"
"""Folder of the adapters, one PEFT checkpoint per folder."""
QUESTIONS = FOLDER / "questions.json"
"""Questions of customers of the shop, and the system messages that give the base each adapter's style."""
EXPECTED = FOLDER / "expected.json"
"""Questions with the exact greedy answers of base and adapters in float32."""
