"""Tables of the fields of PEFT's `adapter_config.json`, as Manylora takes them. Covers PEFT 0.2 to 0.21.

A field is one of three: read (`adapter_config` interprets it), inert (it has no effect on an adapter that is already
trained), or a feature, which must have one of its neutral values, PEFT's own defaults among them. Run
`scripts/list_peft_defaults.py` to see the fields and defaults of the installed PEFT; a test compares them with these.

PEFT matches a key of `rank_pattern` and `alpha_pattern` as a regular expression, at the end of a path and after a dot,
so a dot in the key stands for any character. Keys that mean the same when read letter by letter are literal;
`module_patterns` matches all others.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from manylora.adapters.base_shape import MODULE_PATHS
from manylora.adapters.checkpoint.findings import refuse_unsupported
from manylora.strict_json import named, shown

UNUSED: tuple[object, ...] = (None, False, "", [], {})
"""Values of an unknown field that cannot change anything."""
FEATURE = "feature_unsupported"
FIELD = "field_unsupported"
"""Error codes, behind `config.`."""


def field_names(text: str) -> frozenset[str]:
    """The names in a text, separated by spaces and new lines."""
    return frozenset(text.split())


READ_FIELDS = field_names("""
    peft_type task_type r lora_alpha use_rslora rank_pattern alpha_pattern init_lora_weights auto_mapping
""")
"""Fields that `peft_config` interprets."""

MODULE_LIST_FIELDS = frozenset({"target_modules", "exclude_modules", "layers_pattern"})
"""A string, a list of strings or null. Never matched against anything: the tensors say what the adapter changes."""

INERT_FIELDS = MODULE_LIST_FIELDS | field_names("""
    layers_to_transform base_model_name_or_path revision peft_version inference_mode lora_dropout
    ensure_weight_tying qalora_group_size runtime_config loftq_config eva_config corda_config lora_ga_config
""")
"""Fields without effect on a trained adapter, whatever they say. `init_lora_weights` tells whether loftq_config,
eva_config, corda_config or lora_ga_config were used, and qalora_group_size belongs to use_qalora."""

INITIALISATIONS = frozenset({"gaussian", "eva", "orthogonal", "mica"})
"""Named values of `init_lora_weights` that start A and B in their own way and leave the base as it is."""

BASE_CHANGING_INITIALISATIONS = ("pissa", "olora", "corda", "lora_ga")
"""Initialisations (or their prefixes) that subtract the initial B @ A from the base weights."""


@dataclass(frozen=True, slots=True)
class Feature:
    """A field that changes the result when it is used, which Manylora does not serve."""

    neutral: tuple[object, ...]
    """Values that switch the feature off, compared with their types."""
    what: str
    hint: str
    """`{field}` stands for the field's name."""
    code: str = FEATURE


_RETRAIN = "Retrain without {field}."
_MERGE_OR_RETRAIN = "Retrain without {field}, or merge the adapter into a base model of its own."

FEATURES = {
    "use_dora": Feature((False, None), "DoRA", "Retrain with use_dora=false."),
    "modules_to_save": Feature(
        (None, []), "full copies of base modules", "Retrain with modules_to_save=null."
    ),
    # Trained biases stand in the file as tensors, which are refused by name; a base without biases has none to train.
    "bias": Feature(
        ("none", "all", "lora_only", None), "biases of this kind", 'Retrain with bias="none".'
    ),
    "lora_bias": Feature((False, None), "a bias on lora_B", "Retrain with lora_bias=false."),
    "fan_in_fan_out": Feature(
        (False, None), "transposed base weights (Conv1D)", "Set it to false for linear layers."
    ),
    "layer_replication": Feature((None, []), "repeated layers", _MERGE_OR_RETRAIN),
    "trainable_token_indices": Feature((None, [], {}), "trained token embeddings", _RETRAIN),
    "target_parameters": Feature(
        (None, []), "LoRA on bare parameters", "Target linear layers with target_modules."
    ),
    "alora_invocation_tokens": Feature((None,), "activated LoRA", _RETRAIN),
    "use_qalora": Feature((False, None), "QALoRA", "Retrain with use_qalora=false."),
    "use_bdlora": Feature((None, False), "block-diagonal LoRA", _RETRAIN),
    "arrow_config": Feature((None,), "Arrow routing", "Upload the task adapters one by one."),
    "kasa_config": Feature((None,), "KaSA, which changes the base", _RETRAIN),
    "monteclora_config": Feature((None,), "Monte Carlo LoRA", _RETRAIN),
    "velora_config": Feature((None,), "VeLoRA", _RETRAIN),
    "enable_lora": Feature((None,), "merged linear layers", _RETRAIN),
    "merge_weights": Feature((False, None), "merged weights", "Save the adapter unmerged."),
    "megatron_config": Feature(
        (None, {}), "Megatron parallel layers", "Convert the adapter to plain PEFT.", FIELD
    ),
    "megatron_core": Feature(
        ("megatron.core", None), "a module to import", "Set it to null.", FIELD
    ),
}
"""By field name."""


def is_model_config(config: Mapping[str, object]) -> bool:
    """Return True for the `config.json` of a model, which people take for the adapter's."""
    return "peft_type" not in config and not config.keys().isdisjoint(
        {"model_type", "architectures"}
    )


def is_one_of(value: object, choices: tuple[object, ...]) -> bool:
    """Return True if `value` is one of these, compared with their types: 0 is not False."""
    return any(type(value) is type(choice) and value == choice for choice in choices)


def check_unknown(name: str, value: object, of: str = "") -> None:
    """Refuse a field that is in no table, unless its value cannot change anything.

    Raises:
        AdapterIncompatibleError: It might change the result; code config.field_unknown.
    """
    if not is_one_of(value, UNUSED):
        what = f"The field {shown(name)}{of} is not known"
        message = f"{what}, so {shown(value)} might change what the adapter computes."
        hint = "Remove it if it does not, as where only the training needed it."
        refuse_unsupported("config.field_unknown", message, named(name), hint)


MAX_KEY_LENGTH = 256
_KEY = re.compile(r"[A-Za-z0-9_]+(?:\.[A-Za-z0-9_]+)*")
_DIGIT = "#"
_LAYERS = ("layers.", "model.layers.", "language_model.layers.", "model.language_model.layers.")
_HEADS = ("", *_LAYERS, "language_model.model.layers.")


def is_literal_path(key: str) -> bool:
    """Return True if the key names modules by letters, digits, underscores and dots alone, and does so in PEFT too."""
    return len(key) <= MAX_KEY_LENGTH and _KEY.fullmatch(key) is not None and not _is_ambiguous(key)


def _is_ambiguous(key: str) -> bool:
    return "." in key and any(_matches_by_a_dot(key, ending) for ending in _endings(len(key)))


def _matches_by_a_dot(key: str, ending: str) -> bool:
    by_a_dot = False
    for ours, theirs in zip(key, ending, strict=True):
        if ours == "." and theirs != ".":
            by_a_dot = True
        elif ours != theirs and not (theirs == _DIGIT and ours.isdigit()):
            return False
    return by_a_dot


@lru_cache(maxsize=MAX_KEY_LENGTH)
def _endings(length: int) -> tuple[str, ...]:
    """Endings, at a dot, of all module paths, as far as they have this length; `#` is a digit of the layer number."""
    endings = []
    for path in MODULE_PATHS:
        for head in _HEADS:
            digits = length - len(head) - 1 - len(path)
            if digits >= 1:
                endings.append(f"{head}{_DIGIT * digits}.{path}")
        endings += [path, path.rsplit(".", 1)[1]]
    return tuple(ending for ending in endings if len(ending) == length)
