"""What PEFT itself saves: plain LoRA in all its forms is read with PEFT's ranks and scalings."""

from __future__ import annotations

import copy
import json
import re
import warnings
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig, PeftConfig, get_peft_model
from peft.tuners.lora import LoraLayer
from peft.utils.other import get_pattern_key
from transformers import LlamaConfig, LlamaForCausalLM

from bad_upload import EVIL_REGEX
from counted_calls import counted_calls
from lora_files import base_shape
from manylora.adapters.base_shape import MODULE_PATHS
from manylora.adapters.checkpoint.module_patterns import (
    ModulePatterns,
    is_literal_path,
    matcher,
)
from manylora.adapters.checkpoint.peft_fields import FIELDS, check_field
from manylora.adapters.checkpoint.reader import Checkpoint, read_checkpoint
from manylora.adapters.ref import LoraSpec
from manylora.errors import AdapterError, AdapterFormatError, AdapterIncompatibleError

BASE = base_shape(hidden=32, intermediate=48, kv=16, num_layers=3)
PREFIX = "base_model.model.model.layers."


@cache
def model() -> LlamaForCausalLM:
    """A tiny Llama of the base's shape; copy it before giving it to PEFT."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=False,
    )
    return LlamaForCausalLM(config)


def trained(config: PeftConfig, dtype: torch.dtype = torch.float32) -> Any:
    """PEFT's model with random LoRA weights."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        peft_model = get_peft_model(
            copy.deepcopy(model()), copy.deepcopy(config), autocast_adapter_dtype=False
        )
    for name, parameter in peft_model.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    return peft_model.to(dtype)


def save(peft_model: Any, folder: Path, **options: Any) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        peft_model.save_pretrained(folder, **options)
    return folder


def read(folder: Path, max_rank: int = 64) -> Checkpoint:
    return read_checkpoint(
        (folder / "adapter_config.json").read_bytes(),
        folder / "adapter_model.safetensors",
        BASE,
        max_rank,
    )


def peft_layers(peft_model: Any) -> dict[tuple[int, int], LoraLayer]:
    layers = {}
    for name, layer in peft_model.named_modules():
        if isinstance(layer, LoraLayer):
            index, path = name.removeprefix(PREFIX).split(".", 1)
            layers[int(index), MODULE_PATHS.index(path)] = layer
    return layers


def lora(**fields: Any) -> LoraConfig:
    return LoraConfig(
        **{"r": 8, "task_type": "CAUSAL_LM", "target_modules": ["q_proj", "v_proj"], **fields}
    )


# What `test_exporters` compares with PEFT number by number is not here.
ACCEPTED = {
    "defaults": lora(),
    "defaults of the architecture": lora(target_modules=None),
    "full paths": lora(
        target_modules=["model.layers.1.mlp.up_proj", "model.layers.2.self_attn.q_proj"]
    ),
    "one layer of a pattern": lora(layers_to_transform=1, layers_pattern="layers"),
    "two patterns for one module": lora(rank_pattern={"q_proj": 16, "self_attn.q_proj": 4}),
    "rank 64": lora(r=64),
    "dropout": lora(lora_dropout=0.1),
    "random start": lora(init_lora_weights=False),
    "orthogonal start": lora(init_lora_weights="orthogonal"),
    "MiCA start": lora(init_lora_weights="mica"),
    "tied weights ensured": lora(ensure_weight_tying=True),
}


@pytest.mark.parametrize("name", ACCEPTED)
def test_plain_lora_has_pefts_ranks_and_scalings(tmp_path: Path, name: str) -> None:
    peft_model = trained(ACCEPTED[name])
    checkpoint = read(save(peft_model, tmp_path))
    layers = peft_layers(peft_model)
    assert checkpoint.ranks == {place: layer.r["default"] for place, layer in layers.items()}
    assert checkpoint.scalings == pytest.approx(
        {place: layer.scaling["default"] for place, layer in layers.items()}
    )
    assert (checkpoint.applied, checkpoint.total) == (len(layers), 21)
    trainable = sum(p.numel() for n, p in peft_model.named_parameters() if "lora_" in n)
    assert checkpoint.parameters == trainable


def test_patterns_are_read_in_the_order_of_the_file_as_peft_loads_them(tmp_path: Path) -> None:
    config = lora(alpha_pattern={"self_attn.q_proj": 4, "q_proj": 16})
    as_trained = peft_layers(trained(config))[0, 0].scaling["default"]
    save(trained(config), tmp_path)
    as_loaded = peft_layers(trained(PeftConfig.from_pretrained(str(tmp_path))))[0, 0].scaling[
        "default"
    ]
    assert (as_trained, as_loaded) == (0.5, 2.0)
    assert read(tmp_path).scalings[0, 0] == as_loaded


def test_ranks_that_peft_could_not_load_again_are_refused(tmp_path: Path) -> None:
    save(trained(lora(rank_pattern={"self_attn.q_proj": 4, "q_proj": 16})), tmp_path)
    loaded = trained(PeftConfig.from_pretrained(str(tmp_path)))
    assert peft_layers(loaded)[0, 0].r["default"] == 16
    with pytest.raises(AdapterError) as caught:
        read(tmp_path)
    assert caught.value.code == "weights.rank_mismatch"


def test_an_adapter_that_was_not_called_default_is_read(tmp_path: Path) -> None:
    peft_model = trained(lora())
    peft_model.add_adapter("pirate", lora(r=4))
    save(peft_model, tmp_path)
    assert read(tmp_path / "pirate").largest_rank == 4


@pytest.mark.parametrize("start", ["pissa", "olora"])
def test_the_recipe_for_base_changing_starts_leads_to_a_good_adapter(
    tmp_path: Path, start: str
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        peft_model = get_peft_model(copy.deepcopy(model()), lora(r=4, init_lora_weights=start))
    config: Any = peft_model.peft_config["default"]
    config.init_lora_weights = True
    save(peft_model, tmp_path / "before")
    config.init_lora_weights = start
    for name, parameter in peft_model.named_parameters():
        if "lora_" in name:
            parameter.data += 0.01
    with pytest.raises(AdapterError) as caught:
        read(save(peft_model, tmp_path / "raw"))
    assert caught.value.code == "config.feature_unsupported"
    assert "path_initial_model_for_weight_conversion" in caught.value.message
    folder = save(
        peft_model,
        tmp_path / "mended",
        path_initial_model_for_weight_conversion=str(tmp_path / "before"),
    )
    assert read(folder).largest_rank == 8


def test_every_field_of_the_installed_peft_is_in_a_table_and_its_default_is_accepted(
    tmp_path: Path,
) -> None:
    defaults = {**asdict(LoraConfig()), "runtime_config": None}
    assert set(defaults) <= FIELDS.keys()
    for name, default in json.loads(json.dumps(defaults)).items():
        check_field(name, default)
    folder = save(trained(lora()), tmp_path)
    written = json.loads((folder / "adapter_config.json").read_text())
    assert set(written) <= set(defaults)


@pytest.mark.parametrize("name", sorted(FIELDS))
def test_each_rule_refuses_by_the_name_of_its_field(name: str) -> None:
    for rule in FIELDS[name]:
        refusing = replace(rule, allows=lambda _: False)
        with pytest.raises(AdapterError) as refused:
            refusing.check(name, "a value")
        finding = refused.value.finding
        assert (finding.param, finding.code) == (name, f"config.{rule.code}")
        assert name in finding.message
        assert not re.search(r"[{}]", finding.message + finding.hint)


PATHS = [f"model.layers.{layer}.{module}" for layer in (0, 1, 10, 110) for module in MODULE_PATHS]
PIECES = r"""
q_proj _proj k layers . \. \d \w+ .* (q|k) [qk] [^q] ^model ^ $ \b \B \A \Z [0-3] (?i:Q_PROJ) (?i:[^A-M]+) (?i:[A-Z]+)
(?-i:q) +? * ? {1,2} {3} | ( ) self_attn (?:a|) 1 0 \W \D \S \s (?P<x>v) (?s:.) [^\d] [\w.] (?x:q) (?#c) mlp X \x71
^model.layers.1.self_attn.q_proj ^model.layers.10.mlp.up_proj ^q_proj ^self_attn.v_proj
"""


@settings(max_examples=300, deadline=None)
@given(
    keys=st.lists(
        st.lists(st.sampled_from(PIECES.split()), min_size=1, max_size=5).map("".join),
        min_size=1,
        max_size=4,
        unique=True,
    )
)
def test_regexes_choose_what_peft_chooses(keys: list[str]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            patterns = ModulePatterns({key: matcher("rank_pattern", key) for key in keys})
        except AdapterFormatError:
            with pytest.raises(re.error):
                [re.compile(rf"(.*\.)?({key})$") for key in keys]
            return
        for path in PATHS:
            chosen = get_pattern_key(keys, path)
            assert patterns.first(path) == (None if chosen == path and path not in keys else chosen)
        assert patterns.unused(PATHS) == [
            key for key in keys if not any(get_pattern_key([key], path) == key for path in PATHS)
        ]


@pytest.mark.parametrize(
    ("key", "error"),
    [
        (r"(q)_\1", "reference back"),
        ("(?!v)q_proj", "looks ahead or behind"),
        ("(?<=x)q_proj", "looks ahead or behind"),
        ("q_pro(?>j)", "atomic"),
        ("q_pro*+j", "possessive"),
        ("(q)?(?(1)_|x)proj", "condition"),
        ("a" * 1025, "1024 characters"),
        ("(" * 101 + ")" * 101, "100 groups"),
        ("a{1001}", "1000 repeats"),
        ("(a{999}){999}", "too large"),
        ("(?i:\u017f)", "outside ASCII"),
    ],
)
def test_keys_that_are_not_linear_or_too_large_are_refused(key: str, error: str) -> None:
    with pytest.raises(AdapterIncompatibleError, match=error) as refused:
        matcher("alpha_pattern", key)
    assert refused.value.code == "config.pattern_unsupported"


def test_a_key_that_keeps_python_busy_for_ever_is_matched_with_little_work() -> None:
    keys = {
        key: matcher("rank_pattern", key)
        for key in (EVIL_REGEX, "(a|a)*b" * 60, "(.*.*)*" * 30 + "X")
    }
    with counted_calls() as calls:
        assert all(ModulePatterns(keys).first(path) is None for path in PATHS)
    assert calls() < 100 * len(PATHS)


@settings(max_examples=200, deadline=None)
@given(
    keys=st.lists(
        st.text("layers.01_selfattnqp", min_size=1, max_size=20)
        | st.sampled_from(
            ["q_proj", "self_attn.q_proj", "0.self_attn.q_proj", "layers.10.mlp.up_proj", "q.proj"]
        )
        | st.builds(
            lambda path, at: path[: at % len(path)] + "." + path[at % len(path) + 1 :],
            st.sampled_from(
                ["layers.110.self_attn.q_proj", "model.layers.10.mlp.up_proj", "self_attn.v_proj"]
            ),
            st.integers(0, 40),
        ),
        min_size=1,
        max_size=4,
        unique=True,
    ),
    layer=st.sampled_from([0, 1, 10, 110]),
    module=st.sampled_from(MODULE_PATHS),
)
def test_literal_patterns_choose_what_peft_chooses(
    keys: list[str], layer: int, module: str
) -> None:
    literal = {key: index + 1 for index, key in enumerate(keys) if is_literal_path(key)}
    path = f"model.layers.{layer}.{module}"
    expected = literal.get(get_pattern_key(list(literal), path), 99)
    assert LoraSpec(rank=99, alpha=1, rank_pattern=literal).module_rank(path) == expected


def test_a_wrong_key_is_refused_without_places_in_the_expression_that_is_made_of_it() -> None:
    with pytest.raises(AdapterFormatError) as refused:
        matcher("rank_pattern", "(q")
    assert "position" not in str(refused.value)
