"""Every format that is served, with a writer of it: name, `quantization_config`, and how a weight is stored."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from compressed_writers import (
    TOKEN_INPUTS,
    compressed,
    float8,
    int_quantized,
    int_quantized_asymmetric,
    int_weights,
    pack_quantized,
    with_input_scale,
)
from integer_writers import awq, bnb_4bit, bnb_int8, gptq, three_half
from quantised_models import Encode

FLOAT8 = {"num_bits": 8, "type": "float", "symmetric": True}


@dataclass(frozen=True)
class Case:
    config: Mapping[str, Any]
    encode: Encode
    bits: int = 4
    folds: bool = False


CASES: dict[str, Case] = {
    "w4a16": Case(compressed("pack-quantized", int_weights(4, 16)), pack_quantized(4, 16)),
    "w4a16-zero-points": Case(
        compressed("pack-quantized", int_weights(4, 16, symmetric=False)),
        pack_quantized(4, 16, symmetric=False),
    ),
    "w4a16-ordered": Case(
        compressed("pack-quantized", int_weights(4, 16, symmetric=False, actorder="group")),
        pack_quantized(4, 16, symmetric=False, is_ordered=True),
    ),
    "w4a16-rows": Case(compressed("pack-quantized", int_weights(4, None)), pack_quantized(4, None)),
    "w8a16": Case(compressed("pack-quantized", int_weights(8, 32)), pack_quantized(8, 32), bits=8),
    "w8a8": Case(
        compressed("int-quantized", int_weights(8, None), TOKEN_INPUTS),
        int_quantized,
        bits=8,
        folds=True,
    ),
    "int8-zero-points": Case(
        compressed("int-quantized", int_weights(8, 16, symmetric=False)),
        int_quantized_asymmetric,
        bits=8,
    ),
    "fp8-rows": Case(
        compressed("float-quantized", {**FLOAT8, "strategy": "channel"}), float8(1, 0), bits=8
    ),
    "fp8-whole": Case(
        compressed("float-quantized", {**FLOAT8, "strategy": "tensor"}),
        with_input_scale(float8(0, 0)),
        bits=8,
    ),
    "fp8-blocks": Case(
        compressed("float-quantized", {**FLOAT8, "strategy": "block", "block_structure": [32, 32]}),
        float8(32, 32),
        bits=8,
    ),
    "fine-grained": Case(
        {
            "quant_method": "fp8",
            "weight_block_size": [32, 32],
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
        },
        float8(32, 32, scale_name="weight_scale_inv"),
        bits=8,
    ),
    "fine-grained-e8m0": Case(
        {"quant_method": "fp8", "weight_block_size": [16, 64], "scale_fmt": "ue8m0"},
        float8(16, 64, scale_name="weight_scale_inv", scale_dtype=torch.float8_e8m0fnu),
        bits=8,
    ),
    "fp8-static": Case(
        {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None},
        with_input_scale(float8(0, 0, scale_name="weight_scale_inv"), "activation_scale"),
        bits=8,
    ),
    "fbgemm": Case(
        {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}, float8(1, 0), bits=8
    ),
    "modelopt": Case(
        {"quant_method": "modelopt", "quant_algo": "FP8", "exclude_modules": ["lm_head"]},
        with_input_scale(float8(0, 0)),
        bits=8,
    ),
}

GPTQ = {
    "quant_method": "gptq",
    "bits": 4,
    "group_size": 16,
    "sym": True,
    "desc_act": False,
    "lm_head": False,
    "checkpoint_format": "gptq",
    "meta": {"quantizer": ["gptqmodel:2.0"]},
}
BNB = {
    "quant_method": "bitsandbytes",
    "llm_int8_threshold": 6.0,
    "bnb_4bit_compute_dtype": "bfloat16",
}

CASES |= {
    "gptq": Case(GPTQ, gptq(4, 16)),
    "gptq-v2": Case({**GPTQ, "checkpoint_format": "gptq_v2"}, gptq(4, 16, version=2)),
    "gptq-says-v1-is-v2": Case(GPTQ, gptq(4, 16, version=2)),
    "gptq-says-v2-is-v1": Case({**GPTQ, "checkpoint_format": "gptq_v2"}, gptq(4, 16)),
    "gptq-asymmetric": Case({**GPTQ, "sym": False}, gptq(4, 16, symmetric=False)),
    "gptq-asymmetric-v2": Case(
        {**GPTQ, "sym": False, "checkpoint_format": "gptq_v2"},
        gptq(4, 16, symmetric=False, version=2),
    ),
    "gptq-ordered": Case({**GPTQ, "desc_act": True}, gptq(4, 16, symmetric=False, is_ordered=True)),
    "gptq-no-index": Case({**GPTQ, "dynamic": {"-:.*o_proj.*": {}}}, gptq(4, 16, has_index=False)),
    "gptq-rows": Case({**GPTQ, "group_size": -1}, gptq(4, 128)),
    "gptq-8": Case({**GPTQ, "bits": 8}, gptq(8, 16, symmetric=False), bits=8),
    "gptq-8-v2": Case({**GPTQ, "bits": 8}, gptq(8, 16, version=2), bits=8),
    "awq": Case(
        {"quant_method": "awq", "bits": 4, "group_size": 16, "version": "gemm", "zero_point": True},
        awq(16),
        folds=True,
    ),
    "nf4": Case(
        {**BNB, "load_in_4bit": True, "load_in_8bit": False, "bnb_4bit_quant_type": "nf4"},
        bnb_4bit("nf4", nested=False),
    ),
    "nf4-nested": Case(
        {
            **BNB,
            "load_in_4bit": True,
            "bnb_4bit_quant_type": "nf4",
            "bnb_4bit_use_double_quant": True,
        },
        bnb_4bit("nf4", nested=True),
    ),
    "fp4": Case(
        {**BNB, "load_in_4bit": True, "bnb_4bit_quant_type": "fp4"}, bnb_4bit("fp4", nested=False)
    ),
    "bnb-int8": Case({**BNB, "load_in_8bit": True}, bnb_int8, bits=8),
    "q3.5": Case({"quant_method": "manylora", "format": "q3.5"}, three_half),
}
