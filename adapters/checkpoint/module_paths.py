"""Keys of `rank_pattern` and `alpha_pattern`: which are literal endings of a module path, read as PEFT reads them.

PEFT matches a key as a regular expression, at the end of a path and after a dot, so a dot in the key stands for any
character. Keys that mean the same when read letter by letter are literal; all others are not. No key is ever run.
"""

from __future__ import annotations

import re
from functools import lru_cache

from weft.adapters.base_shape import MODULE_PATHS

MAX_KEY_LENGTH = 256
_KEY = re.compile(r"[A-Za-z0-9_]+(?:\.[A-Za-z0-9_]+)*")
_DIGIT = "#"
_LAYERS = ("layers.", "model.layers.", "language_model.layers.", "model.language_model.layers.")
_HEADS = ("", *_LAYERS, "language_model.model.layers.")


def is_literal_path(key: str) -> bool:
    """Whether the key names modules by letters, digits, underscores and dots alone, and means so in PEFT too."""
    return len(key) <= MAX_KEY_LENGTH and _KEY.fullmatch(key) is not None and not _is_ambiguous(key)


def _is_ambiguous(key: str) -> bool:
    return "." in key and any(_matches_by_a_dot(key, ending) for ending in _endings(len(key)))


def _matches_by_a_dot(key: str, ending: str) -> bool:
    by_a_dot = False
    for ours, theirs in zip(key, ending, strict=True):
        if ours == "." and theirs != ".":
            by_a_dot = True
        elif ours != theirs and not (theirs == _DIGIT and ours.isdigit()):
            return False
    return by_a_dot


@lru_cache(maxsize=MAX_KEY_LENGTH)
def _endings(length: int) -> tuple[str, ...]:
    """Endings, at a dot, of all module paths, as far as they have this length; `#` is a digit of the layer number."""
    endings = []
    for path in MODULE_PATHS:
        for head in _HEADS:
            digits = length - len(head) - 1 - len(path)
            if digits >= 1:
                endings.append(f"{head}{_DIGIT * digits}.{path}")
        endings += [path, path.rsplit(".", 1)[1]]
    return tuple(ending for ending in endings if len(ending) == length)
