"""Reads PEFT's `adapter_config.json`: what changes the result goes into a `LoraSpec`, what is not served is refused.

Nothing in the file is run, imported, opened or used as a pattern. Which modules an adapter changes is not read here:
the tensors decide (`checkpoint`).
"""

from __future__ import annotations

import math
import re
from typing import NoReturn

from weft.adapters.mlx_config import as_peft, is_mlx
from weft.adapters.module_paths import is_literal_path
from weft.adapters.peft_fields import (
    BASE_CHANGING_INITIALISATIONS,
    FEATURES,
    INERT_FIELDS,
    INITIALISATIONS,
    MODULE_LIST_FIELDS,
    READ_FIELDS,
    UNUSED,
    is_one_of,
)
from weft.adapters.ref import LoraSpec
from weft.adapters.strict_json import (
    MAX_INT,
    DuplicateKeyError,
    JsonRefusedError,
    TooDeepError,
    check_depth,
    parse,
    shown,
)
from weft.errors import AdapterFormatError, AdapterIncompatibleError, PayloadTooLargeError

MAX_CONFIG_BYTES = 64 << 10
MAX_DEPTH = 16
MAX_STRING_LENGTH = 4096
MAX_PATTERN_KEYS = 1024
MAX_SCALING = 64.0
MIN_SCALING = 1e-8

_MAX_ALPHA = MAX_SCALING * 256
_CLASS_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}")
_TRANSFORMERS_MODULE = re.compile(r"transformers\.models\.[a-z0-9_]{1,64}\.modeling_[a-z0-9_]{1,64}")


def read_config(raw: bytes, max_rank: int) -> LoraSpec:
    """Read and check an `adapter_config.json` of PEFT or of mlx-lm.

    Args:
        raw: The file. The first `MAX_CONFIG_BYTES + 1` bytes of a longer one are enough for the right refusal.
        max_rank: Largest rank that this server serves.

    Raises:
        PayloadTooLargeError: Longer than 64 KiB (config.too_large).
        AdapterFormatError: Not what PEFT writes; codes `config.*`.
        AdapterIncompatibleError: Sound, but not served; codes `config.*`.
    """
    written = parse_config(raw)
    config = as_peft(written) if is_mlx(written) else written
    _check_kind(config)
    for name, value in config.items():
        _check_field(name, value)
    _check_initialisation(config.get("init_lora_weights", True))
    _check_auto_mapping(config.get("auto_mapping"))
    spec = LoraSpec(
        rank=_rank("r", _required(config, "r"), max_rank),
        alpha=_alpha("lora_alpha", _required(config, "lora_alpha")),
        use_rslora=_use_rslora(config.get("use_rslora")),
        rank_pattern={
            key: _rank(f"rank_pattern[{key}]", rank, max_rank) for key, rank in _pattern(config, "rank_pattern").items()
        },
        alpha_pattern={
            key: _alpha(f"alpha_pattern[{key}]", alpha) for key, alpha in _pattern(config, "alpha_pattern").items()
        },
    )
    _check_values("", written)
    return spec


def check_scaling(scaling: float, module: str) -> float:
    """Return `scaling` if it can be served.

    Raises:
        AdapterFormatError: Not from `MIN_SCALING` to `MAX_SCALING` (config.alpha_invalid).
    """
    if not MIN_SCALING <= scaling <= MAX_SCALING:
        _refuse(
            "alpha_invalid",
            f"lora_alpha and r make a scaling of {scaling:.6g} at {module}; expected {MIN_SCALING:g} to "
            f"{MAX_SCALING:g}. Check lora_alpha and alpha_pattern.",
        )
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
                f"adapter_config.json may have at most {MAX_CONFIG_BYTES} bytes.", code="config.too_large"
            )
        config = parse(raw, MAX_DEPTH)
    except TooDeepError as error:
        _refuse("too_deep", f"adapter_config.json is {error}.")
    except DuplicateKeyError as error:
        _refuse("duplicate_key", f"adapter_config.json is ambiguous: {error}. Keep one of them.")
    except JsonRefusedError as error:
        _refuse("not_json", f"adapter_config.json is not JSON in UTF-8: {error}.")
    if not isinstance(config, dict):
        _refuse("not_object", f"adapter_config.json must hold a JSON object, got {shown(config)}.")
    return config


def _check_kind(config: dict[str, object]) -> None:
    peft_type = _required(config, "peft_type")
    if peft_type != "LORA":
        _unsupported("peft_type_unsupported", f'peft_type must be "LORA", got {shown(peft_type)}. Retrain as LoRA.')
    task_type = config.get("task_type")
    if task_type not in (None, "CAUSAL_LM"):
        _unsupported(
            "task_type_unsupported",
            f'task_type must be "CAUSAL_LM" or null, got {shown(task_type)}; text is written.',
        )


def _required(config: dict[str, object], name: str) -> object:
    value = config.get(name)
    if value is None:
        _refuse("field_missing", f"adapter_config.json lacks {name}, which PEFT always writes. Save it again.")
    return value


def _check_field(name: str, value: object) -> None:
    feature = FEATURES.get(name)
    if feature is not None:
        if not is_one_of(value, feature.neutral):
            raise AdapterIncompatibleError(
                f"{name} is {shown(value)}: Weft does not serve {feature.what}. {feature.mend}", code=feature.code
            )
    elif name in MODULE_LIST_FIELDS:
        _check_module_list(name, value)
    elif name == "layers_to_transform":
        _check_layers(value)
    elif name == "lora_dropout":
        if type(value) not in (int, float, type(None)):
            _refuse("value_invalid", f"lora_dropout must be a number, got {shown(value)}.")
    elif name not in READ_FIELDS and name not in INERT_FIELDS and not is_one_of(value, UNUSED):
        _unsupported(
            "field_unknown",
            f"The field {shown(name)} is not known, so {shown(value)} might change what the adapter computes. "
            "Remove it if it does not.",
        )


def _check_module_list(name: str, value: object) -> None:
    is_list = isinstance(value, list) and all(isinstance(item, str) for item in value)
    if not is_list and not isinstance(value, str | None):
        _refuse("value_invalid", f"{name} must be a string, a list of strings or null, got {shown(value)}.")


def _check_layers(value: object) -> None:
    layers = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(layer) is int for layer in layers):
        _refuse("value_invalid", f"layers_to_transform must be an integer, a list of them or null, got {shown(value)}.")


def _check_initialisation(value: object) -> None:
    name = value.lower() if isinstance(value, str) else ""
    if value is None or isinstance(value, bool) or name in INITIALISATIONS:
        return
    if name.startswith(BASE_CHANGING_INITIALISATIONS):
        _unsupported(
            "feature_unsupported",
            f"init_lora_weights is {shown(value)}: the adapter was trained against a changed base and is wrong on the "
            "original one. Convert it with PEFT: save the untrained adapter first, and after training call "
            "save_pretrained(..., path_initial_model_for_weight_conversion=<that folder>).",
        )
    if name == "loftq":
        _unsupported(
            "feature_unsupported",
            "init_lora_weights is 'loftq': the adapter makes up for the rounding of a quantised base and is wrong on "
            "the original one. Retrain with init_lora_weights=true, or merge it into a base model of its own.",
        )
    _refuse("value_invalid", f"init_lora_weights is {shown(value)}, which is not known.")


def _check_auto_mapping(value: object) -> None:
    """Accept what PEFT (and Unsloth) write when no task type was given: the class of the base. It is never imported."""
    if value is None:
        return
    if isinstance(value, dict) and value.keys() <= {"base_model_class", "parent_library", "unsloth_fixed"}:
        class_name, module = value.get("base_model_class"), value.get("parent_library")
        if (
            isinstance(class_name, str)
            and isinstance(module, str)
            and isinstance(value.get("unsloth_fixed", True), bool)
            and _CLASS_NAME.fullmatch(class_name)
            and _TRANSFORMERS_MODULE.fullmatch(module)
        ):
            return
    _unsupported(
        "field_unsupported",
        f"auto_mapping is {shown(value)}; expected null or a class of transformers. Set it to null: it is not used.",
    )


def _rank(name: str, value: object, max_rank: int) -> int:
    if type(value) is not int or value < 1:
        _refuse("rank_invalid", f"{name} must be an integer from 1 to {max_rank}, got {shown(value)}.")
    if value > max_rank:
        _unsupported(
            "rank_invalid",
            f"{name} is {shown(value)}; this server serves ranks up to {max_rank}. Retrain with a smaller rank, or "
            "raise adapter.max_rank.",
        )
    return value


def _alpha(name: str, value: object) -> float:
    if type(value) not in (int, float) or not isinstance(value, int | float) or not 0 < value <= _MAX_ALPHA:
        _refuse("alpha_invalid", f"{name} must be a number above 0, at most {_MAX_ALPHA:g}, got {shown(value)}.")
    return float(value)


def _use_rslora(value: object) -> bool:
    if not isinstance(value, bool | None):
        _refuse("value_invalid", f"use_rslora must be true or false, got {shown(value)}.")
    return bool(value)


def _pattern(config: dict[str, object], name: str) -> dict[str, object]:
    pattern = config.get(name)
    if pattern is None:
        return {}
    if not isinstance(pattern, dict) or len(pattern) > MAX_PATTERN_KEYS:
        _refuse("pattern_invalid", f"{name} must be an object of at most {MAX_PATTERN_KEYS} module paths.")
    for key in pattern:
        if not is_literal_path(key):
            _unsupported(
                "pattern_unsupported",
                f"{name} has the key {shown(key)}; only module paths or their endings are read, as in "
                "'layers.0.self_attn.q_proj', no regular expressions. List the modules one by one.",
            )
    return pattern


def _check_values(where: str, value: object) -> None:
    """Bound whatever is left: strings, integers and floats anywhere in the file."""
    if isinstance(value, dict):
        for key, below in value.items():
            _check_scalar("The name of a field", key)
            _check_values(f"{where}.{shown(key)}" if where else f"The field {shown(key)}", below)
    elif isinstance(value, list):
        for item in value:
            _check_values(where, item)
    else:
        _check_scalar(where, value)


def _check_scalar(where: str, value: object) -> None:
    if isinstance(value, str):
        if len(value) > MAX_STRING_LENGTH or any("\ud800" <= character <= "\udfff" for character in value):
            _refuse("value_invalid", f"{where} must be at most {MAX_STRING_LENGTH} characters of valid Unicode.")
    elif isinstance(value, int):
        if abs(value) > MAX_INT:
            _refuse("value_invalid", f"{where} is an integer beyond 2**53.")
    elif isinstance(value, float) and not math.isfinite(value):
        _refuse("value_invalid", f"{where} must be a finite number; NaN and Infinity are not JSON.")


def _refuse(code: str, message: str) -> NoReturn:
    raise AdapterFormatError(message, code=f"config.{code}")


def _unsupported(code: str, message: str) -> NoReturn:
    raise AdapterIncompatibleError(message, code=f"config.{code}")
