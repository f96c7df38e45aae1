"""Storage of a checkpoint's linear weights, read from its `quantization_config`. No torch.

The files, not the config, say which linears are quantised, so lists of exempt modules are ignored. Keys that only tell
how the quantisation was computed are ignored too. A rotation of the model's inputs is refused.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

from manylora.engine.model.config_fields import ConfigFields, shown

Layout = Literal["scaled", "packed", "gptq", "awq", "bnb-int8", "bnb-4bit", "q3.5", "gguf"]
"""Names in `manylora.engine.model.formats.FORMATS`, and gguf, whose tensors are read as floats."""
RECIPE_FILE = "recipe.yaml"
"""File that llm-compressor writes beside the weights, with the steps that made them."""
_ROTATES = re.compile(r"rotat|hadamard|transform_config|spinquant|quarot", re.IGNORECASE)
_ROTATING_STEPS = re.compile(r"SpinQuantModifier|QuIPModifier")
_FOLDING_STEPS = re.compile(r"SmoothQuantModifier|AWQModifier")


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantisation:
    """Storage of a checkpoint's linear weights."""

    layout: Layout
    bits: int
    """Bits of a stored weight, without its scale."""
    block: tuple[int, int] | None = None
    """Outputs and inputs that share a scale; None if a scale is for a row or for the whole weight."""
    variant: str = ""
    """Variant of the layout; each format says which there are."""
    folds_input_scale: bool = False
    """True if inputs of linears may be scaled: AWQ and SmoothQuant divide the norms before them and multiply the
    weights. An adapter of the original model gets inputs then that it was not trained for."""


def read_quantisation(given: dict[str, Any], recipe: str = "") -> Quantisation:
    """Read a `quantization_config`.

    Args:
        given: The object of `config.json`.
        recipe: Content of `recipe.yaml` beside it; empty if there is none.

    Raises:
        ConfigError: The method is not served, or the model is rotated. The message names the key.
    """
    fields = ConfigFields(given, prefix="quantization_config.")
    rotating = next((key for key in given if _ROTATES.search(key) and given[key]), None)
    if rotating or _ROTATING_STEPS.search(recipe):
        raise fields.error(
            rotating or "quant_method",
            "the weights were rotated (QuaRot, SpinQuant, QuIP), so adapters and norms would not fit them; take a "
            "checkpoint that is not rotated",
        )
    method = fields.choice("quant_method", sorted(_METHODS))
    found = _METHODS[method](fields)
    if method == "compressed-tensors" and recipe:
        return replace(found, folds_input_scale=bool(_FOLDING_STEPS.search(recipe)))
    return found


def _compressed_tensors(fields: ConfigFields) -> Quantisation:
    groups = fields.within("config_groups")
    usual = fields.text("format")
    found = {_scheme(groups.within(name), usual) for name in fields.nested("config_groups")}
    if len(found) != 1:
        raise fields.error(
            "config_groups",
            f"expected one way to store the weights of all linears, got {len(found)}",
        )
    return found.pop()


def _scheme(group: ConfigFields, usual: str | None) -> Quantisation:
    weights = group.within("weights")
    stored = group.text("format") or usual
    bits = weights.integer("num_bits", 8)
    is_float = weights.text("type") == "float"
    layout: Layout = "scaled"
    if stored == "pack-quantized" and not is_float and bits in (4, 8):
        layout = "packed"
    elif (
        stored not in ("naive-quantized", "float-quantized" if is_float else "int-quantized")
        or bits != 8
    ):
        kind = f"{shown(weights.text('type') or 'int')} of {bits} bits"
        raise group.error("format", f"{shown(stored)} with weights of {kind} is not served")
    usual = "group" if weights.integer("group_size", -1, minimum=-1) > 0 else "channel"
    strategy = weights.choice("strategy", ("channel", "tensor", "group", "block"), usual)
    block = weights.pair("block_structure") if strategy == "block" else None
    if strategy == "group":
        block = (1, weights.integer("group_size"))
    # Without a recipe this is a guess: a model that quantises inputs to whole numbers was mostly smoothed first.
    is_unknown = group.nested("input_activations").get("type", "float") == "int"
    return Quantisation(
        layout=layout,
        bits=bits,
        block=block,
        variant="F8_E4M3" if is_float else "I8",
        folds_input_scale=is_unknown,
    )


def _fp8(fields: ConfigFields) -> Quantisation:
    fields.require("fmt", "e4m3", default="e4m3")
    fields.require("quant_algo", "FP8", default="FP8")
    return Quantisation(
        layout="scaled", bits=8, block=fields.pair("weight_block_size"), variant="F8_E4M3"
    )


def _gptq(fields: ConfigFields) -> Quantisation:
    claimed = fields.choice(
        "checkpoint_format", ("gptq", "gptq_v2"), fields.text("format") or "gptq"
    )
    other = sorted(key for key in fields.nested("dynamic") if not key.startswith("-:"))
    if other:
        raise fields.error(
            "dynamic", f"modules with settings of their own are not served: {shown(other)}"
        )
    bits = fields.choice("bits", (4, 8))
    return Quantisation(layout="gptq", bits=bits, block=_group(fields), variant=claimed)


def _awq(fields: ConfigFields) -> Quantisation:
    fields.choice("version", ("gemm", "GEMM"), fields.text("format") or "gemm")
    fields.require("zero_point", True, default=True)
    bits = fields.choice("bits", (4,))
    return Quantisation(layout="awq", bits=bits, block=_group(fields), folds_input_scale=True)


def _bitsandbytes(fields: ConfigFields) -> Quantisation:
    if fields.flag("load_in_4bit", False):
        kind = fields.choice("bnb_4bit_quant_type", ("nf4", "fp4"), "fp4")
        return Quantisation(layout="bnb-4bit", bits=4, variant=kind)
    fields.require("load_in_8bit", True, default=False)
    return Quantisation(layout="bnb-int8", bits=8)


def _gguf(fields: ConfigFields) -> Quantisation:
    return Quantisation(layout="gguf", bits=fields.integer("bits"))


def _manylora(fields: ConfigFields) -> Quantisation:
    fields.require("format", "q3.5", default=None)
    return Quantisation(layout="q3.5", bits=4)


def _group(fields: ConfigFields) -> tuple[int, int] | None:
    size = fields.integer("group_size", minimum=-1)
    return (1, fields.integer("group_size")) if size != -1 else None


_METHODS: dict[str, Callable[[ConfigFields], Quantisation]] = {
    "compressed-tensors": _compressed_tensors,
    "fp8": _fp8,
    "fbgemm_fp8": _fp8,
    "modelopt": _fp8,
    "gptq": _gptq,
    "awq": _awq,
    "bitsandbytes": _bitsandbytes,
    "gguf": _gguf,
    "manylora": _manylora,
}
