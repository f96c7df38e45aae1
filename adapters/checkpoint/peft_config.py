"""Reads PEFT's `adapter_config.json`: fields that change the result go into `LoraFields`, unserved ones are refused.

Nothing in the file is run, imported or opened. The tensors, not the config, say which modules an adapter changes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NoReturn

from manylora.adapters.checkpoint.findings import Findings, refuse, refuse_unsupported
from manylora.adapters.checkpoint.lora_fields import LoraFields
from manylora.adapters.checkpoint.mlx_config import as_peft, is_mlx
from manylora.adapters.checkpoint.module_patterns import ModulePatterns, matcher
from manylora.adapters.checkpoint.peft_fields import ALPHA, LORA_FIELDS, RANK, Rule, check_field
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
MAX_REGEXES = 64
"""Largest number of keys of a pattern that are regular expressions."""
MAX_SCALING = 64.0
MIN_SCALING = 1e-8
DEFAULT_ALPHA = 8
"""PEFT's default for a config without `lora_alpha`."""
_AS_SAVED = "Upload the adapter_config.json that PEFT's save_pretrained wrote, unchanged."
_SWAPPED = "Upload the weights as the weights, and PEFT's adapter_config.json as the config."
_LENGTH_BYTES = 8
"""Bytes of the length at the start of a safetensors file, before its JSON."""


def check_config(raw: bytes, findings: Findings) -> LoraFields | None:
    """Read and check an `adapter_config.json` of PEFT or of mlx-lm, and note every wrong field.

    Args:
        raw: The file, or the first `MAX_CONFIG_BYTES + 1` bytes of a longer one, which is refused.
        findings: Gets wrong fields; codes `config.*`.

    Returns:
        The fields that the tensors are checked against, even if other fields are wrong. None if these fields cannot be
        used either.

    Raises:
        PayloadTooLargeError, AdapterFormatError, AdapterIncompatibleError: It cannot be read, or is no LoRA config.
    """
    written = parse_config(raw)
    config = as_peft(written) if is_mlx(written) else written
    _check_peft_type(config)
    for name, value in config.items():
        if name not in LORA_FIELDS:
            findings.attempt(check_field, name, value)
    fields = _lora_fields(config, findings)
    if fields and config is not written:
        fields = replace(fields, rank=None, scale=fields.alpha)
    reported = findings.params
    for name, value in written.items():
        if name not in reported:
            findings.attempt(_check_values, name, name, value)
    return fields


def _lora_fields(config: Mapping[str, Any], findings: Findings) -> LoraFields | None:
    seen = findings.seen
    read: dict[str, Any] = {
        name: findings.attempt(check_field, name, config[name])
        for name in LORA_FIELDS
        if name in config
    }
    ranks, rank_keys = _entries("rank_pattern", read, RANK, findings)
    alphas, alpha_keys = _entries("alpha_pattern", read, ALPHA, findings)
    if findings.seen > seen:
        return None
    return LoraFields(
        rank=read.get("r"),
        alpha=read.get("lora_alpha", DEFAULT_ALPHA),
        use_rslora=bool(read.get("use_rslora")),
        rank_pattern=ranks,
        alpha_pattern=alphas,
        rank_keys=rank_keys,
        alpha_keys=alpha_keys,
    )


def _entries(
    name: str, read: Mapping[str, Any], rule: Rule, findings: Findings
) -> tuple[dict[str, Any], ModulePatterns]:
    """Check the entries of a pattern; returns them, and their keys."""
    pattern = read.get(name) or {}
    for key, value in pattern.items():
        findings.attempt(rule.check, f"{name}[{named(key)}]", value)
    matchers = {key: findings.attempt(matcher, name, key) for key in pattern}
    findings.attempt(_check_number, name, sum(each is not None for each in matchers.values()))
    return pattern, ModulePatterns(matchers)


def check_scaling(scaling: float, module: str) -> float:
    """Return `scaling` if it is in the bounds.

    Raises:
        AdapterFormatError: Not from `MIN_SCALING` to `MAX_SCALING` (config.alpha_invalid).
    """
    if not MIN_SCALING <= scaling <= MAX_SCALING:
        expected = f"expected {MIN_SCALING:g} to {MAX_SCALING:g}"
        message = f"lora_alpha and r make a scaling of {scaling:.6g} at {module}; {expected}."
        refuse("config.alpha_invalid", message, "lora_alpha", "Check lora_alpha and alpha_pattern.")
    return scaling


def parse_config(raw: bytes) -> dict[str, Any]:
    """Parse the file to fields, without checking any of them.

    Raises:
        PayloadTooLargeError: Longer than 64 KiB (config.too_large).
        AdapterFormatError: Not a JSON object (config.too_deep, .duplicate_key, .not_json, .not_object).
    """
    try:
        if len(raw) > MAX_CONFIG_BYTES:
            check_depth(raw, MAX_DEPTH)
            raise PayloadTooLargeError(
                f"adapter_config.json may have at most {MAX_CONFIG_BYTES} bytes; perhaps another file was sent.",
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
    if "peft_type" not in config and not config.keys().isdisjoint({"model_type", "architectures"}):
        message = "adapter_config.json lacks peft_type: it is the config.json of a whole model."
        hint = "Upload the adapter_config.json that PEFT's save_pretrained wrote beside the adapter's weights."
        refuse("config.field_missing", message, "peft_type", hint)
    if config.get("peft_type") is None:
        message = "adapter_config.json lacks peft_type, which PEFT always writes."
        hint = "Save the adapter again with PEFT's save_pretrained, which writes peft_type."
        refuse("config.field_missing", message, "peft_type", hint)
    check_field("peft_type", config["peft_type"])


def _check_number(name: str, regexes: int) -> None:
    if regexes > MAX_REGEXES:
        message = f"{name} has {regexes} regular expressions; at most {MAX_REGEXES} are read, beside plain paths."
        hint = "Name modules by their paths or the ends of these."
        refuse_unsupported("config.pattern_unsupported", message, name, hint)


def _check_values(field: str, *values: object) -> None:
    """Bound all strings, names, integers and floats of a field."""
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
