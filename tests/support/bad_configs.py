"""Configs of bad uploads: malformed ones, and those that ask for what is not served. The weights are sound."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from typing import Any

from bad_upload import BadUpload, Upload
from lora_files import PEFT_DEFAULTS, config_bytes


def config_cases(weights: bytes, max_rank: int) -> Iterator[BadUpload]:
    """Configs that are malformed or ask for what is not served, with sound weights."""
    for name, code, raw in _config_texts():
        status = 413 if code == "config.too_large" else 422
        yield BadUpload(f"config: {name}", code, partial(Upload, raw, weights), status)
    for field, code, values in _config_values(max_rank):
        for number, value in enumerate(values):
            raw = config_bytes(**{field: value})
            name = f"config: {field[:20]}={ascii(value)[:40]} ({code[7:]} {number})"
            yield BadUpload(name, code, partial(Upload, raw, weights))


def _config_texts() -> list[tuple[str, str, bytes]]:
    good = config_bytes()
    without = {
        field: json.dumps(
            {key: value for key, value in PEFT_DEFAULTS.items() if key != field}
        ).encode()
        for field in ("peft_type",)
    }
    return [
        ("empty", "config.not_json", b""),
        ("cut short", "config.not_json", b"{"),
        ("half of it", "config.not_json", good[: len(good) // 2]),
        ("UTF-16 with byte order mark", "config.not_json", good.decode().encode("utf-16")),
        ("UTF-8 with byte order mark", "config.not_json", b"\xef\xbb\xbf" + good),
        ("not UTF-8", "config.not_json", b'{"r": "\xff"}'),
        ("binary", "config.not_json", bytes(range(256))),
        ("single quotes", "config.not_json", b"{'r': 8}"),
        ("trailing comma", "config.not_json", good[:-2] + b",}"),
        ("text after the end", "config.not_json", good + b"x"),
        ("a quote without end", "config.not_json", b'{"' + b'\\"' * 30_000),
        ("list", "config.not_object", b"[]"),
        ("string", "config.not_object", b'"LORA"'),
        ("number", "config.not_object", b"8"),
        ("null", "config.not_object", b"null"),
        ("NaN alone", "config.not_object", b"NaN"),
        ("empty object", "config.field_missing", b"{}"),
        (
            "nested 17 lists",
            "config.too_deep",
            config_bytes(revision=json.loads("[" * 16 + "]" * 16)),
        ),
        ("nested 200,000 lists", "config.too_deep", b"[" * 200_000 + b"]" * 200_000),
        ("nested 200,000 objects", "config.too_deep", b'{"a":' * 200_000 + b"1" + b"}" * 200_000),
        (
            "nested 30,000 lists in a field",
            "config.too_deep",
            b'{"r":' + b"[" * 30_000 + b"]" * 30_000 + b"}",
        ),
        ("1 MB", "config.too_large", config_bytes(revision="x" * 1_000_000)),
        ("64 KiB and a byte", "config.too_large", good + b" " * ((64 << 10) + 1 - len(good))),
        ("r twice", "config.duplicate_key", good[:-2] + b',"r": 4}'),
        ("r twice, once escaped", "config.duplicate_key", good[:-2] + b',"\\u0072": 4}'),
        ("a key twice inside", "config.duplicate_key", good[:-2] + b',"x": {"y": 1, "y": 2}}'),
        *((f"{field} missing", "config.field_missing", raw) for field, raw in without.items()),
        ("r of 60,000 digits", "config.rank_invalid", _with_text("r", b"8" * 60_000)),
        ("alpha of 60,000 digits", "config.alpha_invalid", _with_text("lora_alpha", b"8" * 60_000)),
        ("alpha NaN", "config.alpha_invalid", _with_text("lora_alpha", b"NaN")),
        ("alpha Infinity", "config.alpha_invalid", _with_text("lora_alpha", b"Infinity")),
        ("alpha 1e999", "config.alpha_invalid", _with_text("lora_alpha", b"1e999")),
        ("r NaN", "config.rank_invalid", _with_text("r", b"NaN")),
        ("r 8.0", "config.rank_invalid", _with_text("r", b"8.0")),
        ("r 8e0", "config.rank_invalid", _with_text("r", b"8e0")),
        ("dropout NaN", "config.value_invalid", _with_text("lora_dropout", b"NaN")),
        ("a surrogate", "config.value_invalid", _with_text("revision", b'"\\ud800"')),
    ]


def _with_text(field: str, text: bytes) -> bytes:
    return config_bytes(**{field: "@@"}).replace(b'"@@"', text)


_FEATURE = "config.feature_unsupported"
_FIELD = "config.field_unsupported"
_VALUE = "config.value_invalid"
_PATTERN, _INVALID = "config.pattern_unsupported", "config.pattern_invalid"


_AUTO_MAPPINGS: list[Any] = [
    {"base_model_class": "X", "parent_library": "antigravity"},
    {"base_model_class": "X", "parent_library": "transformers.models.a.modeling_a.os"},
    {"base_model_class": "../X", "parent_library": "transformers.models.a.modeling_a"},
    {"base_model_class": "X", "parent_library": "transformers.models.a.modeling_a", "evil": 1},
    {"parent_library": "os"},
    {"base_model_class": "X"},
    *("os", True, [], {}),
]


def _config_values(max_rank: int) -> list[tuple[str, str, list[Any]]]:
    not_linear = (
        r"(q)_\1",
        "(?!v)q_proj",
        "(?<=x)q_proj",
        "q_pro(?>j)",
        "q_pro*+j",
        "(q)?(?(1)_|x)proj",
    )
    too_large = ("a" * 1025, "(a{999}){999}", "a{1001}", "(" * 101 + ")" * 101, "(?i:\u017f)")
    hostile_patterns = [{key: 8} for key in (*not_linear, *too_large)]
    invalid_patterns = [
        {key: 8} for key in ("(q_proj", "q_proj)", "*", "[q", "(?i)q_proj", "a{2,1}", "q\\")
    ]
    wrong_ranks = [{"q_proj": rank} for rank in (-1, "8", True, 8.5, None, [8], 2**54)]
    return [
        ("r", "config.rank_invalid", [-4, "4", True, 4.5, 10**30, [], {}, 2**63]),
        ("r", "weights.rank_mismatch", [0, 4, 10**9, max_rank + 1]),
        (
            "lora_alpha",
            "config.alpha_invalid",
            [0, -1, 1e308, 10**400 // 1, "16", True, [], 1e-300, 8 * 64 + 1, None],
        ),
        ("use_rslora", _VALUE, [1, 0, "true", [], 1.0]),
        (
            "peft_type",
            "config.peft_type_unsupported",
            ["IA3", "EVIL", "lora", "ADALORA", 1, True, ["LORA"], {}, ""],
        ),
        (
            "task_type",
            "config.task_type_unsupported",
            ["SEQ_CLS", "SEQ_2_SEQ_LM", "EVIL", 1, [], {}, False, ""],
        ),
        ("use_dora", _FEATURE, [True, 1, "false", 0]),
        ("modules_to_save", _FEATURE, [["lm_head"], "lm_head", ["embed_tokens"], {}]),
        ("bias", _FEATURE, ["NONE", True, ""]),
        ("lora_bias", _FEATURE, [True, 1]),
        ("fan_in_fan_out", _FEATURE, [True, "false"]),
        ("layer_replication", _FEATURE, [[[0, 2], [1, 2]] * 500, [[0, 1]], 1]),
        ("trainable_token_indices", _FEATURE, [[1, 2], {"embed_tokens": [1]}]),
        ("alora_invocation_tokens", _FEATURE, [[1, 2, 3], []]),
        ("use_bdlora", _FEATURE, [{"nblocks": 2}, {}]),
        ("kasa_config", _FEATURE, [{"beta": 0.1}, {}]),
        ("monteclora_config", _FEATURE, [{"num_samples": 8}]),
        ("velora_config", _FEATURE, [{"num_groups": 64}]),
        (
            "init_lora_weights",
            _FEATURE,
            ["pissa", "pissa_niter_16", "olora", "OLoRA", "corda", "loftq", "lora_ga"],
        ),
        ("init_lora_weights", _VALUE, ["evil", 1, [], {}, ["pissa"]]),
        ("auto_mapping", _FIELD, _AUTO_MAPPINGS),
        ("megatron_config", _FIELD, [{"tensor_model_parallel_size": 2}]),
        ("megatron_core", _FIELD, ["antigravity", "os", True, {}]),
        ("rank_pattern", _PATTERN, hostile_patterns),
        (
            "rank_pattern",
            _INVALID,
            [[], "q_proj", 8, {f"m{i}": 8 for i in range(1025)}, *invalid_patterns],
        ),
        ("rank_pattern", "config.rank_invalid", wrong_ranks),
        (
            "rank_pattern",
            "weights.rank_mismatch",
            [{key: rank} for key in ("q_proj", "(q|k)_proj") for rank in (0, 65)],
        ),
        ("alpha_pattern", _PATTERN, hostile_patterns),
        ("alpha_pattern", _INVALID, [[], "q_proj", *invalid_patterns]),
        (
            "alpha_pattern",
            "config.alpha_invalid",
            [{"q_proj": v} for v in (0, -1, "8", True, 1e308, None, 8 * 65)],
        ),
        ("target_modules", _VALUE, [8, {}, [1], [["q_proj"]], "x" * 4097, ["x" * 4097], True]),
        ("exclude_modules", _VALUE, [8, {}, [None]]),
        ("layers_pattern", _VALUE, [8, {}, [1]]),
        ("layers_to_transform", _VALUE, ["0", [0.5], [True], {}, 10**30]),
        ("lora_dropout", _VALUE, ["0", True, []]),
        ("revision", _VALUE, ["x" * 4097, 10**30, [2**54]]),
        ("evil", "config.field_unknown", [True, 1, 0, "x", [1], {"a": 1}, 0.0]),
        ("__class__", "config.field_unknown", ["os.system"]),
        ("x" * 300, "config.field_unknown", [1]),
        ("x" * 5000, _VALUE, [None]),
    ]
