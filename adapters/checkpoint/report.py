"""The report on an accepted adapter for its owner: how it was read, and warnings of likely mistakes.

Except for the names of the base, the report says nothing that is not in the adapter's files. It refuses nothing.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from manylora.adapters.base_shape import MODULE_PATHS
from manylora.adapters.checkpoint.lora_fields import LoraFields
from manylora.adapters.checkpoint.module_patterns import ModulePatterns
from manylora.adapters.checkpoint.peft_config import DEFAULT_ALPHA
from manylora.adapters.checkpoint.safetensors_header import TensorEntry
from manylora.adapters.checkpoint.tensor_names import TensorName, unwrapped
from manylora.strict_json import shown

MAX_NAMES = 8
"""Largest number of names that one warning lists."""
_MOVED = "The layers that the file has at {} were taken for those of the served model."
_NO_ALPHA = f"The config has no lora_alpha. It was taken for {DEFAULT_ALPHA}, PEFT's own."
_QUANTISED = re.compile(r"(-unsloth)?-bnb-4bit$")


def report_on(
    fields: LoraFields,
    config: Mapping[str, object],
    tensors: Sequence[tuple[TensorEntry, TensorName]],
    zeros: frozenset[str],
    base_names: Sequence[str] = (),
) -> dict[str, object]:
    """Report on an adapter that was checked.

    Args:
        fields: Fields of the config.
        config: The config file, parsed.
        tensors: All tensors of the file.
        zeros: Names of tensors with zeros only.
        base_names: Names of the base, the served one first; empty if they are unknown.

    Returns:
        `dtype` (list of dtypes), `layout` (`peft` or `mlx`), `renamed` (tensors whose names have wrappers, an adapter
        or a multimodal model) and `warnings` (sentences), as JSON types. Equal files give equal reports.
    """
    names = [name for _, name in tensors]
    warnings = [
        _untrained([entry.name in zeros for entry, name in tensors if name.place.part == "b"]),
        _MOVED.format(names[0].stem) if "language_model" in names[0].stem else "",
        _unused(fields, config, names),
        _overlap(fields.alpha_pattern),
        "" if "lora_alpha" in config or "peft_type" not in config else _NO_ALPHA,
        _other_base(config.get("base_model_name_or_path") or config.get("model"), base_names),
    ]
    return {
        "dtype": sorted({entry.dtype for entry, _ in tensors}),
        "layout": names[0].layout,
        "renamed": sum(name.is_renamed for name in names),
        "warnings": [warning for warning in warnings if warning],
    }


def _untrained(is_zero: Sequence[bool]) -> str:
    if not any(is_zero):
        return ""
    if all(is_zero):
        return "Every lora_B is zero, so the adapter answers as the base does: it was saved before it was trained."
    return (
        f"{sum(is_zero)} of {len(is_zero)} lora_B are zero: these modules answer as the base does."
    )


def _unused(fields: LoraFields, config: Mapping[str, object], names: Sequence[TensorName]) -> str:
    """Warning of modules that the config names and the file does not have."""
    paths = sorted(
        {f"{name.stem}.{name.place.layer}.{MODULE_PATHS[name.place.module]}" for name in names}
    )
    targets = None if config.get("exclude_modules") else config.get("target_modules")
    listed_targets = dict.fromkeys(map(unwrapped, targets)) if isinstance(targets, list) else {}
    missing = {
        *fields.rank_keys.unused(paths),
        *fields.alpha_keys.unused(paths),
        *ModulePatterns(listed_targets).unused(paths),
    }
    if not missing:
        return ""
    more = f" and {len(missing) - MAX_NAMES} more" if len(missing) > MAX_NAMES else ""
    listed = ", ".join(shown(key) for key in sorted(missing)[:MAX_NAMES])
    return f"The config names modules of which the file holds nothing: {listed}{more}. Nothing is changed there."


def _overlap(alpha_pattern: Mapping[str, float]) -> str:
    """Warning of keys in alpha_pattern that match one module. For ranks, the tensors' sizes decide."""
    for key in alpha_pattern:
        parts = key.split(".")
        for shorter in (".".join(parts[start:]) for start in range(1, len(parts))):
            if shorter in alpha_pattern:
                return (
                    f"alpha_pattern has {shown(key)} and {shown(shorter)}, which match the same modules. The first in "
                    "the file counts, as in PEFT; as PEFT sorts them when it saves, in training another may have."
                )
    return ""


def _other_base(trained_on: object, base_names: Sequence[str]) -> str:
    if not isinstance(trained_on, str) or not trained_on or not base_names:
        return ""
    if _plain(trained_on) in map(_plain, base_names):
        return ""
    return (
        f"The config says that the base was {shown(trained_on)}, here it is {shown(base_names[0])}. The sizes fit; if "
        "these are not the same model, the answers will be poor."
    )


def _plain(name: str) -> str:
    return _QUANTISED.sub("", name.rstrip("/").rsplit("/", 1)[-1].lower())
