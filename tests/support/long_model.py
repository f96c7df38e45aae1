"""The demo's model with room for answers that no machine computes before a test has looked at them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from manylora_server import DEMO_MODEL

LONG_ANSWER = 60_000
"""Tokens: minutes of computing, and two at once fit into a memory of 0.25 GiB. Ask with `ignore_eos` as well."""


def long_model(folder: Path) -> Path:
    """A copy of the demo's model, with the same weights, that takes answers of `LONG_ANSWER` tokens."""
    shutil.copytree(DEMO_MODEL, folder)
    config = json.loads((folder / "config.json").read_text())
    config["max_position_embeddings"] = LONG_ANSWER + 5_000
    (folder / "config.json").write_text(json.dumps(config))
    return folder
