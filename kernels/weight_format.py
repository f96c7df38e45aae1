"""Formats of the weights of linear layers, and the bytes that a layer then takes. Needs no torch.

int8 and int4 weights lie in panels: the codes of so many outputs side by side, for one group of inputs after another.
"""

from __future__ import annotations

from typing import Literal

WeightFormat = Literal["bf16", "int8", "int4"]
"""bf16 is the dtype of the model, whatever that is."""
HEAD_FORMAT: Literal["int8"] = "int8"
"""Of the head beside layers in 8 or 4 bits."""
GROUP = 32
"""Inputs that share a scale in int4."""
UNIT = 4
"""Inputs whose codes lie together: what one lane of an instruction multiplies and adds up."""
INT8_PANEL = 64
INT4_PANEL = 32
"""Outputs of a panel."""
INT8_INPUTS = 64
"""Inputs come in multiples of so many: a row of a tile of AMX."""


def number_format(dtype: str, weights: str, is_kv_int8: bool) -> str:
    """How people are told what a model is computed in, and what is kept otherwise."""
    kept = [] if weights == "bf16" else [f"{weights} weights"]
    kept += ["int8 KV cache"] if is_kv_int8 else []
    return f"{dtype} with {' and '.join(kept)}" if kept else dtype


def layer_bytes(weights: Literal["int8", "int4"], out_features: int, in_features: int) -> int:
    """Bytes of a quantised layer: codes and scales in whole panels, and a bias in float32."""
    if weights == "int8":
        columns = _whole(out_features, INT8_PANEL)
        return columns * (_whole(in_features, INT8_INPUTS) + 8)
    columns = _whole(out_features, INT4_PANEL)
    return columns * (_whole(in_features, GROUP) // GROUP * (GROUP // 2 + 2) + 4)


def _whole(count: int, unit: int) -> int:
    return -(-count // unit) * unit
