"""A token sequence cut into blocks, each named by a hash of all that leads to it."""

from __future__ import annotations

import hashlib
import struct
from array import array
from collections.abc import Sequence


def chain_seed(*fields: str) -> bytes:
    """What stands before the first token: SHA-256 over the fields, each with its length before it.

    Two sequences share a block only if all their fields are equal, so whatever changes keys and values (or who may see
    them) belongs here.
    """
    digest = hashlib.sha256()
    for field in fields:
        content = field.encode()
        digest.update(struct.pack("<Q", len(content)))
        digest.update(content)
    return digest.digest()


class TokenChain:
    """Names of the full blocks of one sequence, made as the sequence grows.

    Args:
        seed: From `chain_seed`.
        block_tokens: Tokens of a block.
    """

    def __init__(self, seed: bytes, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._last = seed
        self.digests: list[bytes] = []
        """Name of each full block: SHA-256 over the name before it, the number of tokens, the tokens."""
        self.blocks: list[tuple[int, ...]] = []
        """The tokens of each."""

    @property
    def num_tokens(self) -> int:
        """Tokens in full blocks so far; `extend` goes on from here."""
        return len(self.blocks) * self._block_tokens

    def copy(self) -> TokenChain:
        """A chain with the same blocks, to go on with other tokens."""
        chain = TokenChain(self._last, self._block_tokens)
        chain.digests, chain.blocks = list(self.digests), list(self.blocks)
        return chain

    def extend(self, token_ids: Sequence[int]) -> None:
        """Add the tokens that follow `num_tokens`; what does not fill a block is left for the next call."""
        for start in range(0, len(token_ids) - self._block_tokens + 1, self._block_tokens):
            block = tuple(token_ids[start : start + self._block_tokens])
            content = struct.pack("<Q", len(block)) + array("q", block).tobytes()
            self._last = hashlib.sha256(self._last + content).digest()
            self.digests.append(self._last)
            self.blocks.append(block)
