"""adapter_config.json: what PEFT's versions write is read exactly, everything else is refused by name."""

from __future__ import annotations

import copy
import json
import math
import sys
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bad_upload import EVIL_REGEX
from counted_calls import MOST_CALLS, counted_calls
from lora_files import MLX_CONFIG, PEFT_DEFAULTS, config_bytes, mlx_config_bytes
from manylora.adapters.base_shape import MODULE_PATHS
from manylora.adapters.checkpoint.findings import Findings
from manylora.adapters.checkpoint.lora_fields import LoraFields
from manylora.adapters.checkpoint.module_patterns import is_literal_path
from manylora.adapters.checkpoint.peft_config import MAX_CONFIG_BYTES, check_config, check_scaling
from manylora.errors import AdapterError, PayloadTooLargeError
from refusals import is_presentable, outcome


def read_config(raw: bytes) -> LoraFields:
    findings = Findings()
    return findings.passed(findings.attempt(check_config, raw, findings))


def read(**fields: Any) -> LoraFields:
    return read_config(config_bytes(**fields))


def code(raw: bytes) -> str:
    with pytest.raises(AdapterError) as caught:
        read_config(raw)
    return caught.value.code


def test_the_defaults_of_peft_are_read() -> None:
    assert read() == LoraFields(rank=8, alpha=16.0)


def written_by(older: dict[str, Any], names: str, **changes: Any) -> dict[str, Any]:
    """What a version of PEFT wrote: the fields of an older one, and more."""
    return {**older, **{name: PEFT_DEFAULTS[name] for name in names.split()}, **changes}


_02 = written_by(
    {},
    "base_model_name_or_path bias fan_in_fan_out inference_mode lora_alpha modules_to_save peft_type r target_modules "
    "task_type",
    lora_dropout=0.05,
)
_05 = written_by(
    _02,
    "auto_mapping init_lora_weights layers_pattern layers_to_transform revision",
    lora_dropout=0,
)
_10 = written_by(
    _05,
    "alpha_pattern layer_replication loftq_config megatron_config megatron_core rank_pattern use_dora use_rslora",
)
OLDER: dict[str, dict[str, Any]] = {
    "0.2": {**_02, "enable_lora": None, "merge_weights": False},
    "0.5": {**_05, "r": 64, "target_modules": None},
    "0.10": {**_10, "r": 16, "target_modules": ["q_proj"]},
    "0.15": {
        **{
            key: PEFT_DEFAULTS[key]
            for key in PEFT_DEFAULTS
            if key not in ("target_parameters", "use_qalora")
        },
        "runtime_config": {"ephemeral_gpu_offload": False},
    },
}


@pytest.mark.parametrize("version", OLDER)
def test_configs_of_older_peft_versions_are_read(version: str) -> None:
    spec = read_config(json.dumps(OLDER[version]).encode())
    assert spec.rank == OLDER[version]["r"]
    assert spec.alpha == 16.0


AUTO_MAPPING = {
    "base_model_class": "LlamaForCausalLM",
    "parent_library": "transformers.models.llama.modeling_llama",
}


@pytest.mark.parametrize(
    "fields",
    [
        {"task_type": None},
        {"target_modules": "all-linear"},
        {"target_modules": EVIL_REGEX},
        {"target_modules": ["x"] * 5000},
        {"exclude_modules": ["lm_head"]},
        {"layers_to_transform": 3},
        {"layers_to_transform": [0, 1], "layers_pattern": "layers"},
        {"layers_to_transform": [0, 1], "layers_pattern": ["layers"]},
        {"init_lora_weights": False},
        {"init_lora_weights": "gaussian"},
        {"init_lora_weights": "eva", "eva_config": {"rho": 2.0, "tau": 0.99}},
        {"init_lora_weights": "orthogonal"},
        {"init_lora_weights": "mica"},
        {"corda_config": {"corda_method": "kpm"}},
        {"modules_to_save": []},
        {"lora_dropout": 0.1},
        {"peft_version": "0.99.0.dev0@abc"},
        {"base_model_name_or_path": "unsloth/Qwen2.5-0.5B-bnb-4bit"},
        {"a_later_feature": None},
        {"a_later_switch": False},
        {"a_later_list": []},
        {"auto_mapping": AUTO_MAPPING},
        {"auto_mapping": {**AUTO_MAPPING, "unsloth_fixed": True}},
    ],
    ids=str,
)
def test_fields_without_effect_are_accepted(fields: dict[str, Any]) -> None:
    assert read(**fields) == LoraFields(rank=8, alpha=16.0)


def test_fields_with_an_effect_are_read() -> None:
    spec = read(
        r=4,
        lora_alpha=6.5,
        use_rslora=True,
        rank_pattern={"b": 1, "a": 64},
        alpha_pattern={"q_proj": 0.5},
    )
    assert spec == LoraFields(
        rank=4,
        alpha=6.5,
        use_rslora=True,
        rank_pattern={"b": 1, "a": 64},
        alpha_pattern={"q_proj": 0.5},
    )
    assert list(spec.rank_pattern) == ["b", "a"]


def test_null_patterns_are_empty_ones() -> None:
    assert read(rank_pattern=None, alpha_pattern=None, use_rslora=None) == LoraFields(
        rank=8, alpha=16.0
    )


def test_whole_paths_of_a_large_model_fit() -> None:
    paths = [f"model.layers.{layer}.{path}" for layer in range(80) for path in MODULE_PATHS]
    spec = read(target_modules=paths, rank_pattern=dict.fromkeys(paths, 4))
    assert len(spec.rank_pattern) == 560


def test_a_long_config_is_judged_by_its_first_bytes_alone() -> None:
    deep = b'{"a":' * 200_000
    assert code(deep) == code(deep[: MAX_CONFIG_BYTES + 1]) == "config.too_deep"
    for raw in (
        config_bytes(revision="x" * 1_000_000),
        config_bytes(revision="x" * 1_000_000)[: MAX_CONFIG_BYTES + 1],
    ):
        with pytest.raises(PayloadTooLargeError) as caught:
            read_config(raw)
        assert caught.value.code == "config.too_large"


def test_a_config_of_exactly_the_limit_is_read() -> None:
    good = config_bytes()
    assert read_config(good + b" " * (MAX_CONFIG_BYTES - len(good))).rank == 8


def test_nothing_named_in_a_config_is_imported() -> None:
    for fields in (
        {"auto_mapping": {"base_model_class": "X", "parent_library": "antigravity"}},
        {"megatron_core": "antigravity"},
        {"megatron_config": {"x": 1}, "megatron_core": "antigravity"},
    ):
        assert code(config_bytes(**fields)) == "config.field_unsupported"
    assert "antigravity" not in sys.modules


def test_a_config_without_rank_or_alpha_is_read() -> None:
    config = {
        name: value for name, value in PEFT_DEFAULTS.items() if name not in ("r", "lora_alpha")
    }
    assert read_config(json.dumps(config).encode()) == LoraFields(rank=None, alpha=8.0)
    assert read(r=None).rank is None
    assert code(config_bytes(lora_alpha=None)) == "config.alpha_invalid"


@pytest.mark.parametrize("scaling", [0.0, -1.0, 65.0, math.inf, math.nan, 1e-12])
def test_scalings_out_of_range_are_refused(scaling: float) -> None:
    with pytest.raises(AdapterError) as caught:
        check_scaling(scaling, "q_proj")
    assert caught.value.code == "config.alpha_invalid"


@pytest.mark.parametrize(
    ("fields", "scale"),
    [
        ({}, 2.5),
        ({"num_layers": -1, "report_to": "wandb"}, 2.5),
        ({"lora_parameters": {"rank": 6, "scale": 20, "dropout": 0.0}}, 20.0),
        ({"lora_parameters": {"rank": 65, "scale": 20, "dropout": 0.0}}, 20.0),
        ({"lora_parameters": {"rank": 6, "scale": 10.0, "alpha": 16, "dropout": 0.0}}, 10.0),
    ],
    ids=str,
)
def test_the_scale_of_mlx_is_the_factor_itself_and_the_file_gives_the_rank(
    fields: dict[str, Any], scale: float
) -> None:
    read = read_config(mlx_config_bytes(**fields))
    assert read == LoraFields(rank=None, alpha=scale, scale=scale)
    spec = read.spec(
        {"model.layers.0.self_attn.q_proj": 6, "model.layers.1.self_attn.q_proj": 6, "x": 4}
    )
    assert [spec.module_scaling(path) for path in ("model.layers.1.self_attn.q_proj", "x")] == [
        scale,
        scale,
    ]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"fine_tune_type": "dora"}, "config.feature_unsupported"),
        ({"fine_tune_type": "full", "lora_parameters": None}, "config.feature_unsupported"),
        ({"fine_tune_type": ["lora"]}, "config.feature_unsupported"),
        ({"lora_parameters": None}, "config.field_missing"),
        ({"lora_parameters": []}, "config.field_missing"),
        ({"lora_parameters": {"rank": 6}}, "config.field_missing"),
        ({"lora_parameters": {"scale": 6}}, "config.field_missing"),
        ({"lora_parameters": {"rank": "6", "scale": 1}}, "config.value_invalid"),
        ({"lora_parameters": {"rank": 6, "scale": True}}, "config.value_invalid"),
        ({"lora_parameters": {"rank": 6.0, "scale": 1}}, "config.rank_invalid"),
        ({"lora_parameters": {"rank": 6, "scale": 0}}, "config.alpha_invalid"),
        ({"lora_parameters": {"rank": 6, "scale": -1.5}}, "config.alpha_invalid"),
        ({"lora_parameters": {"rank": 6, "scale": float("nan")}}, "config.alpha_invalid"),
        ({"lora_parameters": {"rank": 6, "scale": 1e308}}, "config.alpha_invalid"),
        ({"lora_parameters": {"rank": 6, "scale": 10**400}}, "config.alpha_invalid"),
        ({"lora_parameters": {"rank": 6, "scale": 1, "use_rslora": True}}, "config.field_unknown"),
        ({"use_rslora": True}, "config.field_unknown"),
        ({"rank_pattern": {"q_proj": 4}}, "config.field_unknown"),
        ({"a_later_feature": 1}, "config.field_unknown"),
        ({"data": "x" * 4097}, "config.value_invalid"),
        ({"optimizer_config": [[[[[[[[[[[[[[[[1]]]]]]]]]]]]]]]]}, "config.too_deep"),
    ],
    ids=str,
)
def test_configs_of_mlx_that_cannot_be_served_are_refused(
    fields: dict[str, Any], expected: str
) -> None:
    assert code(mlx_config_bytes(**fields)) == expected


def test_keys_that_peft_would_stretch_are_not_literal_and_module_paths_are() -> None:
    for key in (
        "q_proj",
        "self_attn.q_proj",
        "model.layers.10.mlp.up_proj",
        "experts.0.w1",
        "lm_head",
    ):
        assert is_literal_path(key)
    for key in (
        "q.proj",
        "1.0.self_attn.q_proj",
        "self.attn.q_proj",
        "layers.1..mlp.up_proj",
        "^q_proj",
    ):
        assert not is_literal_path(key)


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**30), 10**30) | st.floats() | st.text(max_size=12),
    lambda below: (
        st.lists(below, max_size=4) | st.dictionaries(st.text(max_size=6), below, max_size=4)
    ),
    max_leaves=8,
)
HOSTILE = st.sampled_from(
    ["LORA", "pissa", "\ud800", "x" * 5000, 10**400, float("nan"), [[[[[[]]]]]], {"q_proj": 0}]
)
KEYS = st.sampled_from(
    [*sorted(PEFT_DEFAULTS), "use_bdlora", "kasa_config", "runtime_config"]
) | st.text(max_size=8)


def check_outcome(raw: bytes) -> None:
    """Either a refusal of ours, or fields whose numbers can be used."""
    spec = outcome(lambda: read_config(raw))
    if isinstance(spec, AdapterError):
        assert is_presentable(spec, "config.")
        return
    assert all(
        type(rank) is int and rank >= 0 for rank in [spec.rank or 0, *spec.rank_pattern.values()]
    )
    assert all(
        math.isfinite(alpha) and alpha > 0 for alpha in [spec.alpha, *spec.alpha_pattern.values()]
    )


@settings(max_examples=200, deadline=None)
@given(changes=st.lists(st.tuples(KEYS, JSON_VALUES | HOSTILE), min_size=1, max_size=3))
def test_no_change_of_fields_does_more_than_a_refusal(changes: list[tuple[str, Any]]) -> None:
    check_outcome(json.dumps({**copy.deepcopy(PEFT_DEFAULTS), **dict(changes)}).encode())


@settings(max_examples=150, deadline=None)
@given(
    changes=st.dictionaries(
        st.sampled_from(sorted(MLX_CONFIG)) | KEYS, JSON_VALUES | HOSTILE, max_size=2
    ),
    parameters=st.dictionaries(
        st.sampled_from(["rank", "scale", "alpha", "keys"]) | KEYS,
        JSON_VALUES | HOSTILE,
        max_size=2,
    ),
)
def test_no_change_of_an_mlx_config_does_more_than_a_refusal(
    changes: dict[str, Any], parameters: dict[str, Any]
) -> None:
    given_parameters = {**MLX_CONFIG["lora_parameters"], **parameters}
    check_outcome(
        json.dumps({**MLX_CONFIG, "lora_parameters": given_parameters, **changes}).encode()
    )


@settings(max_examples=200, deadline=None)
@given(
    edits=st.lists(
        st.tuples(
            st.floats(0, 1),
            st.integers(0, 6),
            st.binary(max_size=6) | st.sampled_from([b"NaN", b"[" * 20, b"{"]),
        ),
        min_size=1,
        max_size=4,
    )
)
def test_no_change_of_bytes_does_more_than_a_refusal(edits: list[tuple[float, int, bytes]]) -> None:
    raw = config_bytes()
    for where, cut, put in edits:
        at = int(where * len(raw))
        raw = raw[:at] + put + raw[at + cut :]
    check_outcome(raw)


def test_a_config_full_of_patterns_is_read_with_little_work() -> None:
    pattern = {f"a.{index}.b.c.d.self_attn.q_proj": 8 for index in range(1000)}
    with counted_calls() as calls:
        read(rank_pattern=pattern)
    assert calls() < MOST_CALLS // 2


def test_a_key_that_cannot_be_printed_is_named_by_its_escape() -> None:
    with pytest.raises(AdapterError, match=r"alpha_pattern\['\\x1f'\] must be a number above 0"):
        read(alpha_pattern={"\x1f": None})
