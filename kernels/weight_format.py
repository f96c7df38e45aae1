"""Formats of the weights of linear layers, and the bytes of a layer in each. Needs no torch.

int8 and int4 weights lie in panels: the codes of several outputs side by side, for one group of inputs after another.
"""

from __future__ import annotations

from typing import Literal, get_args

WeightFormat = Literal["bf16", "int8", "int4"]
"""bf16 stands for the dtype of the model, whatever that is."""
WEIGHT_FORMATS: tuple[WeightFormat, ...] = get_args(WeightFormat)
"""The largest first."""
HEAD_FORMAT: Literal["int8"] = "int8"
"""Format of the head where other layers are in 8 or 4 bits."""
GROUP = 32
"""Inputs that share a scale in int4."""
UNIT = 4
"""Inputs whose codes lie together; one lane of an instruction multiplies and adds them."""
BF16_PANEL = 64
"""Outputs of a panel in bfloat16, where weights become floats in registers."""
BF16_UNIT = 2
"""Inputs whose weights in bfloat16 lie together."""
INT8_PANEL = 64
"""Outputs of a panel in int8."""
INT4_PANEL = 32
"""Outputs of a panel in int4."""
INT8_INPUTS = 64
"""Inputs are padded to a multiple of this, a row of an AMX tile."""


def number_format(dtype: str, weights: str, is_kv_int8: bool) -> str:
    """Name of the number formats of an engine for people, such as "bfloat16 with int8 weights"."""
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
