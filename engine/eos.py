"""Which tokens end a generation, read from a checkpoint's JSON files. Needs no tokenizer library."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def read_eos_token_ids(folder: Path) -> frozenset[int]:
    """The end-of-sequence tokens that generation config, model config and tokenizer config name; there may be none."""
    token_ids: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        named = _read(folder / name).get("eos_token_id")
        token_ids.update(named if isinstance(named, list) else [] if named is None else [named])
    eos = _read(folder / "tokenizer_config.json").get("eos_token")
    text = eos.get("content") if isinstance(eos, dict) else eos
    for token in _read(folder / "tokenizer.json").get("added_tokens", []):
        if text is not None and token.get("content") == text:
            token_ids.add(token["id"])
    return frozenset(token_ids)


def _read(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    content = json.loads(path.read_text(encoding="utf-8"))
    return content if isinstance(content, dict) else {}
