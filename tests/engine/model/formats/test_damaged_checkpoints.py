"""Quantised checkpoints that are incomplete or damaged are refused by the name of the tensor or the config's key."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from compressed_writers import compressed, int_weights
from integer_writers import gptq, with_zero_bias
from manylora.engine.model.checkpoint.weights import load_decoder
from manylora.engine.model.formats import dequantised
from manylora.engine.model.formats.stored import StoredLinear
from manylora.engine.model.quantisation import Quantisation, read_quantisation
from manylora.engine.model.spec import read_spec
from manylora.errors import ConfigError
from quantised_cases import BNB, CASES, GPTQ
from quantised_models import WEIGHTS, Tensors, make_quantised
from tiny_models import make_model

Q = "model.layers.1.self_attn.q_proj"
HUGE = 1 << 44
NF4_STATE = f"{Q}.weight.quant_state.bitsandbytes__nf4"


def _set(part: str, at: tuple[int, ...], value: float) -> Callable[[Tensors], None]:
    def edit(tensors: Tensors) -> None:
        tensors[f"{Q}.{part}"][at] = value

    return edit


def _put(part: str, tensor: torch.Tensor) -> Callable[[Tensors], None]:
    return lambda tensors: tensors.update({f"{Q}.{part}": tensor})


def _drop(part: str) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.pop(f"{Q}.{part}")


def _state(**changes: Any) -> Callable[[Tensors], None]:
    def edit(tensors: Tensors) -> None:
        state = {**json.loads(bytes(tensors[NF4_STATE].tolist())), **changes}
        _put_text(NF4_STATE, json.dumps(state))(tensors)

    return edit


def _put_text(name: str, text: str) -> Callable[[Tensors], None]:
    return lambda tensors: tensors.update(
        {name: torch.tensor(list(text.encode()), dtype=torch.uint8)}
    )


DAMAGED: list[tuple[str, Callable[[Tensors], object], str]] = [
    ("w4a16", _drop("weight_packed"), r"lacks .*q_proj\.weight_packed"),
    ("w4a16", _drop("weight_scale"), r"lacks .*q_proj\.weight_scale"),
    ("w4a16", _drop("weight_shape"), r"lacks .*q_proj\.weight_shape"),
    (
        "w4a16",
        _put("weight_packed", torch.zeros(64, 7, dtype=torch.int32)),
        r"weight_packed must .*\[64, 8\], got I32",
    ),
    ("w4a16", _put("weight_packed", torch.zeros(64, 8)), r"weight_packed must be a I32 tensor"),
    (
        "w4a16",
        _put("weight_shape", torch.tensor([64, 60])),
        r"weight_shape must be \[64, 64\], got \[64, 60\]",
    ),
    (
        "w4a16",
        _put("weight_scale", torch.ones(64, 3)),
        r"weight_scale must be a float tensor of shape \[64, 4\]",
    ),
    (
        "w4a16",
        _set("weight_scale", (3, 1), torch.nan),
        r"q_proj\.weight_scale has values that are infinite or NaN",
    ),
    (
        "w4a16",
        _set("weight_scale", (3, 1), torch.inf),
        r"q_proj\.weight_scale has values that are infinite or NaN",
    ),
    (
        "w4a16",
        _put("qweight", torch.zeros(8, 64, dtype=torch.int32)),
        r"does not: .*q_proj\.qweight",
    ),
    (
        "w4a16-zero-points",
        _put("weight_zero_point", torch.zeros(7, 4, dtype=torch.int32)),
        r"weight_zero_point must",
    ),
    (
        "w4a16-ordered",
        _set("weight_g_idx", (5,), 4),
        r"q_proj\.weight_g_idx must have groups from 0 to 3",
    ),
    (
        "w4a16-ordered",
        _set("weight_g_idx", (5,), -1),
        r"q_proj\.weight_g_idx must have groups from 0 to 3",
    ),
    (
        "w8a8",
        _put("weight", torch.zeros(64, 64, dtype=torch.uint8)),
        r"q_proj\.weight must be a I8 tensor",
    ),
    ("w8a8", _drop("weight_scale"), r"lacks .*q_proj\.weight_scale"),
    ("w8a8", _put("weight_scale", torch.ones(63, 1)), r"weight_scale must be .*got F32 \[63, 1\]"),
    (
        "fp8-rows",
        _put("weight", torch.full((64, 64), torch.nan).to(torch.float8_e4m3fn)),
        r"q_proj\.weight has values",
    ),
    (
        "fp8-rows",
        _put("weight_scale", torch.full((64, 1), 3e38)),
        r"q_proj\.weight has values that are infinite",
    ),
    (
        "fine-grained",
        _put("weight_scale_inv", torch.ones(2, 3)),
        r"weight_scale_inv must be .*\[2, 2\]",
    ),
    ("gptq", _drop("qzeros"), r"lacks .*q_proj\.qzeros"),
    ("gptq", _set("g_idx", (0,), 64), r"q_proj\.g_idx must have groups from 0 to 3"),
    ("gptq", _set("scales", (0, 0), torch.nan), r"q_proj\.scales has values"),
    (
        "gptq",
        _put("qweight", torch.zeros(16, 64, dtype=torch.int32)),
        r"qweight must be a I32 tensor of shape \[8, 64\]",
    ),
    ("gptq", _put("bias", torch.ones(64)), r"q_proj\.bias must be zeros"),
    (
        "awq",
        _put("qweight", torch.zeros(8, 64, dtype=torch.int32)),
        r"qweight must be a I32 tensor of shape \[64, 8\]",
    ),
    ("awq", _set("scales", (1, 2), torch.inf), r"q_proj\.scales has values"),
    ("nf4", _drop("weight.absmax"), r"lacks .*q_proj\.weight\.absmax"),
    (
        "nf4",
        _put("weight.absmax", torch.ones(63)),
        r"q_proj\.weight\.absmax must have 64 values, got 63",
    ),
    (
        "nf4",
        _put("weight.absmax", torch.ones(64, dtype=torch.uint8)),
        r"q_proj\.weight\.absmax must be a F32 tensor",
    ),
    ("nf4", lambda tensors: tensors[NF4_STATE].zero_(), r"bitsandbytes__nf4 cannot be read"),
    ("nf4", _state(shape=[32, 128]), r"bitsandbytes__nf4 must be of nf4 and shape \[64, 64\]"),
    ("nf4", _state(quant_type="fp4"), r"bitsandbytes__nf4 must be of nf4"),
    ("nf4", _state(blocksize=0), r"bitsandbytes__nf4 must be of nf4"),
    ("nf4", _state(blocksize="wide"), r"bitsandbytes__nf4 cannot be read"),
    ("nf4", _state(blocksize=math.inf), r"bitsandbytes__nf4 cannot be read"),
    ("nf4", _put_text(NF4_STATE, "[" * 100_000), r"bitsandbytes__nf4 cannot be read"),
    ("nf4-nested", _drop("weight.nested_absmax"), r"lacks .*q_proj\.weight\.nested_absmax"),
    (
        "nf4-nested",
        _put("weight.nested_absmax", torch.ones(2)),
        r"nested_absmax must have 1 values, got 2",
    ),
    ("bnb-int8", _drop("SCB"), r"lacks .*q_proj\.SCB"),
    (
        "bnb-int8",
        _put("weight_format", torch.tensor(1, dtype=torch.uint8)),
        r"q_proj\.weight_format must be 0",
    ),
    (
        "q3.5",
        _put("weight_packed", torch.full((64, 28), 127, dtype=torch.uint8)),
        r"weight_packed has levels above 10",
    ),
    ("q3.5", _set("weight_minimum", (0, 0), torch.nan), r"q_proj\.weight_minimum has values"),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), "llama")


def _load(folder: Path) -> None:
    load_decoder(folder, read_spec(folder), torch.float32, torch.device("cpu"))


@pytest.mark.parametrize(("case", "edit", "said"), DAMAGED)
def test_what_is_damaged_is_named(
    case: str, edit: Callable[[Tensors], object], said: str, model: Path, tmp_path: Path
) -> None:
    made = make_quantised(model, tmp_path, CASES[case].config, CASES[case].encode)
    _load(made.stored)
    tensors = load_file(made.stored / WEIGHTS)
    edit(tensors)
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()}, made.stored / WEIGHTS
    )
    with pytest.raises(ConfigError, match=said) as caught:
        _load(made.stored)
    assert caught.value.param == "model.path"


def test_a_bias_of_zeros_that_the_model_does_not_have_is_harmless(
    model: Path, tmp_path: Path
) -> None:
    _load(make_quantised(model, tmp_path, GPTQ, with_zero_bias(gptq(4, 16))).stored)


def test_scales_for_a_cache_in_8_bits_are_harmless(model: Path, tmp_path: Path) -> None:
    made = make_quantised(model, tmp_path, CASES["w8a8"].config, CASES["w8a8"].encode)
    tensors = load_file(made.stored / WEIGHTS)
    save_file({**tensors, "model.layers.0.self_attn.k_scale": torch.ones(1)}, made.stored / WEIGHTS)
    _load(made.stored)


@pytest.mark.parametrize("part", ["weight_scale", "weight_scale_inv"])
def test_a_block_that_is_larger_than_the_weight_takes_no_memory(part: str) -> None:
    weight = torch.arange(-12, 12, dtype=torch.int8).view(4, 6)
    for block, scale in (
        ((HUGE, HUGE), [[0.5]]),
        ((2, HUGE), [[0.5], [3.0]]),
        ((HUGE, 4), [[0.5, 3.0]]),
    ):
        tensors = {"weight": weight, part: torch.tensor(scale)}
        linear = StoredLinear(
            "q", 4, 6, Quantisation(layout="scaled", bits=8, block=block, variant="I8"), tensors
        )
        expected = [
            [
                float(weight[row, column]) * scale[row // block[0]][column // block[1]]
                for column in range(6)
            ]
            for row in range(4)
        ]
        assert dequantised(linear).tolist() == expected


def test_a_huge_block_of_bitsandbytes_takes_no_memory(model: Path, tmp_path: Path) -> None:
    made = make_quantised(model, tmp_path, CASES["nf4"].config, CASES["nf4"].encode)
    found = []
    for changes, absmax in (
        ({}, torch.full((64,), 0.5)),
        ({"blocksize": HUGE}, torch.tensor([0.5])),
    ):
        tensors = load_file(made.stored / WEIGHTS)
        _state(**changes)(tensors)
        _put("weight.absmax", absmax)(tensors)
        parts = {
            name.removeprefix(f"{Q}."): tensor
            for name, tensor in tensors.items()
            if name.startswith(f"{Q}.")
        }
        found.append(
            dequantised(
                StoredLinear(Q, 64, 64, read_quantisation(dict(CASES["nf4"].config)), parts)
            )
        )
    assert torch.equal(*found)
    assert found[0].any()


def test_a_group_that_is_larger_than_the_inputs_is_of_them_all() -> None:
    linear = StoredLinear("q", 2, 6, Quantisation(layout="gptq", bits=4, block=(1, 1 << 70)))
    values = linear.by_groups(torch.ones(2, 6), torch.zeros(2, 1), torch.tensor([[2.0], [3.0]]))
    assert values.tolist() == [[2.0] * 6, [3.0] * 6]


W4 = int_weights(4, 16)
FINE = {"quant_method": "fp8"}


@pytest.mark.parametrize(
    ("config", "key"),
    [
        ({"quant_method": "aqlm"}, "quant_method"),
        ({"bits": 4}, "quant_method"),
        (compressed("nvfp4-pack-quantized", W4), "config_groups.group_0.format"),
        (compressed("pack-quantized", int_weights(3, 16)), "config_groups.group_0.format"),
        (
            compressed("pack-quantized", {**W4, "strategy": "tensor_group"}),
            "config_groups.group_0.weights.strategy",
        ),
        (
            compressed("pack-quantized", {**W4, "group_size": None}),
            "config_groups.group_0.weights.group_size",
        ),
        (
            compressed("pack-quantized", {**W4, "num_bits": "4"}),
            "config_groups.group_0.weights.num_bits",
        ),
        ({**compressed("pack-quantized", W4), "config_groups": {}}, "config_groups"),
        (
            {**compressed("pack-quantized", W4), "config_groups": {"group_0": 1}},
            "config_groups.group_0",
        ),
        (
            {**compressed("pack-quantized", W4), "transform_config": {"config_groups": {"R1": {}}}},
            "transform_config",
        ),
        ({**FINE, "fmt": "e5m2"}, "fmt"),
        ({**FINE, "weight_block_size": [128]}, "weight_block_size"),
        ({**FINE, "weight_block_size": "128x128"}, "weight_block_size"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "quant_algo"),
        ({**GPTQ, "bits": 3}, "bits"),
        ({**GPTQ, "group_size": 0}, "group_size"),
        ({**GPTQ, "checkpoint_format": "marlin"}, "checkpoint_format"),
        ({**GPTQ, "dynamic": {"+:.*down_proj": {"bits": 8}}}, "dynamic"),
        ({**GPTQ, "rotation": "hadamard"}, "rotation"),
        ({"quant_method": "awq", "bits": 4, "group_size": 16, "version": "gemv"}, "version"),
        ({"quant_method": "awq", "bits": 4, "group_size": 16, "zero_point": False}, "zero_point"),
        ({**BNB, "load_in_4bit": True, "bnb_4bit_quant_type": "int4"}, "bnb_4bit_quant_type"),
        (BNB, "load_in_8bit"),
        ({"quant_method": "manylora", "format": "q2"}, "format"),
    ],
)
def test_a_config_that_is_not_served_is_refused_by_key(config: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_quantisation(config)
    assert caught.value.param == f"quantization_config.{key}"


def test_two_ways_to_store_weights_are_refused() -> None:
    config = compressed("pack-quantized", W4)
    config["config_groups"]["group_1"] = {"weights": int_weights(8, 16), "format": "pack-quantized"}
    with pytest.raises(ConfigError, match="config_groups: expected one way"):
        read_quantisation(config)


@pytest.mark.parametrize(
    ("steps", "folds"),
    [("SmoothQuantModifier", True), ("AWQModifier", True), ("GPTQModifier", False), ("", True)],
)
def test_the_recipe_says_whether_scales_are_folded(steps: str, folds: bool) -> None:
    recipe = f"default_stage:\n  default_modifiers:\n    {steps}: {{}}\n" if steps else ""
    assert read_quantisation(dict(CASES["w8a8"].config), recipe).folds_input_scale == folds


@pytest.mark.parametrize("step", ["SpinQuantModifier", "QuIPModifier"])
def test_a_rotated_checkpoint_is_refused(step: str) -> None:
    with pytest.raises(ConfigError, match="rotated"):
        read_quantisation(dict(CASES["w4a16"].config), f"quant_stage: {{{step}: {{}}}}")


def test_a_recipe_beside_the_config_is_read(model: Path, tmp_path: Path) -> None:
    made = make_quantised(model, tmp_path, CASES["w4a16"].config, CASES["w4a16"].encode)
    (made.stored / "recipe.yaml").write_text("quant_stage: {quant_modifiers: {AWQModifier: {}}}")
    found = read_spec(made.stored).quantisation
    assert found is not None
    assert found.folds_input_scale


def test_a_recipe_that_is_too_large_or_cannot_be_read_is_refused(
    model: Path, tmp_path: Path
) -> None:
    made = make_quantised(model, tmp_path, CASES["w4a16"].config, CASES["w4a16"].encode)
    recipe = made.stored / "recipe.yaml"
    recipe.write_bytes(bytes((1 << 20) + 1))
    with pytest.raises(ConfigError, match=r"recipe\.yaml must be of at most 1 MiB"):
        read_spec(made.stored)
    recipe.unlink()
    recipe.symlink_to("/proc/self/mem")  # a file whose first byte cannot be read
    with pytest.raises(ConfigError, match=r"cannot read .*recipe\.yaml"):
        read_spec(made.stored)
