"""Fields of a generation request that a gateway reads to choose a replica; it leaves the check of the body to that."""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec

PREFIX_BYTES = 1024
"""Bytes of a prompt that decide which replica may have computed its beginning; shorter prompts are cheap anywhere."""
OPEN_TOKENS = 256
"""Taken for the length of an answer where the client names none."""
OUTPUT_UNITS = 2.0
BYTES_A_TOKEN = 4


class RouteFields(msgspec.Struct, frozen=True):
    """Fields of the bodies of all routes that generate."""

    model: str | None = None
    adapter_id: str | None = None
    user: str | None = None
    metadata: Any = None
    max_tokens: Any = None
    max_completion_tokens: Any = None
    max_output_tokens: Any = None
    prompt: msgspec.Raw = msgspec.Raw(b"")
    messages: msgspec.Raw = msgspec.Raw(b"")
    input: msgspec.Raw = msgspec.Raw(b"")
    system: msgspec.Raw = msgspec.Raw(b"")

    @property
    def sticky(self) -> str | None:
        """The user whose requests belong together, if the client names one."""
        given = self.metadata.get("user_id") if isinstance(self.metadata, dict) else None
        return self.user or (given if isinstance(given, str) else None)

    def units(self, num_bytes: int) -> float:
        """Predicted work: about one unit per token of the prompt, two per token of output."""
        given = (self.max_tokens, self.max_completion_tokens, self.max_output_tokens)
        output = min([OPEN_TOKENS, *(each for each in given if type(each) is int and each >= 0)])
        return num_bytes / BYTES_A_TOKEN + OUTPUT_UNITS * output

    def beginning(self, tenant: str) -> bytes | None:
        """A hash that is equal for prompts that begin alike; None for short ones."""
        raw = b"".join(
            (bytes(self.system), bytes(self.messages), bytes(self.prompt), bytes(self.input))
        )
        if len(raw) < PREFIX_BYTES:
            return None
        return hashlib.blake2b(tenant.encode() + raw[:PREFIX_BYTES], digest_size=16).digest()


_decoder = msgspec.json.Decoder(RouteFields)


def read_fields(body: bytes) -> RouteFields:
    """The fields of a body; those of an empty one where it is malformed, which the replica will say."""
    try:
        return _decoder.decode(body)
    except (
        ValueError,
        RecursionError,
    ):  # msgspec's own errors, and those of Unicode, are ValueErrors
        return RouteFields()
