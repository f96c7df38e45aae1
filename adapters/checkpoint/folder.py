"""Finds the two files of an adapter in the folder that PEFT or mlx-lm saved it to."""

from __future__ import annotations

from pathlib import Path

from manylora.adapters.checkpoint.safetensors_header import CONVERT
from manylora.errors import AdapterFormatError

CONFIG = "adapter_config.json"
WEIGHTS = ("adapter_model.safetensors", "adapters.safetensors")
"""As PEFT calls the file, and as mlx-lm does; of both, PEFT's is meant."""
_PICKLE = "adapter_model.bin"


def adapter_files(folder: Path) -> tuple[Path, Path]:
    """Config and weights.

    Raises:
        AdapterFormatError: One of them is missing.
    """
    if not folder.is_dir():
        raise AdapterFormatError(f"There is no folder {folder}.")
    weights = next((folder / name for name in WEIGHTS if (folder / name).is_file()), None)
    if weights is None and (folder / _PICKLE).is_file():
        raise AdapterFormatError(
            f"{folder} has only {_PICKLE}.", code="weights.not_safetensors", hint=CONVERT
        )
    if weights is None or not (folder / CONFIG).is_file():
        missing = WEIGHTS[0] if (folder / CONFIG).is_file() else CONFIG
        raise AdapterFormatError(
            f"{folder} has no {missing}. Expected what PEFT's save_pretrained writes."
        )
    return folder / CONFIG, weights
