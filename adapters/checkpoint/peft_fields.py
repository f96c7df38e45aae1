"""The fields of PEFT's `adapter_config.json`, from PEFT 0.2 to 0.21, and the rules that their values must keep.

A field without rules has no effect on a trained adapter, whatever its value. Null leaves every field but `lora_alpha`
at PEFT's default. The rules of a feature that is not served allow the values that switch it off. To serve a feature,
allow its values here and read them in `peft_config`. `scripts/list_peft_defaults.py` lists the fields and defaults of
the installed PEFT; a test compares them with these.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from manylora.adapters.checkpoint.findings import refuse, refuse_unsupported
from manylora.strict_json import MAX_INT, named, shown

MAX_PATTERN_KEYS = 1024
FEATURE = "feature_unsupported"
FIELD = "field_unsupported"
"""Error codes, behind `config.`."""
_BASE_CLASS = re.compile(
    r"transformers\.models\.[a-z0-9_]{1,64}\.modeling_[a-z0-9_]{1,64}:[A-Za-z_][A-Za-z0-9_]{0,127}"
)
"""Module and class of a base."""


@dataclass(frozen=True, slots=True)
class Rule:
    """One thing that must hold for the value of a field."""

    allows: Callable[[Any], bool]
    message: str
    """Message of the error; `{field}` and `{value}` stand for the field's name and its value."""
    hint: str
    """Advice in the error; `{field}` stands for the field's name."""
    code: str = "value_invalid"
    """Code of the error, behind `config.`. With `_invalid` it is a value that PEFT does not write."""

    def check(self, field: str, value: object) -> None:
        """Return if the value is allowed.

        Raises:
            AdapterFormatError: PEFT does not write the value.
            AdapterIncompatibleError: The value asks for something that is not served.
        """
        if self.allows(value):
            return
        name = named(field)
        message = self.message.format(field=name, value=shown(value))
        fail = refuse if self.code.endswith("_invalid") else refuse_unsupported
        fail(f"config.{self.code}", message, name, self.hint.format(field=name))


def field_names(text: str) -> frozenset[str]:
    """Split a text with names at spaces and line ends."""
    return frozenset(text.split())


def is_one_of(choices: tuple[object, ...], value: object) -> bool:
    """True if `value` is one of these. Types are compared too: 0 is not False."""
    return any(type(value) is type(choice) and value == choice for choice in choices)


def _has_type(types: tuple[type, ...], value: object) -> bool:
    return type(value) in types


def _has_types(type_: type, value: object) -> bool:
    """True if `value` has the type, or is a list of values that have it."""
    return all(type(item) is type_ for item in (value if isinstance(value, list) else [value]))


def _is_rank(value: object) -> bool:
    """True for a rank. It may be larger than this server serves, or that of no module: the tensors decide."""
    return type(value) is int and 0 <= value <= MAX_INT


def _is_alpha(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= MAX_INT


def _is_pattern(value: object) -> bool:
    return isinstance(value, dict) and len(value) <= MAX_PATTERN_KEYS


def _is_transformers_class(value: object) -> bool:
    """True for the class of the base, which PEFT and Unsloth write without a task type. It is never imported."""
    if not isinstance(value, dict):
        return False
    names: list[Any] = [value.get("parent_library"), value.get("base_model_class")]
    return (
        value.keys() <= {"base_model_class", "parent_library", "unsloth_fixed"}
        and isinstance(value.get("unsloth_fixed", True), bool)
        and all(isinstance(name, str) for name in names)
        and _BASE_CLASS.fullmatch(":".join(names)) is not None
    )


def _initialisation(value: object) -> str:
    return value.lower() if isinstance(value, str) else ""


def _keeps_the_base(value: object) -> bool:
    """True if the initial B @ A was not subtracted from the base's weights."""
    return not _initialisation(value).startswith(("pissa", "olora", "corda", "lora_ga"))


def _is_not_loftq(value: object) -> bool:
    return _initialisation(value) != "loftq"


def _is_known_start(value: object) -> bool:
    return isinstance(value, bool) or _initialisation(value) in {
        "gaussian",
        "eva",
        "orthogonal",
        "mica",
    }


def _typed(allows: Callable[[Any], bool], expected: str) -> tuple[Rule]:
    """Make the rules of a field whose value has no effect, but must be what PEFT writes."""
    hint = "Leave {field} as PEFT wrote it, or take it out."
    return (Rule(allows, f"{{field}} must hold {expected}, got {{value}}.", hint),)


def _unserved(
    what: str, *neutral: object, hint: str = "Retrain without {field}.", code: str = FEATURE
) -> tuple[Rule]:
    """Make the rules of a field that changes the result unless it has one of the neutral values."""
    message = f"{{field}} is {{value}}: Manylora does not serve {what}."
    return (Rule(partial(is_one_of, neutral), message, hint, code),)


RANK = Rule(
    _is_rank,
    "{field} must be an integer, at least 0, got {value}.",
    "Give the rank that was trained, as PEFT wrote it.",
    "rank_invalid",
)
ALPHA = Rule(
    _is_alpha,
    "{field} must be a number above 0, got {value}.",
    "Give the alpha that was trained with, as PEFT wrote it.",
    "alpha_invalid",
)
_PATTERN = Rule(
    _is_pattern,
    f"{{field}} must be an object of at most {MAX_PATTERN_KEYS} module paths.",
    "Name modules by their endings, such as q_proj: one entry then covers all layers.",
    "pattern_invalid",
)
UNKNOWN = Rule(
    partial(is_one_of, (None, False, "", [], {})),
    "The field '{field}' is not known, so {value} might change what the adapter computes.",
    "Remove it if only the training needed it.",
    "field_unknown",
)
"""Rule of a field that is in no table. Its value may be one that cannot change anything."""
_MERGE_OR_RETRAIN = "Retrain without {field}, or merge the adapter into a base model of its own."
_WRONG_BASE = "and is wrong on the original one."

LORA_FIELDS: dict[str, tuple[Rule, ...]] = {
    "r": (RANK,),
    "lora_alpha": (ALPHA,),
    "use_rslora": _typed(partial(_has_type, (bool,)), "true or false"),
    "rank_pattern": (_PATTERN,),
    "alpha_pattern": (_PATTERN,),
}
"""Rules of the fields that `peft_config` reads into `LoraFields`."""
FIELDS: dict[str, tuple[Rule, ...]] = {
    **LORA_FIELDS,
    "peft_type": (
        Rule(
            partial(is_one_of, ("LORA",)),
            '{field} must be "LORA", got {value}.',
            "Retrain as LoRA.",
            "peft_type_unsupported",
        ),
    ),
    "task_type": (
        Rule(
            partial(is_one_of, ("CAUSAL_LM",)),
            '{field} must be "CAUSAL_LM" or null, got {value}: adapters here write text.',
            "Retrain for CAUSAL_LM, or set {field} to null where the adapter was trained to write text.",
            "task_type_unsupported",
        ),
    ),
    "init_lora_weights": (
        Rule(
            _keeps_the_base,
            f"{{field}} is {{value}}: the adapter was trained against a changed base {_WRONG_BASE}",
            "Convert it with PEFT: save the untrained adapter first, and after training call "
            "save_pretrained(..., path_initial_model_for_weight_conversion=<that folder>).",
            FEATURE,
        ),
        Rule(
            _is_not_loftq,
            "{field} is {value}: the adapter makes up for the rounding of a quantised base "
            f"{_WRONG_BASE}",
            "Retrain with {field}=true, or merge it into a base model of its own.",
            FEATURE,
        ),
        Rule(
            _is_known_start,
            "{field} is {value}, which is not known.",
            "Set it to true if the base's weights were left as they are, and retrain if not.",
        ),
    ),
    "auto_mapping": (
        Rule(
            _is_transformers_class,
            "{field} is {value}; expected null or a class of transformers.",
            "Set it to null: it is not used.",
            FIELD,
        ),
    ),
    # The tensors say which modules the adapter changes.
    **dict.fromkeys(
        ("target_modules", "exclude_modules", "layers_pattern"),
        _typed(partial(_has_types, str), "a string, a list of strings or null"),
    ),
    "layers_to_transform": _typed(partial(_has_types, int), "an integer, a list of them or null"),
    "lora_dropout": _typed(partial(_has_type, (int, float)), "a number"),
    # `init_lora_weights` tells if one of the configs was used, and qalora_group_size belongs to use_qalora.
    **dict.fromkeys(
        field_names("""
            base_model_name_or_path revision peft_version inference_mode ensure_weight_tying qalora_group_size
            runtime_config loftq_config eva_config corda_config lora_ga_config
        """),
        (),
    ),
    "use_dora": _unserved("DoRA", False, hint="Retrain with use_dora=false."),
    "modules_to_save": _unserved(
        "full copies of base modules", [], hint="Retrain with modules_to_save=null."
    ),
    # Trained biases are tensors in the file, which are refused by name; a base without biases has none to train.
    "bias": _unserved(
        "biases of this kind", "none", "all", "lora_only", hint='Retrain with bias="none".'
    ),
    "lora_bias": _unserved("a bias on lora_B", False, hint="Retrain with lora_bias=false."),
    "fan_in_fan_out": _unserved(
        "transposed base weights (Conv1D)", False, hint="Set it to false for linear layers."
    ),
    "layer_replication": _unserved("repeated layers", [], hint=_MERGE_OR_RETRAIN),
    "trainable_token_indices": _unserved("trained token embeddings", [], {}),
    "target_parameters": _unserved(
        "LoRA on bare parameters", [], hint="Target linear layers with target_modules."
    ),
    "alora_invocation_tokens": _unserved("activated LoRA"),
    "use_qalora": _unserved("QALoRA", False, hint="Retrain with use_qalora=false."),
    "use_bdlora": _unserved("block-diagonal LoRA", False),
    "arrow_config": _unserved("Arrow routing", hint="Upload the task adapters one by one."),
    "kasa_config": _unserved("KaSA, which changes the base"),
    "monteclora_config": _unserved("Monte Carlo LoRA"),
    "velora_config": _unserved("VeLoRA"),
    "enable_lora": _unserved("merged linear layers"),
    "merge_weights": _unserved("merged weights", False, hint="Save the adapter unmerged."),
    "megatron_config": _unserved(
        "Megatron parallel layers", {}, hint="Convert the adapter to plain PEFT.", code=FIELD
    ),
    "megatron_core": _unserved(
        "a module to import", "megatron.core", hint="Set it to null.", code=FIELD
    ),
}
"""Rules by field. A field that is not here has the rule `UNKNOWN`."""


def check_field(name: str, value: Any, fields: Mapping[str, tuple[Rule, ...]] = FIELDS) -> Any:  # noqa: ANN401 - JSON
    """Return the value of a field if it is allowed.

    Raises:
        AdapterFormatError, AdapterIncompatibleError: A rule does not allow it.
    """
    if value is not None or name == "lora_alpha":
        for rule in fields.get(name, (UNKNOWN,)):
            rule.check(name, value)
    return value
