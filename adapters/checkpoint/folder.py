"""Finds the two files of an adapter in the folder that PEFT or mlx-lm saved it to."""

from __future__ import annotations

from pathlib import Path

from manylora.adapters.checkpoint.safetensors_header import CONVERT
from manylora.errors import AdapterFormatError

CONFIG = "adapter_config.json"
WEIGHTS = ("adapter_model.safetensors", "adapters.safetensors")
"""Names of the file that PEFT and mlx-lm write. If both are there, PEFT's file counts."""
_PICKLE = "adapter_model.bin"


def adapter_files(folder: Path) -> tuple[Path, Path]:
    """Find config and weights.

    Raises:
        AdapterFormatError: One of them is missing.
    """
    if not folder.is_dir():
        raise AdapterFormatError(
            f"There is no folder {folder}. Name the folder that save_pretrained wrote."
        )
    weights = next((folder / name for name in WEIGHTS if (folder / name).is_file()), None)
    if weights is None and (folder / _PICKLE).is_file():
        raise AdapterFormatError(
            f"{folder} has only {_PICKLE}.", code="weights.not_safetensors", hint=CONVERT
        )
    if weights is None or not (folder / CONFIG).is_file():
        missing = WEIGHTS[0] if (folder / CONFIG).is_file() else CONFIG
        raise AdapterFormatError(
            f"{folder} has no {missing}. Name a folder that PEFT's save_pretrained wrote."
        )
    return folder / CONFIG, weights
