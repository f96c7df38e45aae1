"""Sampling parameters written row by row."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from weft.kernels.sampling import SamplingTensors

Parameters = tuple[float, int, float, float]
"""temperature, top_k, top_p, min_p"""
GREEDY = (0.0, 0, 1.0, 0.0)


def sampling_of(rows: Sequence[tuple[Parameters, float]], device: torch.device | str = "cpu") -> SamplingTensors:
    """From (parameters, uniform) of each row."""
    temperatures, top_ks, top_ps, min_ps = zip(*(parameters for parameters, _ in rows), strict=True)
    uniforms = [uniform for _, uniform in rows]
    return SamplingTensors.build(temperatures, top_ks, top_ps, min_ps, uniforms, torch.device(device))
