"""The form of an adapter's upload."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from manylora.adapters.checkpoint.peft_config import MAX_CONFIG_BYTES
from manylora.errors import InvalidRequestError
from manylora.server.http.form import Form
from manylora.server.http.openapi import BINARY, TEXT

WEIGHTS = "weights"


class UploadForm(Form):
    """The parts of an adapter's upload, except the weights."""

    file = WEIGHTS
    file_schema: ClassVar[Mapping[str, object]] = {
        **BINARY,
        "description": "adapter_model.safetensors, or MLX's adapters.safetensors",
    }
    parts: ClassVar[Mapping[str, tuple[int, Mapping[str, object]]]] = {
        "name": (1024, TEXT),
        "config": (MAX_CONFIG_BYTES + 1, {**BINARY, "description": "adapter_config.json"}),
        "tenant": (1024, {**TEXT, "description": "For admins."}),
        "description": (16 * 1024, TEXT),
        "activate": (16, {"enum": ["true", "false", "1", "0"], "default": "true"}),
    }
    required = ("name", "config", WEIGHTS)
    rule = (
        "An upload has the parts name, config and weights, and may have tenant, description and activate, "
        "each once."
    )

    @property
    def activate(self) -> bool:
        """True if the alias `default` moves to this version."""
        word = (self.text("activate") or "true").lower()
        if word not in ("true", "false", "1", "0"):
            raise InvalidRequestError("activate must be true or false.", param="activate")
        return word in ("true", "1")

    @property
    def config(self) -> bytes:
        """`adapter_config.json`. One over the limit is cut one byte after it, so that its reader refuses it."""
        return bytes(self._texts["config"])
