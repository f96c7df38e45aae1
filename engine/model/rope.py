"""The rotary embedding: which one a config asks for, and its table of cosines and sines, one row per position.

Configs are read in both spellings: `rope_parameters`, and the older rope_theta with rope_scaling.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, cast, get_args

import torch

from weft.engine.model.config_fields import ConfigFields
from weft.kernels.plain.rows import both_halves

RopeKind = Literal["default", "linear", "dynamic", "llama3", "yarn"]
DEFAULT_THETA = 10_000.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeSpec:
    """A rotary embedding; fields that its kind does not use keep their defaults."""

    kind: RopeKind = "default"
    theta: float = DEFAULT_THETA
    factor: float = 1.0
    """How many times longer than in pretraining the context may be."""
    original_positions: int = 0
    """Context of the pretraining, for llama3 and yarn."""
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    """Whether yarn rounds its correction range to whole dimensions."""
    attention_factor: float = 1.0
    """Multiplies sines and cosines."""
    max_positions: int = 0
    """Context that the scaling itself reaches; 0 where the config's own limit counts."""


def rope_spec(fields: ConfigFields, max_positions: int) -> RopeSpec:
    """Read the rotary embedding of a config.

    The kind "dynamic" changes with the length of the sequence, but only beyond `max_positions`; as longer sequences
    are not served it equals the default.

    Args:
        fields: The config.
        max_positions: `max_position_embeddings`, the original context where the scaling does not say.

    Raises:
        ConfigError: The kind is not served, or one of its keys is missing or not understood.
    """
    newer, older = fields.nested("rope_parameters"), fields.nested("rope_scaling")
    key = "rope_scaling" if older else "rope_parameters"
    theta = fields.optional_number("rope_theta") or DEFAULT_THETA
    original = fields.integer("original_max_position_embeddings", 0, minimum=0)
    fields.require("partial_rotary_factor", 1.0, default=1.0)

    rope = ConfigFields(older or newer, prefix=f"{key}.")
    rope.require("partial_rotary_factor", 1.0, default=1.0)
    older_kind = rope.text("type")
    kind = rope.text("rope_type") or older_kind or "default"
    if kind not in get_args(RopeKind):
        raise rope.error("rope_type", f"{kind!r} is not served; served are {', '.join(get_args(RopeKind))}")
    theta = rope.number("rope_theta", theta)
    own_original = rope.integer("original_max_position_embeddings", max_positions)
    spec = _scaled(rope, cast(RopeKind, kind), theta, original or own_original)
    rope.refuse_unread(())
    return spec


def _scaled(rope: ConfigFields, kind: RopeKind, theta: float, original: int) -> RopeSpec:
    if kind == "default":
        return RopeSpec(theta=theta)
    factor = rope.number("factor")
    if kind == "llama3":
        return RopeSpec(
            kind=kind,
            theta=theta,
            factor=factor,
            original_positions=original,
            low_freq_factor=rope.number("low_freq_factor"),
            high_freq_factor=rope.number("high_freq_factor"),
        )
    if kind == "yarn":
        return RopeSpec(
            kind=kind,
            theta=theta,
            factor=factor,
            original_positions=original,
            beta_fast=rope.number("beta_fast", 32.0),
            beta_slow=rope.number("beta_slow", 1.0),
            truncate=rope.flag("truncate", True),
            attention_factor=_yarn_attention_factor(rope, factor),
            max_positions=int(factor * original),
        )
    return RopeSpec(kind=kind, theta=theta, factor=factor)


def _yarn_attention_factor(rope: ConfigFields, factor: float) -> float:
    """YaRN (arXiv:2309.00071), section 3.4: attention grows a little sharper with the context."""
    given = rope.optional_number("attention_factor")
    mscale, mscale_all = rope.optional_number("mscale"), rope.optional_number("mscale_all_dim")
    if given is not None:
        return given

    def grown(scale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0

    return grown(mscale) / grown(mscale_all) if mscale and mscale_all else grown(1.0)


@dataclass(frozen=True, slots=True)
class RopeTable:
    """Cosines and sines, scaled by the attention factor.

    Both are [num_positions, head_dim / 2], float32.
    """

    cos: torch.Tensor
    sin: torch.Tensor

    def at(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Factors of the positions [T], int64, as the rope kernels take them: two tensors [T, head_dim]."""
        return both_halves(self.cos.index_select(0, positions), self.sin.index_select(0, positions))


def rope_table(spec: RopeSpec, head_dim: int, num_positions: int, device: torch.device) -> RopeTable:
    """Compute the table for positions 0 to num_positions - 1.

    Args:
        spec: Kind and scaling.
        head_dim: Elements per head, all of which are rotated.
        num_positions: Rows.
        device: Where the table lies.
    """
    positions = torch.arange(num_positions, dtype=torch.float32)
    angles = torch.outer(positions, inverse_frequencies(spec, head_dim))
    return RopeTable(
        cos=(angles.cos() * spec.attention_factor).to(device),
        sin=(angles.sin() * spec.attention_factor).to(device),
    )


def inverse_frequencies(spec: RopeSpec, head_dim: int) -> torch.Tensor:
    """Radians per position of each rotated pair, [head_dim / 2], float32."""
    frequencies = 1.0 / (spec.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim))
    if spec.kind == "linear":
        return frequencies / spec.factor
    if spec.kind == "llama3":
        return _llama3(spec, frequencies)
    if spec.kind == "yarn":
        return _yarn(spec, head_dim)
    return frequencies


def _llama3(spec: RopeSpec, frequencies: torch.Tensor) -> torch.Tensor:
    """Slow pairs are divided by the factor, fast ones kept, and those between interpolated (Llama 3.1)."""
    turns = spec.original_positions / (2 * math.pi / frequencies)
    smooth = (turns - spec.low_freq_factor) / (spec.high_freq_factor - spec.low_freq_factor)
    scaled = frequencies / spec.factor
    between = (1 - smooth) * scaled + smooth * frequencies
    slow_or_between = torch.where(turns < spec.low_freq_factor, scaled, between)
    return torch.where(turns > spec.high_freq_factor, frequencies, slow_or_between)


def _yarn(spec: RopeSpec, head_dim: int) -> torch.Tensor:
    """Interpolate slow pairs, extrapolate fast ones, ramp between (YaRN, arXiv:2309.00071, section 3.2)."""

    def pair_with(num_turns: float) -> float:
        ratio = spec.original_positions / (num_turns * 2 * math.pi)
        return head_dim * math.log(ratio) / (2 * math.log(spec.theta))

    low, high = pair_with(spec.beta_fast), pair_with(spec.beta_slow)
    if spec.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001  # a ramp of no width would divide by zero

    powers = spec.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    return (1.0 / (spec.factor * powers)) * ramp + (1.0 / powers) * (1 - ramp)
