"""The form of an adapter's upload."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import ClassVar

from manylora.adapters.checkpoint.peft_config import MAX_CONFIG_BYTES
from manylora.errors import AdapterFormatError, InvalidRequestError
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
        "sha256": (80, {**TEXT, "description": "SHA-256 of the weights; other bytes are refused."}),
    }
    required = ("name", "config", WEIGHTS)
    rule = (
        "An upload has the parts name, config and weights, and may have tenant, description, activate and "
        "sha256 (of the weights), each once."
    )

    @property
    def name(self) -> str:
        """The adapter's name."""
        return self.text("name") or ""

    @property
    def description(self) -> str | None:
        """Text about the adapter."""
        return self.text("description")

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

    def checked_digest(self, sha256: str) -> str:
        """Return the digest of the weights, if it is what was announced, or nothing was.

        Raises:
            InvalidRequestError: What was announced is no SHA-256.
            AdapterFormatError: Other bytes came; code upload.digest_mismatch.
        """
        announced = (self.text("sha256") or sha256).removeprefix("sha256:").lower()
        if not re.fullmatch(r"[0-9a-f]{64}", announced):
            raise InvalidRequestError("sha256 must be 64 hex digits.", param="sha256")
        if announced != sha256:
            raise digest_mismatch(WEIGHTS)
        return sha256


def digest_mismatch(file: str) -> AdapterFormatError:
    """The error for a file that does not have the announced digest."""
    message = (
        f"The bytes of {file} do not have the SHA-256 that was announced; send the file again."
    )
    return AdapterFormatError(message, code="upload.digest_mismatch", param=file)
