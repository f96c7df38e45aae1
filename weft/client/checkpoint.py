"""A PEFT checkpoint as bytes, without a file: what `Client.push_ephemeral` sends."""

from __future__ import annotations

import json
from collections.abc import Mapping
from enum import Enum
from typing import Any

from weft.errors import ClientError


def config_bytes(config: bytes | Mapping[str, Any] | Any) -> bytes:  # noqa: ANN401 - peft's LoraConfig
    """`adapter_config.json` of a LoraConfig, or of its fields; bytes are the file.

    Raises:
        ClientError: There are none, or one has no form in JSON.
    """
    if isinstance(config, bytes):
        return config
    fields = config.to_dict() if hasattr(config, "to_dict") else config
    if not isinstance(fields, Mapping):
        raise ClientError("Give the adapter's config: PEFT's LoraConfig, or its fields.", code="config_missing")
    try:
        return json.dumps(dict(fields), default=_plain).encode()
    except TypeError as error:
        raise ClientError(f"The adapter's config cannot be written as JSON: {error}.", code="config_invalid") from error


def tensor_bytes(tensors: Mapping[str, Any]) -> bytes:
    """`adapter_model.safetensors` of tensors by name; they may lie on any device, and share memory."""
    from safetensors.torch import save

    return save({name: tensor.detach().contiguous() for name, tensor in tensors.items()})


def unreadable(error: OSError) -> ClientError:
    """The error for a file of an adapter that cannot be read."""
    return ClientError(f"{error.filename} cannot be read: {error.strerror}.", code="file_unreadable")


def _plain(value: object) -> object:
    """Sets and enums, as PEFT writes them."""
    if isinstance(value, set | frozenset):
        return sorted(value)
    if isinstance(value, Enum):
        return value.value
    raise TypeError(f"{type(value).__name__} has no form in JSON")
