"""Uploads that strangers try, by the row of the safety rules that names them, and the answer each must get.

Files come from the table of bad uploads; a row stands for its siblings too, so most rows have several cases.
"""

from __future__ import annotations

from dataclasses import dataclass

from bad_upload import EVIL_REGEX


@dataclass(frozen=True)
class Row:
    """One row: what is sent, by name, and how it is refused."""

    id: str
    status: int
    code: str
    cases: tuple[str, ...]

    def __str__(self) -> str:
        return self.id


def _container(code: str, *names: str) -> tuple[int, str, tuple[str, ...]]:
    return 422, f"weights.{code}", tuple(f"container: {name}" for name in names)


def _named(code: str, *names: str) -> tuple[int, str, tuple[str, ...]]:
    return 422, f"weights.{code}", tuple(f"name: {name}" for name in names)


def _meaning(code: str, *names: str) -> tuple[int, str, tuple[str, ...]]:
    return 422, f"weights.{code}", tuple(f"meaning: {name}" for name in names)


def _config(code: str, *names: str, status: int = 422) -> tuple[int, str, tuple[str, ...]]:
    return status, f"config.{code}", tuple(f"config: {name}" for name in names)


_ANY = "header: "
_DTYPES = ("I8", "U8", "BOOL", "F8_E4M3", "I32", "I64", "F64", "f32")
_ROWS: dict[str, tuple[int, str, tuple[str, ...]]] = {
    "T-9": _container(
        "not_safetensors", "zip", "empty zip", "tar", "tar with a path", "gzip", "gzip of today", "7z", "GGUF", "HDF5"
    ),
    "W-1": _container("header_truncated", "empty file", "one byte"),
    "W-2": _container("header_truncated", "seven bytes", "eight bytes"),
    "W-3": _container("header_truncated", "length beyond the file", "length one too large", "cut inside the header"),
    "W-4": _container("header_too_large", "length 2**64-1", "length 2**63", "length one over the limit"),
    "W-5": _container("header_invalid", "length 0", "length 0 before a good file"),
    "W-7": _container("header_too_large", "a million empty tensors", "99 MB of spaces"),
    "W-7, within the limit": _container("too_many_tensors", "9,000 empty tensors"),
    "W-8": _container("header_invalid", _ANY + "not UTF-8", _ANY + "UTF-16", _ANY + "byte order mark"),
    "W-9": _container(
        "header_invalid",
        *(_ANY + name for name in ("not JSON", "JSON list", "JSON string", "JSON null", "two JSON values", "NaN")),
    ),
    "W-10": _container("not_safetensors", *(f"pickle protocol {protocol}" for protocol in range(6))),
    "W-11": _container("header_invalid", *(_ANY + name for name in ("nested lists", "nested objects"))),
    "W-11, long instead": _container(
        "header_invalid", *(_ANY + name for name in ("a long number", "a long fraction", "a quote without end"))
    ),
    "W-13": _container("offset_invalid", "overlap"),
    "W-14": _container("offset_invalid", "hole"),
    "W-16": _container("truncated", "truncated body", "half of the body"),
    "W-16, too long instead": _container("trailing_bytes", "one byte after the end", "a zip after the end"),
    "W-18": _container("offset_invalid", "end before start", "negative start", "start beyond 2**64", "three offsets"),
    "W-20": _container(
        "shape_invalid",
        *("shape says more than the bytes", "shape says less than the bytes", "shape overflows 64 bits"),
        *("shape with negative extents", "shape of 100 dimensions"),
    ),
    "W-21": _container("dtype_unsupported", "dtype 'PICKLE'", "dtype ''", "dtype None", "dtype 4", "dtype ['F32']"),
    "W-23": _container("dtype_unsupported", *(f"dtype {dtype!r}" for dtype in _DTYPES)),
    "W-25": _meaning("non_finite", *(f"NaN in B as {dtype}" for dtype in ("F32", "F16", "BF16"))),
    "W-26": _meaning(
        "non_finite",
        *(f"{sign} in B as {dtype}" for sign in ("infinity", "minus infinity") for dtype in ("F32", "F16", "BF16")),
    ),
    "W-26, nearly": _meaning("value_too_large", *(f"-20000 in B as {dtype}" for dtype in ("F32", "F16", "BF16"))),
    "W-28": _meaning("shape_invalid", "rank 0", "scalars", "one dimension", "three dimensions"),
    "W-31": _named("name_invalid", "path traversal", "absolute path", "NUL in a name", "name of 64 KB", "two dots"),
    "W-32": _named("tensor_not_allowed", "the embedding", "the output head", "a base weight", "a base layer", "a norm"),
    "W-33": _named(
        "tensor_not_allowed", "unknown module", "unknown module without parent", "a fused module", "layer -1"
    ),
    "W-33, twice": _named("duplicate_tensor", "a twin with default", "a twin with _orig_mod"),
    "W-35": _meaning("pair_incomplete", "A without its partner", "B without its partner"),
    "W-36": _meaning("shape_mismatch", "A too wide", "B too tall", "A transposed"),
    "W-37": _meaning("rank_mismatch", "A of another rank", "B of another rank", "A and B of another rank than r"),
    "W-39": _container("empty", _ANY + "no tensors", _ANY + "only metadata"),
    "C-1": _config("not_json", "cut short", "empty", "UTF-16 with byte order mark", "UTF-8 with byte order mark"),
    "C-2": _config("not_object", "list", "string", "number", "null"),
    "C-4": _config("too_deep", "nested 200,000 lists", "nested 200,000 objects", "nested 17 lists"),
    "C-6": _config("too_large", "1 MB", "64 KiB and a byte", status=413),
    "C-7": _config("rank_invalid", "r=0 (rank_invalid 0)", "r=-4 (rank_invalid 1)"),
    "C-8": _config("rank_invalid", "r='4' (rank_invalid 2)", "r=True (rank_invalid 3)", "r=4.5 (rank_invalid 4)"),
    "C-9": _config("rank_invalid", "r=1000000000 (rank_invalid 5)", "r=65 (rank_invalid 9)", "r of 60,000 digits"),
    "C-10": _config("field_missing", "r missing", "lora_alpha missing", "peft_type missing", "empty object"),
    "C-11": _config("alpha_invalid", "alpha NaN", "lora_alpha=1e+308 (alpha_invalid 2)", "alpha Infinity"),
    "C-13, where it would be run": _config(
        "pattern_unsupported", f"rank_pattern={{{EVIL_REGEX!r}: 8}} (pattern_unsupported 0)"
    ),
    "C-17": _config(
        "field_unsupported",
        *(f"auto_mapping={word!r} (field_unsupported {index})" for index, word in ((6, "os"),)),
        "auto_mapping={'base_model_class': 'X', 'parent_librar (field_unsupported 0)",
        "megatron_core='antigravity' (field_unsupported 0)",
    ),
    "C-19": _config(
        "feature_unsupported",
        *("use_dora=True (feature_unsupported 0)", "modules_to_save=['lm_head'] (feature_unsupported 0)"),
        *("bias='NONE' (feature_unsupported 0)", "layer_replication=[[0, 1]] (feature_unsupported 1)"),
    ),
    "C-20": _config(
        "peft_type_unsupported",
        *("peft_type='IA3' (peft_type_unsupported 0)", "peft_type='EVIL' (peft_type_unsupported 1)"),
    ),
    "C-22": _config("field_unknown", "evil=True (field_unknown 0)", "__class__='os.system' (field_unknown 0)"),
    "C-22, twice": _config("duplicate_key", "r twice", "r twice, once escaped"),
}
FILE_ROWS = [Row(name, *fields) for name, fields in _ROWS.items()]
"""Rows with uploads of bad files in well-formed HTTP."""
