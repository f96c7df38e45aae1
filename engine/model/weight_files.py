"""Files of a checkpoint's weights, and the search for a head besides the embedding. Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from manylora import strict_json
from manylora.engine.model.config_fields import shown
from manylora.engine.model.gguf_folder import GGUF_FILE
from manylora.errors import ConfigError

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
# Tensors of a checkpoint that do not belong to a layer.
EMBEDDING = "model.embed_tokens.weight"
NORM = "model.norm.weight"
HEAD = "lm_head.weight"
MAX_HEADER_BYTES = 100 << 20
"""Largest header of a safetensors file, the limit of that library."""
COMPARED_BYTES = 1 << 22
"""Bytes that are compared at once."""


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a checkpoint, in order of name, or its GGUF file.

    Raises:
        ConfigError: There is no file, or the index is broken or names files outside the folder.
    """
    index = folder / INDEX_FILE
    for name in (SINGLE_FILE, *(() if index.is_file() else (GGUF_FILE,))):
        if (folder / name).is_file():
            return [folder / name]
    if not index.is_file():
        raise ConfigError(
            f"model.path: {folder} has neither {SINGLE_FILE} nor {INDEX_FILE}; only safetensors are read. If this is "
            "the Hugging Face cache, the download may be incomplete: start once with access to the hub.",
            param="model.path",
        )
    names = sorted(set(_places(index).values()))
    files = [folder / name for name in names if Path(name).name == name]
    missing = sorted(set(names) - {file.name for file in files if file.is_file()})
    if missing or not files:
        raise ConfigError(
            f"model.path: {index} names files that are not there: {shown(missing)}",
            param="model.path",
        )
    return files


def holds_own_head(folder: Path) -> bool:
    """True if a checkpoint has a head that differs from the embedding. Without weights, the index must name both.

    A head without an embedding counts as the embedding too, as in transformers.

    Raises:
        ConfigError: A file cannot be read.
    """
    index = folder / INDEX_FILE
    if not (folder / SINGLE_FILE).is_file() and index.is_file():
        places = _places(index)
        if EMBEDDING not in places or not any(_is_of_head(name) for name in places):
            return False
        files = {folder / name for name in places.values() if Path(name).name == name}
    else:
        files = {folder / SINGLE_FILE}
    if not all(file.is_file() for file in files):
        return index.is_file()
    tensors = {name: tensor for file in files for name, tensor in _tensors(file).items()}
    if tensors.keys() >= {EMBEDDING, HEAD} and _are_equal(tensors[EMBEDDING], tensors[HEAD]):
        return False
    return EMBEDDING in tensors and any(_is_of_head(name) for name in tensors)


def _is_of_head(name: str) -> bool:
    return name.startswith(HEAD.removesuffix("weight"))


def _places(index: Path) -> dict[str, str]:
    """File names by tensor, from an index."""
    try:
        return {
            str(tensor): str(name)
            for tensor, name in strict_json.loads(index.read_bytes())["weight_map"].items()
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"model.path: cannot read {index}: {error}", param="model.path"
        ) from error


@dataclass(frozen=True, slots=True)
class _Tensor:
    """Place of a tensor in a file."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    """First byte, counted from the start of the file."""
    end: int


def _tensors(file: Path) -> dict[str, _Tensor]:
    """Places of the tensors of a file, from its header."""
    try:
        with file.open("rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
            header = strict_json.loads(opened.read(min(length, MAX_HEADER_BYTES)))
        return {
            name: _tensor(file, 8 + length, fields)
            for name, fields in header.items()
            if name != "__metadata__"
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"model.path: cannot read {file}: {error}", param="model.path") from error


def _tensor(file: Path, first_byte: int, fields: Mapping[str, Any]) -> _Tensor:
    start, end = (first_byte + at for at in fields["data_offsets"])
    size = file.stat().st_size
    if not (type(start) is type(end) is int and first_byte <= start <= end <= size):
        raise ValueError(
            f"data_offsets: expected two places in the file, got {shown(fields['data_offsets'])}"
        )
    return _Tensor(file, fields["dtype"], tuple(fields["shape"]), start, end)


def _are_equal(first: _Tensor, second: _Tensor) -> bool:
    if (first.dtype, first.shape, first.end - first.start) != (
        second.dtype,
        second.shape,
        second.end - second.start,
    ):
        return False
    with first.file.open("rb") as one, second.file.open("rb") as other:
        one.seek(first.start)
        other.seek(second.start)
        left = first.end - first.start
        while left > 0:
            size = min(left, COMPARED_BYTES)
            if one.read(size) != other.read(size):
                return False
            left -= size
    return True
