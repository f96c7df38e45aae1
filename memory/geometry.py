"""Size of a page, and layout of one KV block inside it. Plain numbers, no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass

from manylora.lora_rows import GROUP_ROWS, PITCH_BYTES, row_pitch_bytes

PAGE_TOKEN_CHOICES = (16, 32, 64, 128)
MIN_PAGE_BYTES = 768 * 1024
MAX_PAGE_BYTES = 2 * 1024 * 1024
SCALE_BYTES = 4
"""Bytes of the float32 scale that a token's key or value of one head has, if these are int8."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PageGeometry:
    """Sizes of the pages of one arena.

    A KV block is `num_groups` pages, one per layer group; a page holds `page_tokens` tokens of `layers_per_group`
    layers, laid out `[layer in group][K|V][kv_head][token][head_dim]`. Where keys and values are int8, their scales
    follow, `[layer in group][K|V][kv_head][token]`.
    """

    page_bytes: int
    """Bytes of one page, a multiple of `PITCH_BYTES`."""
    page_tokens: int
    """Tokens of one KV block."""
    num_groups: int
    """Layer groups G; 1 for models whose KV of 16 tokens fits a page."""
    layers_per_group: int
    """Layers in one group; the last group may use fewer."""
    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype_bytes: int
    """Bytes of one element of LoRA weights, and of KV cache that is not int8."""
    is_kv_int8: bool = False
    """True if keys and values are int8, each token's of each head with a float32 scale."""

    @property
    def kv_vectors(self) -> int:
        """Vectors of `head_dim` elements in a page, keys and values together."""
        return self.layers_per_group * 2 * self.num_kv_heads * self.page_tokens

    @property
    def page_elements(self) -> int:
        """Elements of one page."""
        return self.page_bytes // self.dtype_bytes

    def blocks(self, num_tokens: int) -> int:
        """KV blocks that hold `num_tokens` tokens."""
        return -(-num_tokens // self.page_tokens)

    def pages(self, num_tokens: int) -> int:
        """Pages that hold the KV of `num_tokens` tokens."""
        return self.blocks(num_tokens) * self.num_groups


def page_geometry(
    *,
    num_layers: int,
    num_kv_heads: int,
    head_dim: int,
    dtype_bytes: int,
    largest_row_features: int,
    is_kv_int8: bool = False,
) -> PageGeometry:
    """Choose the page size for a model.

    `page_tokens` is the smallest of 16, 32, 64, 128 that makes a page at least 768 KiB. Toy models, whose page would
    be smaller even at 128, take 16, doubled until the largest row group fits. Where 16 tokens exceed 2 MiB, the layers
    are split into the smallest power-of-two number of groups that does not.

    With int8 keys and values, a page has as many times the tokens as its elements are smaller, and a little more bytes,
    for the scales.

    Args:
        num_layers: Decoder layers.
        num_kv_heads: KV heads per layer.
        head_dim: Elements per head.
        dtype_bytes: Bytes per element of LoRA weights, and of KV cache that is not int8.
        largest_row_features: Elements of the widest LoRA row (the largest in or out features of any module).
        is_kv_int8: Whether keys and values are int8 with scales.
    """
    layer_token_bytes = 2 * num_kv_heads * head_dim * dtype_bytes
    largest_group_bytes = GROUP_ROWS * row_pitch_bytes(largest_row_features, dtype_bytes)

    num_groups = 1
    while (
        -(-num_layers // num_groups) * layer_token_bytes * 16 > MAX_PAGE_BYTES
        and num_groups < num_layers
    ):
        num_groups *= 2
    layers_per_group = -(-num_layers // num_groups)
    token_bytes = layers_per_group * layer_token_bytes

    page_tokens = next((t for t in PAGE_TOKEN_CHOICES if t * token_bytes >= MIN_PAGE_BYTES), 16)
    while (
        page_tokens * token_bytes < largest_group_bytes or page_tokens * token_bytes % PITCH_BYTES
    ):
        page_tokens *= 2
    page_bytes = page_tokens * token_bytes
    if is_kv_int8:
        page_tokens *= dtype_bytes
        # Torch operators gather whole vectors from the arena, so a page is a multiple of them, too.
        unit = math.lcm(PITCH_BYTES, head_dim)
        page_bytes = -(-page_bytes * (head_dim + SCALE_BYTES) // head_dim // unit) * unit
    return PageGeometry(
        page_bytes=page_bytes,
        page_tokens=page_tokens,
        num_groups=num_groups,
        layers_per_group=layers_per_group,
        num_layers=num_layers,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        dtype_bytes=dtype_bytes,
        is_kv_int8=is_kv_int8,
    )
