"""Reads PEFT's `adapter_config.json`: what changes the result goes into `LoraFields`, what is not served is refused.

Nothing in the file is run, imported or opened. Which modules an adapter changes is not read here:
the tensors decide (`checkpoint`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import NoReturn, TypeVar

from manylora.adapters.checkpoint import peft_fields
from manylora.adapters.checkpoint.findings import Findings, refuse, refuse_unsupported
from manylora.adapters.checkpoint.lora_fields import LoraFields
from manylora.adapters.checkpoint.mlx_config import as_peft, is_mlx
from manylora.adapters.checkpoint.module_patterns import (
    InvalidKeyError,
    Matcher,
    ModulePatterns,
    UnsupportedKeyError,
    matcher,
)
from manylora.errors import PayloadTooLargeError
from manylora.strict_json import (
    MAX_INT,
    DuplicateKeyError,
    JsonRefusedError,
    TooDeepError,
    check_depth,
    named,
    parse,
    shown,
)

MAX_CONFIG_BYTES = 64 << 10
MAX_DEPTH = 16
MAX_STRING_LENGTH = 4096
MAX_PATTERN_KEYS = 1024
MAX_REGEXES = 64
"""Most keys of a pattern that are regular expressions."""
MAX_SCALING = 64.0
MIN_SCALING = 1e-8
DEFAULT_ALPHA = 8
"""PEFT's own, where the config has no `lora_alpha`."""

Number = TypeVar("Number", int, float)

_AS_SAVED = "Upload the adapter_config.json that PEFT's save_pretrained wrote, unchanged."
_SWAPPED = "Upload the weights as the weights, and PEFT's adapter_config.json as the config."
_LENGTH_BYTES = 8
"""Bytes of a safetensors file before its JSON."""
_CLASS_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}")
_TRANSFORMERS_MODULE = re.compile(
    r"transformers\.models\.[a-z0-9_]{1,64}\.modeling_[a-z0-9_]{1,64}"
)


def check_config(raw: bytes, findings: Findings) -> LoraFields | None:
    """Read and check an `adapter_config.json` of PEFT or of mlx-lm, and note what is wrong with its fields.

    Args:
        raw: The file. The first `MAX_CONFIG_BYTES + 1` bytes of a longer one are enough for the right refusal.
        findings: Takes what is wrong; codes `config.*`.

    Returns:
        What the fields say that the tensors are measured by, also where others are refused; None where they say
        nothing that could be used.

    Raises:
        PayloadTooLargeError, AdapterFormatError, AdapterIncompatibleError: It cannot be read, or is of another kind.
    """
    written = parse_config(raw)
    config = as_peft(written) if is_mlx(written) else written
    _check_peft_type(config)
    findings.attempt(_check_task_type, config.get("task_type"))
    for name, value in config.items():
        findings.attempt(_check_field, name, value)
    findings.attempt(_check_initialisation, config.get("init_lora_weights", True))
    findings.attempt(_check_auto_mapping, config.get("auto_mapping"))
    fields = _lora_fields(config, findings)
    if fields and config is not written:
        fields = replace(fields, rank=None, scale=fields.alpha)
    reported = findings.params
    for name, value in written.items():
        if name not in reported:
            findings.attempt(_check_values, name, name, value)
    return fields


def _lora_fields(config: Mapping[str, object], findings: Findings) -> LoraFields | None:
    seen = findings.seen
    rank = None if config.get("r") is None else findings.attempt(_rank, "r", config["r"])
    alpha = findings.attempt(_alpha, "lora_alpha", config.get("lora_alpha", DEFAULT_ALPHA))
    use_rslora = findings.attempt(_use_rslora, config.get("use_rslora"))
    ranks, rank_keys = _entries(config, "rank_pattern", _rank, findings)
    alphas, alpha_keys = _entries(config, "alpha_pattern", _alpha, findings)
    if findings.seen > seen or alpha is None:
        return None
    return LoraFields(
        rank=rank,
        alpha=alpha,
        use_rslora=bool(use_rslora),
        rank_pattern=ranks,
        alpha_pattern=alphas,
        rank_keys=rank_keys,
        alpha_keys=alpha_keys,
    )


def _entries(
    config: Mapping[str, object],
    name: str,
    read: Callable[[str, object], Number],
    findings: Findings,
) -> tuple[dict[str, Number], ModulePatterns]:
    """The entries of a pattern that can be used, and their keys."""
    pattern = findings.attempt(_pattern, name, config.get(name)) or {}
    values = {
        key: findings.attempt(read, f"{name}[{named(key)}]", value)
        for key, value in pattern.items()
    }
    matchers = {key: findings.attempt(_matcher, name, key) for key in pattern}
    findings.attempt(_check_number, name, sum(each is not None for each in matchers.values()))
    return {key: value for key, value in values.items() if value is not None}, ModulePatterns(
        matchers
    )


def check_scaling(scaling: float, module: str) -> float:
    """Return `scaling` if it can be served.

    Raises:
        AdapterFormatError: Not from `MIN_SCALING` to `MAX_SCALING` (config.alpha_invalid).
    """
    if not MIN_SCALING <= scaling <= MAX_SCALING:
        expected = f"expected {MIN_SCALING:g} to {MAX_SCALING:g}"
        message = f"lora_alpha and r make a scaling of {scaling:.6g} at {module}; {expected}."
        refuse("config.alpha_invalid", message, "lora_alpha", "Check lora_alpha and alpha_pattern.")
    return scaling


def parse_config(raw: bytes) -> dict[str, object]:
    """The fields as they are written; nothing of them is checked.

    Raises:
        PayloadTooLargeError: Longer than 64 KiB (config.too_large).
        AdapterFormatError: Not a JSON object (config.too_deep, .duplicate_key, .not_json, .not_object).
    """
    try:
        if len(raw) > MAX_CONFIG_BYTES:
            check_depth(raw, MAX_DEPTH)
            raise PayloadTooLargeError(
                f"adapter_config.json may have at most {MAX_CONFIG_BYTES} bytes; perhaps another file was sent as it.",
                code="config.too_large",
            )
        if raw[_LENGTH_BYTES : _LENGTH_BYTES + 1] == b"{" and b"\0" in raw[:_LENGTH_BYTES]:
            refuse("config.not_json", "adapter_config.json is a safetensors file.", None, _SWAPPED)
        config = parse(raw, MAX_DEPTH)
    except TooDeepError as error:
        refuse("config.too_deep", f"adapter_config.json is {error}.", None, _AS_SAVED)
    except DuplicateKeyError as error:
        refuse(
            "config.duplicate_key",
            f"adapter_config.json is ambiguous: {error}.",
            None,
            "Keep one of them.",
        )
    except JsonRefusedError as error:
        refuse(
            "config.not_json",
            f"adapter_config.json is not JSON in UTF-8: {error}.",
            None,
            _AS_SAVED,
        )
    if not isinstance(config, dict):
        message = f"adapter_config.json must hold a JSON object, got {shown(config)}."
        refuse("config.not_object", message, None, _AS_SAVED)
    return config


def _check_peft_type(config: Mapping[str, object]) -> None:
    if peft_fields.is_model_config(config):
        message = "adapter_config.json lacks peft_type: it is the config.json of a whole model."
        hint = "Upload the adapter_config.json that PEFT's save_pretrained wrote beside the adapter's weights."
        refuse("config.field_missing", message, "peft_type", hint)
    peft_type = config.get("peft_type")
    if peft_type is None:
        message = "adapter_config.json lacks peft_type, which PEFT always writes."
        hint = "Save the adapter again with PEFT's save_pretrained, which writes peft_type."
        refuse("config.field_missing", message, "peft_type", hint)
    if peft_type != "LORA":
        message = f'peft_type must be "LORA", got {shown(peft_type)}.'
        refuse_unsupported("config.peft_type_unsupported", message, "peft_type", "Retrain as LoRA.")


def _check_task_type(value: object) -> None:
    if value not in (None, "CAUSAL_LM"):
        message = (
            f'task_type must be "CAUSAL_LM" or null, got {shown(value)}: adapters here write text.'
        )
        hint = "Retrain for CAUSAL_LM, or set task_type to null where the adapter was trained to write text."
        refuse_unsupported("config.task_type_unsupported", message, "task_type", hint)


def _check_field(name: str, value: object) -> None:
    feature = peft_fields.FEATURES.get(name)
    if feature is not None:
        if not peft_fields.is_one_of(value, feature.neutral):
            message = f"{name} is {shown(value)}: Manylora does not serve {feature.what}."
            refuse_unsupported(
                f"config.{feature.code}", message, name, feature.hint.format(field=name)
            )
    elif name in peft_fields.MODULE_LIST_FIELDS:
        is_list = isinstance(value, list) and all(isinstance(item, str) for item in value)
        if not is_list and not isinstance(value, str | None):
            _refuse_value(name, f"a string, a list of strings or null, got {shown(value)}")
    elif name == "layers_to_transform":
        layers = value if isinstance(value, list) else [] if value is None else [value]
        if not all(type(layer) is int for layer in layers):
            _refuse_value(name, f"an integer, a list of them or null, got {shown(value)}")
    elif name == "lora_dropout":
        if type(value) not in (int, float, type(None)):
            _refuse_value(name, f"a number, got {shown(value)}")
    elif name not in peft_fields.READ_FIELDS and name not in peft_fields.INERT_FIELDS:
        peft_fields.check_unknown(name, value)


def _check_initialisation(value: object) -> None:
    field = "init_lora_weights"
    name = value.lower() if isinstance(value, str) else ""
    if value is None or isinstance(value, bool) or name in peft_fields.INITIALISATIONS:
        return
    if name.startswith(peft_fields.BASE_CHANGING_INITIALISATIONS):
        why = "the adapter was trained against a changed base and is wrong on the original one"
        hint = (
            "Convert it with PEFT: save the untrained adapter first, and after training call "
            "save_pretrained(..., path_initial_model_for_weight_conversion=<that folder>)."
        )
        refuse_unsupported(
            "config.feature_unsupported", f"{field} is {shown(value)}: {why}.", field, hint
        )
    if name == "loftq":
        why = "the adapter makes up for the rounding of a quantised base and is wrong on the original one"
        hint = "Retrain with init_lora_weights=true, or merge it into a base model of its own."
        refuse_unsupported("config.feature_unsupported", f"{field} is 'loftq': {why}.", field, hint)
    hint = "Set it to true if the base's weights were left as they are, and retrain if not."
    refuse("config.value_invalid", f"{field} is {shown(value)}, which is not known.", field, hint)


def _check_auto_mapping(value: object) -> None:
    """Accept what PEFT (and Unsloth) write when no task type was given: the class of the base. It is never imported."""
    if value is None:
        return
    if isinstance(value, dict) and value.keys() <= {
        "base_model_class",
        "parent_library",
        "unsloth_fixed",
    }:
        class_name, module = value.get("base_model_class"), value.get("parent_library")
        if (
            isinstance(class_name, str)
            and isinstance(module, str)
            and isinstance(value.get("unsloth_fixed", True), bool)
            and _CLASS_NAME.fullmatch(class_name)
            and _TRANSFORMERS_MODULE.fullmatch(module)
        ):
            return
    message = f"auto_mapping is {shown(value)}; expected null or a class of transformers."
    refuse_unsupported(
        "config.field_unsupported", message, "auto_mapping", "Set it to null: it is not used."
    )


def _rank(name: str, value: object) -> int:
    """The rank, also one that no module has or that is larger than this server serves: the tensors decide."""
    if type(value) is not int or not 0 <= value <= MAX_INT:
        message = f"{name} must be an integer, at least 0, got {shown(value)}."
        refuse(
            "config.rank_invalid",
            message,
            name,
            "Give the rank that was trained, as PEFT wrote it.",
        )
    return value


def _alpha(name: str, value: object) -> float:
    if (
        type(value) not in (int, float)
        or not isinstance(value, int | float)
        or not 0 < value <= MAX_INT
    ):
        message = f"{name} must be a number above 0, got {shown(value)}."
        refuse(
            "config.alpha_invalid",
            message,
            name,
            "Give the alpha that was trained with, as PEFT wrote it.",
        )
    return float(value)


def _use_rslora(value: object) -> bool:
    if not isinstance(value, bool | None):
        _refuse_value("use_rslora", f"true or false, got {shown(value)}")
    return bool(value)


def _pattern(name: str, value: object) -> dict[str, object]:
    if value is None:
        return {}
    if not isinstance(value, dict) or len(value) > MAX_PATTERN_KEYS:
        message = f"{name} must be an object of at most {MAX_PATTERN_KEYS} module paths."
        hint = "Name modules by their endings, such as q_proj: one entry then covers all layers."
        refuse("config.pattern_invalid", message, name, hint)
    return value


def _matcher(name: str, key: str) -> Matcher | None:
    try:
        return matcher(key)
    except InvalidKeyError as error:
        hint = "PEFT cannot load it either: correct the key."
        refuse(
            "config.pattern_invalid",
            _wrong_key(name, key, error),
            named(f"{name}[{key}]"),
            hint,
        )
    except UnsupportedKeyError as error:
        hint = "Name the modules in a simpler way."
        refuse_unsupported(
            "config.pattern_unsupported",
            _wrong_key(name, key, error),
            named(f"{name}[{key}]"),
            hint,
        )


def _check_number(name: str, regexes: int) -> None:
    if regexes > MAX_REGEXES:
        message = f"{name} has {regexes} regular expressions; at most {MAX_REGEXES} are read, beside plain paths."
        hint = "Name modules by their paths or the ends of these."
        refuse_unsupported("config.pattern_unsupported", message, name, hint)


def _wrong_key(name: str, key: str, error: ValueError) -> str:
    return f"{name} has the key {shown(key)}; it is {error}."


def _check_values(field: str, *values: object) -> None:
    """Bound all strings, integers and floats of a field, names among them."""
    for value in values:
        if isinstance(value, dict):
            _check_values(field, *value, *value.values())
        elif isinstance(value, list):
            _check_values(field, *value)
        elif isinstance(value, str):
            if len(value) > MAX_STRING_LENGTH or any(
                "\ud800" <= character <= "\udfff" for character in value
            ):
                _refuse_value(
                    field, f"at most {MAX_STRING_LENGTH} characters of valid Unicode in each string"
                )
        elif isinstance(value, int):
            if abs(value) > MAX_INT:
                _refuse_value(field, "integers up to 2**53")
        elif isinstance(value, float) and not math.isfinite(value):
            _refuse_value(field, "finite numbers; NaN and Infinity are not JSON")


def _refuse_value(field: str, expected: str) -> NoReturn:
    hint = f"Leave {named(field)} as PEFT wrote it, or take it out."
    refuse("config.value_invalid", f"{named(field)} must hold {expected}.", named(field), hint)
