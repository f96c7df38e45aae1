"""All that is wrong with an adapter is told at once: in a stable order, with places and hints, and never too much."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bad_uploads import good_upload
from counted_calls import MOST_CALLS, counted_calls
from lora_files import (
    RawTensor,
    base_shape,
    config_bytes,
    lora_name,
    q_and_v,
    tensor,
    weights_bytes,
)
from manylora.adapters.checkpoint.findings import MAX_FINDINGS
from manylora.adapters.checkpoint.reader import read_checkpoint
from manylora.errors import AdapterError
from manylora.server.errors import error_body

BASE = base_shape()
LAYER = "base_model.model.model.layers."


def refused(folder: Path, config: bytes, weights: bytes, **options: Any) -> AdapterError:
    (folder / "weights").write_bytes(weights)
    with pytest.raises(AdapterError) as caught:
        read_checkpoint(config, folder / "weights", options.pop("base", BASE), 64, **options)
    return caught.value


def places(error: AdapterError) -> list[tuple[str, str | None]]:
    return [(finding.code, finding.param) for finding in error.findings]


def is_bounded(error: AdapterError) -> bool:
    return len(error.findings) <= MAX_FINDINGS and len(json.dumps(error_body(error))) < 16 << 10


def test_faults_of_both_files_are_told_together_and_in_the_same_order(tmp_path: Path) -> None:
    config = config_bytes(
        use_dora=True, fan_in_fan_out=True, modules_to_save=["lm_head"], r=70, new_field=1
    )
    tensors = {
        **q_and_v(BASE, rank=70),
        "base_model.model.lm_head.weight": tensor((8, 64)),
        f"{LAYER}0.self_attn.q_proj.lora_magnitude_vector": tensor((64,)),
        f"{LAYER}1.self_attn.q_proj.lora_magnitude_vector": tensor((64,)),
        lora_name(9, "self_attn.q_proj", "A"): tensor((70, 64)),
        lora_name(0, "mlp.up_proj", "A"): tensor((70, 64)),
        lora_name(0, "self_attn.q_proj", "A"): tensor((70, 32)),
        lora_name(1, "self_attn.q_proj", "A"): tensor((4, 64)),
        lora_name(1, "self_attn.v_proj", "B"): tensor((32, 70, 1)),
    }
    error = refused(tmp_path, config, weights_bytes(tensors))
    feature, not_allowed = "config.feature_unsupported", "weights.tensor_not_allowed"
    assert places(error) == [
        (feature, "fan_in_fan_out"),
        (feature, "modules_to_save"),
        (feature, "use_dora"),
        ("config.field_unknown", "new_field"),
        ("weights.shape_invalid", lora_name(1, "self_attn.v_proj", "B")),
        (not_allowed, "base_model.model.lm_head.weight"),
        (not_allowed, f"{LAYER}0.self_attn.q_proj.lora_magnitude_vector"),
        (not_allowed, lora_name(9, "self_attn.q_proj", "A")),
        ("weights.pair_incomplete", lora_name(0, "mlp.up_proj", "A")),
        ("config.rank_invalid", "r"),
        ("weights.shape_mismatch", lora_name(0, "self_attn.q_proj", "A")),
        ("weights.rank_mismatch", lora_name(1, "self_attn.q_proj", "A")),
    ]
    dora = error.findings[6]
    assert (
        f"The same is wrong with {LAYER}1.self_attn.q_proj.lora_magnitude_vector." in dora.message
    )
    assert dora.hint == "It belongs to DoRA: retrain with use_dora=false."
    assert refused(tmp_path, config, weights_bytes(tensors)).findings == error.findings
    assert is_bounded(error)


@pytest.mark.parametrize(
    "names",
    [
        [f"evil.{number:05}" for number in range(8_000)],
        [f"{LAYER}{number}.self_attn.q_proj.weight" for number in range(8_000)],
        [lora_name(number, "self_attn.q_proj", "A") for number in range(8_000)],
        [f"{'x' * 236}.{hint}.{number}" for number in range(200) for hint in
         ("lora_magnitude_vector", "token_adapter", "modules_to_save", "lm_head", "experts", "base_layer", "v_head",
          "ia3_", "bias", "linear_qkv", "linear_fc1", "linear_fc2", "linear_proj", "qkv", "gate_up_proj", "vision")],
    ],
    ids=["unknown", "base weights", "layers", "every hint"],
)  # fmt: skip
def test_thousands_of_bad_names_make_a_short_report_with_little_work(
    tmp_path: Path, names: list[str]
) -> None:
    names = [name[:256] for name in names]
    weights = weights_bytes({name: tensor((1, 1)) for name in names})
    config = config_bytes(
        **{f"unknown_{number}": "x" * 90 for number in range(300)},
        use_dora=True,
        fan_in_fan_out=True,
    )
    with counted_calls() as calls:
        error = refused(tmp_path, config, weights)
    assert calls() < MOST_CALLS
    assert error.code == "config.feature_unsupported"
    assert is_bounded(error)


def test_more_tensors_than_are_read_and_more_kinds_of_faults_than_are_listed(
    tmp_path: Path,
) -> None:
    many = weights_bytes({f"evil.{number}": tensor((1,)) for number in range(10_000)})
    error = refused(tmp_path, config_bytes(), many)
    assert [finding.code for finding in error.findings] == ["weights.too_many_tensors"]
    fields: dict[str, Any] = dict.fromkeys(
        (
            "target_modules",
            "exclude_modules",
            "layers_pattern",
            "layers_to_transform",
            "lora_dropout",
            "use_rslora",
        ),
        "0" * 5000,
    )
    features: dict[str, Any] = dict.fromkeys(
        ("use_dora", "lora_bias", "fan_in_fan_out", "use_qalora", "use_bdlora", "arrow_config", "kasa_config",
         "monteclora_config", "velora_config", "enable_lora", "merge_weights", "alora_invocation_tokens",
         "layer_replication", "target_parameters", "bias", "modules_to_save", "trainable_token_indices"), 7
    )  # fmt: skip
    error = refused(tmp_path, config_bytes(**fields, **features), good_upload(BASE).weights)
    assert len(error.findings) == MAX_FINDINGS
    assert "Beside these, 3 things are wrong that are not listed." in error.findings[-1].message
    assert is_bounded(error)


def test_a_config_that_cannot_be_read_does_not_hide_the_weights_faults(tmp_path: Path) -> None:
    swapped = refused(tmp_path, good_upload(BASE).weights, config_bytes())
    assert places(swapped) == [("config.not_json", None), ("weights.not_safetensors", None)]
    assert "as the config" in swapped.findings[0].hint
    ranks = refused(
        tmp_path, config_bytes(r="8", lora_alpha=0), weights_bytes({"evil": tensor((8, 64))})
    )
    assert places(ranks) == [
        ("config.rank_invalid", "r"),
        ("config.alpha_invalid", "lora_alpha"),
        ("weights.tensor_not_allowed", "evil"),
    ]
    unread = refused(tmp_path, config_bytes(r="8"), good_upload(BASE).weights)
    assert places(unread) == [("config.rank_invalid", "r")]


def test_a_header_that_is_malformed_is_read_no_further(tmp_path: Path) -> None:
    tensors = {**q_and_v(BASE), "evil": tensor((8, 64))}
    cut = refused(tmp_path, config_bytes(use_dora=True), weights_bytes(tensors)[:-1])
    assert places(cut) == [("config.feature_unsupported", "use_dora"), ("weights.truncated", None)]


def test_values_are_told_of_every_tensor_and_beside_faults_of_the_config(tmp_path: Path) -> None:
    spoilt = {
        name: tensor(
            raw.shape,
            value=float("nan")
            if "q_proj.lora_B" in name
            else 2e4
            if "v_proj.lora_B" in name
            else 1,
        )
        for name, raw in q_and_v(BASE).items()
    }
    error = refused(tmp_path, config_bytes(fan_in_fan_out=True), weights_bytes(spoilt))
    assert places(error) == [
        ("config.feature_unsupported", "fan_in_fan_out"),
        ("weights.non_finite", lora_name(0, "self_attn.q_proj", "B")),
        ("weights.value_too_large", lora_name(0, "self_attn.v_proj", "B")),
    ]
    assert lora_name(1, "self_attn.q_proj", "B") in error.findings[1].message
    foreign = refused(tmp_path, config_bytes(), weights_bytes({**spoilt, "evil": tensor((1, 1))}))
    assert places(foreign) == [("weights.tensor_not_allowed", "evil")]


def test_a_dtype_that_is_not_served_hides_nothing_else(tmp_path: Path) -> None:
    fp8 = {
        name: RawTensor("F8_E4M3", raw.shape, bytes(raw.shape[0] * raw.shape[1]))
        for name, raw in q_and_v(base_shape(hidden=128)).items()
    }
    error = refused(tmp_path, config_bytes(), weights_bytes(fp8))
    name = lora_name(0, "self_attn.q_proj", "A")
    assert places(error) == [("weights.dtype_unsupported", name), ("weights.shape_mismatch", name)]
    assert "and 5 more." in error.findings[0].message


@pytest.mark.parametrize(
    ("config", "tensors", "words"),
    [
        (config_bytes(), {f"{LAYER}0.self_attn.q_proj.lora_B.bias": tensor((64,))}, "with lora_bias=false"),
        (config_bytes(), {f"{LAYER}0.self_attn.q_proj.lora_B.default.bias": tensor((64,))}, "with lora_bias=false"),
        (config_bytes(), q_and_v(base_shape(num_layers=4)), "layers 0 to 1, so the adapter"),
        (config_bytes(), {"base_model.model.transformer.h.0.attn.c_attn.lora_A.weight": tensor((8, 8))}, "family"),
        (config_bytes(), {f"{LAYER}0.self_attn.dense.lora_A.weight": tensor((8, 8))}, "no such module"),
        (config_bytes(), {"model.embed_tokens.weight": tensor((8, 8))}, "weight of a whole model"),
        (json.dumps({"model_type": "llama"}).encode(), q_and_v(BASE), "beside the adapter's weights"),
        (config_bytes(), {"base_model.model.score.weight": tensor((2, 64))}, "retrain for CAUSAL_LM"),
    ],
)  # fmt: skip
def test_usual_mistakes_are_told_with_their_cause(
    tmp_path: Path, config: bytes, tensors: dict[str, RawTensor], words: str
) -> None:
    assert words in refused(tmp_path, config, weights_bytes(tensors)).findings[0].hint
