"""The rotary embedding of a config. No torch.

Both spellings are read: `rope_parameters`, and the older rope_theta with rope_scaling.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal, get_args

from manylora.engine.model.config_fields import MAX_INTEGER, ConfigFields

RopeKind = Literal["default", "linear", "dynamic", "llama3", "yarn"]
DEFAULT_THETA = 10_000.0
MIN_THETA = 2.0
"""Least base of the frequencies. They are its negative powers, which do not differ at 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeSpec:
    """A rotary embedding. Fields that its kind does not use keep their defaults."""

    kind: RopeKind = "default"
    theta: float = DEFAULT_THETA
    factor: float = 1.0
    """Longest context relative to that of the pretraining."""
    original_positions: int = 0
    """Context of the pretraining, for llama3 and yarn."""
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    """True if yarn rounds its correction range to whole dimensions."""
    attention_factor: float = 1.0
    """Factor of sines and cosines."""
    max_positions: int = 0
    """Longest context of the scaling; 0 if the config's own limit counts."""


def rope_spec(fields: ConfigFields, max_positions: int) -> RopeSpec:
    """Read the rotary embedding of a config.

    The kind "dynamic" changes with the length of the sequence, but only beyond `max_positions`. Longer sequences are
    not served, so it equals the default.

    Args:
        fields: The config.
        max_positions: `max_position_embeddings`, the original context if the scaling has none.

    Raises:
        ConfigError: The kind is not served, or one of its keys is missing or not understood.
    """
    newer = fields.nested("rope_parameters")
    older = fields.nested("rope_scaling")
    key = "rope_scaling" if older else "rope_parameters"
    theta = fields.optional_number("rope_theta") or DEFAULT_THETA
    original = fields.integer("original_max_position_embeddings", 0, minimum=0)
    fields.require("partial_rotary_factor", 1.0, default=1.0)

    rope = ConfigFields(older or newer, prefix=f"{key}.")
    rope.require("partial_rotary_factor", 1.0, default=1.0)
    kind = rope.choice("rope_type", get_args(RopeKind), rope.text("type") or "default")
    theta = rope.number("rope_theta", theta)
    if theta < MIN_THETA:
        raise rope.error(
            "rope_theta", f"expected a number of at least {MIN_THETA:g}, got {theta:g}"
        )
    own_original = rope.integer("original_max_position_embeddings", max_positions)
    spec = _scaled(rope, kind, theta, original or own_original)
    rope.refuse_unread(())
    return spec


def _scaled(rope: ConfigFields, kind: RopeKind, theta: float, original: int) -> RopeSpec:
    if kind == "default":
        return RopeSpec(theta=theta)
    spec = RopeSpec(kind=kind, theta=theta, factor=rope.number("factor"))
    if kind == "llama3":
        low = rope.number("low_freq_factor")
        high = rope.number("high_freq_factor")
        if low >= high:
            raise rope.error(
                "high_freq_factor", f"expected more than low_freq_factor {low:g}, got {high:g}"
            )
        return replace(
            spec, original_positions=original, low_freq_factor=low, high_freq_factor=high
        )
    if kind == "yarn":
        if spec.factor * original > MAX_INTEGER:
            raise rope.error(
                "factor",
                f"{spec.factor:g} times a context of {original} tokens is more than any model's",
            )
        return replace(
            spec,
            original_positions=original,
            beta_fast=rope.number("beta_fast", 32.0),
            beta_slow=rope.number("beta_slow", 1.0),
            truncate=rope.flag("truncate", True),
            attention_factor=_yarn_attention_factor(rope, spec.factor),
            max_positions=int(spec.factor * original),
        )
    return spec


def _yarn_attention_factor(rope: ConfigFields, factor: float) -> float:
    """Attention factor of YaRN (arXiv:2309.00071, section 3.4): attention gets slightly sharper with the context."""
    given = rope.optional_number("attention_factor")
    mscale = rope.optional_number("mscale")
    mscale_all = rope.optional_number("mscale_all_dim")
    if given is not None:
        return given

    def grown(scale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0

    return grown(mscale) / grown(mscale_all) if mscale and mscale_all else grown(1.0)
