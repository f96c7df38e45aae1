"""An adapter as `Client` sends it: files of a folder, or a PEFT checkpoint as bytes without files."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from enum import Enum
from pathlib import Path
from typing import Any

from manylora.adapters.checkpoint.folder import CONFIG, WEIGHTS, adapter_files
from manylora.errors import AdapterFormatError, ClientError

Progress = Callable[[Path, int, int], object]
"""Function that is called with a file, the number of its bytes that the server has, and its size in bytes."""
PIECE_BYTES = 1 << 18


def files_of(path: Path) -> dict[str, Path]:
    """Find config and weights of an adapter, by the names under which they are uploaded.

    Args:
        path: Folder of both, or the weights file with its config beside it.

    Raises:
        ClientError: The folder has no adapter.
    """
    try:
        config, weights = (path.with_name(CONFIG), path) if path.is_file() else adapter_files(path)
    except AdapterFormatError as error:
        finding = error.finding
        raise ClientError(finding.message, code=finding.code, hint=finding.hint) from error
    return {CONFIG: config, WEIGHTS[0]: weights}


def described(files: Mapping[str, Path]) -> dict[str, Any]:
    """Size and SHA-256 of each file, as an upload announces them.

    Raises:
        ClientError: A file cannot be read.
    """
    try:
        return {
            name: {"size": file.stat().st_size, "sha256": _sha256(file)}
            for name, file in files.items()
        }
    except OSError as error:
        raise _unreadable(error) from error


def pieces(file: Path, start: int, size: int, progress: Progress) -> Iterator[bytes]:
    """Yield the bytes of a file from `start` on."""
    with file.open("rb") as source:
        source.seek(start)
        while piece := source.read(PIECE_BYTES):
            yield piece
            progress(file, source.tell(), size)


def checkpoint_bytes(
    weights: bytes | str | Path | Mapping[str, Any],
    config: bytes | Mapping[str, Any] | Any,  # noqa: ANN401 - peft's LoraConfig
) -> tuple[bytes, bytes]:
    """Make the bytes of config and weights from the arguments of `Client.push_ephemeral`.

    Raises:
        ClientError: A file cannot be read, or there is no config that JSON can express.
    """
    if isinstance(weights, str | Path):
        try:
            written, body = (file.read_bytes() for file in files_of(Path(weights)).values())
        except OSError as error:
            raise _unreadable(error) from error
        return written, body
    return _config_bytes(config), weights if isinstance(weights, bytes) else _tensor_bytes(weights)


def _config_bytes(config: bytes | Mapping[str, Any] | Any) -> bytes:  # noqa: ANN401 - peft's LoraConfig
    """Write `adapter_config.json` from a LoraConfig or its fields. Bytes are the file already."""
    if isinstance(config, bytes):
        return config
    fields = config.to_dict() if hasattr(config, "to_dict") else config
    if not isinstance(fields, Mapping):
        raise ClientError(
            "Give the adapter's config: PEFT's LoraConfig, or its fields.", code="config_missing"
        )
    try:
        return json.dumps(dict(fields), default=_plain).encode()
    except TypeError as error:
        raise ClientError(
            f"The adapter's config cannot be written as JSON: {error}.", code="config_invalid"
        ) from error


def _tensor_bytes(tensors: Mapping[str, Any]) -> bytes:
    """Write `adapter_model.safetensors` from tensors by name. They may be on any device, and share memory."""
    from safetensors.torch import save

    return save({name: tensor.detach().contiguous() for name, tensor in tensors.items()})


def _plain(value: object) -> object:
    """Turn sets and enums into the JSON that PEFT writes."""
    if isinstance(value, set | frozenset):
        return sorted(value)
    if isinstance(value, Enum):
        return value.value
    raise TypeError(f"{type(value).__name__} has no form in JSON")


def _sha256(file: Path) -> str:
    with file.open("rb") as source:
        return hashlib.file_digest(source, "sha256").hexdigest()


def _unreadable(error: OSError) -> ClientError:
    return ClientError(
        f"{error.filename} cannot be read: {error.strerror}.", code="file_unreadable"
    )
