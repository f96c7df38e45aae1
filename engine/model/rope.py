"""Tables of the rotary embedding's cosines and sines, one row per position."""

from __future__ import annotations

import math

import torch

from manylora.engine.model.rope_spec import RopeSpec


def rope_table(
    spec: RopeSpec, head_dim: int, num_positions: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the table for positions 0 to num_positions - 1.

    Args:
        spec: Kind and scaling.
        head_dim: Elements per head, all of which are rotated.
        num_positions: Number of rows.
        device: Device of the table.

    Returns:
        Cosines and sines, both [num_positions, head_dim / 2], float32, scaled by the attention factor.
    """
    positions = torch.arange(num_positions, dtype=torch.float32)
    angles = torch.outer(positions, inverse_frequencies(spec, head_dim))
    cos, sin = (turned * spec.attention_factor for turned in (angles.cos(), angles.sin()))
    return cos.to(device), sin.to(device)


def inverse_frequencies(spec: RopeSpec, head_dim: int) -> torch.Tensor:
    """Radians per position of each rotated pair, [head_dim / 2], float32."""
    frequencies = 1.0 / (
        spec.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    )
    if spec.kind == "linear":
        return frequencies / spec.factor
    if spec.kind == "llama3":
        return _llama3(spec, frequencies)
    if spec.kind == "yarn":
        return _yarn(spec, head_dim)
    return frequencies


def _llama3(spec: RopeSpec, frequencies: torch.Tensor) -> torch.Tensor:
    """Divide slow pairs by the factor, keep fast ones, and interpolate between them (Llama 3.1)."""
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

    low = pair_with(spec.beta_fast)
    high = pair_with(spec.beta_slow)
    if spec.truncate:
        low = math.floor(low)
        high = math.ceil(high)
    low = max(low, 0)
    high = min(high, head_dim - 1)
    if low == high:
        high += 0.001  # a ramp without width would divide by zero

    powers = spec.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    return (1.0 / (spec.factor * powers)) * ramp + (1.0 / powers) * (1 - ramp)
