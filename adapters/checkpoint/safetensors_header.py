"""A bounded reader of safetensors headers, for files that may be hostile.

Reads the 8-byte length and at most 1 MiB of JSON. Refuses everything that a LoRA file does not need: more than 8,192
tensors, odd names, dtypes other than F32, F16 and BF16, gaps, overlaps and trailing bytes. Knows nothing of models.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from typing import BinaryIO, NoReturn

from manylora.adapters.checkpoint.findings import Findings
from manylora.errors import AdapterFormatError, AdapterIncompatibleError
from manylora.strict_json import MAX_INT, JsonRefusedError, named, parse, shown

LENGTH_BYTES = 8
"""Bytes of the length at the start of a file, which the header follows."""
MAX_HEADER_BYTES = 1 << 20
MAX_TENSORS = 8192
MAX_NAME_LENGTH = 256
MAX_DIMENSIONS = 8
DTYPE_BYTES = {"F32": 4, "F16": 2, "BF16": 2}
"""Bytes per element, by dtype that is read."""

_MAX_DEPTH = 4
_NAME = re.compile(rf"[A-Za-z0-9_][A-Za-z0-9_.-]{{0,{MAX_NAME_LENGTH - 1}}}")
_MAGIC_BYTES = 512
_TORCH_SAVE = "a zip archive, as torch.save writes"
_LFS_POINTER = "a Git LFS pointer, not the file it points to"
_PICKLED = "a Python pickle"
CONVERT = (
    "Pickles are never read here. Where you trust the file, save the adapter with PEFT's "
    'save_pretrained(..., safe_serialization=True), or convert it: python -c "from torch import load; from '
    "safetensors.torch import save_file; save_file({k: v.contiguous() for k, v in load('adapter_model.bin', "
    "weights_only=True, map_location='cpu').items()}, 'adapter_model.safetensors')\""
)
_TEXT = "text, perhaps the config or a page of a website"
_MAGICS = (
    (rb"PK\x03\x04", _TORCH_SAVE),
    (rb"PK\x05\x06", "an empty zip archive"),
    (rb"GGUF", "a GGUF file"),
    (rb"\x1f\x8b", "a gzip file"),
    (rb"7z\xbc\xaf\x27\x1c", "a 7z archive"),
    (rb"BZh", "a bzip2 file"),
    (rb"\xfd7zXZ", "an xz file"),
    (rb"\x28\xb5\x2f\xfd", "a zstd file"),
    (rb"Rar!", "a rar archive"),
    (rb"\x89HDF", "an HDF5 file"),
    (rb"\x93NUMPY", "a numpy file"),
    (rb"\x7fELF", "an executable"),
    (rb"version https://git-lfs", _LFS_POINTER),
    (rb"\x80[\x02-\x05][^\x00]", _PICKLED),
    (rb".{257}ustar", "a tar archive"),
    (rb"[\t\n\r\x20-\x7e]{8}", _TEXT),
)
"""First bytes of files of other formats, as patterns; the first that matches counts."""
_PULL = "Run `git lfs pull`, and upload the file that it fetches."
_HINT = "Save the adapter with PEFT's save_pretrained, which writes adapter_model.safetensors, and upload that file."


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor of a file."""

    name: str
    dtype: str
    """F32, F16 or BF16, little-endian. A file with another dtype is refused."""
    shape: tuple[int, ...]
    start: int
    """First byte, counted from the start of the file."""
    end: int
    """One past the last byte, counted from the start of the file."""


def check_header(file: BinaryIO, file_size: int, findings: Findings) -> tuple[TensorEntry, ...]:
    """Read and check the header, and note dtypes that are not served. Values are not checked.

    Args:
        file: The file, seekable.
        file_size: Bytes of the whole file.
        findings: Gets dtypes that are not served (weights.dtype_unsupported).

    Returns:
        The tensors in the order of their bytes. Together they fill the file to its end.

    Raises:
        AdapterFormatError: The file is not a sound safetensors file; codes `weights.*`.
    """
    file.seek(0)
    length = _header_length(file.read(_MAGIC_BYTES), file_size)
    file.seek(LENGTH_BYTES)
    raw = file.read(length)
    if len(raw) != length:
        message = (
            f"The header should have {length} bytes, but the file ends after {len(raw)} of them."
        )
        _refuse("header_truncated", message)
    data_start = LENGTH_BYTES + length
    tensors = [_entry(name, fields, findings) for name, fields in _parse_tensors(raw).items()]
    tensors.sort(key=lambda tensor: (tensor.start, tensor.end))
    _check_contiguous(tensors, file_size - data_start)
    for tensor in tensors:
        if tensor.dtype in DTYPE_BYTES:
            _check_bytes(tensor)
    return tuple(
        replace(tensor, start=data_start + tensor.start, end=data_start + tensor.end)
        for tensor in tensors
    )


def header_bytes(first: bytes | bytearray, file_size: int) -> int:
    """Length of a file up to the end of its header, from its first 8 bytes; at most what `check_header` reads."""
    length = int.from_bytes(first[:LENGTH_BYTES], "little")
    return min(LENGTH_BYTES + min(length, MAX_HEADER_BYTES), file_size)


def _header_length(head: bytes, file_size: int) -> int:
    if file_size < LENGTH_BYTES or len(head) < LENGTH_BYTES:
        _refuse(
            "header_truncated", f"The file has {file_size} bytes; a safetensors file starts with 8."
        )
    length = int.from_bytes(head[:LENGTH_BYTES], "little")
    if length > MAX_HEADER_BYTES or head[LENGTH_BYTES : LENGTH_BYTES + 1] != b"{":
        _refuse_other_formats(head)
    if length > MAX_HEADER_BYTES:
        _refuse(
            "header_too_large",
            f"The header should have {length} bytes; at most {MAX_HEADER_BYTES} are read.",
        )
    if length > file_size - LENGTH_BYTES:
        _refuse(
            "header_truncated",
            f"The header should have {length} bytes, but the whole file has {file_size}.",
        )
    return length


def _refuse_other_formats(head: bytes) -> None:
    kind = next((kind for magic, kind in _MAGICS if re.match(magic, head, re.DOTALL)), None)
    if kind is not None:
        hints = {_TORCH_SAVE: CONVERT, _PICKLED: CONVERT, _LFS_POINTER: _PULL}
        _refuse(
            "not_safetensors",
            f"The file is {kind}; only safetensors files are read.",
            hints.get(kind, _HINT),
        )


def _parse_tensors(raw: bytes) -> dict[str, object]:
    if not raw.startswith(b"{"):
        _refuse("header_invalid", "The header must be a JSON object that starts with '{'.")
    try:
        document = parse(raw, _MAX_DEPTH)
    except JsonRefusedError as error:
        _refuse("header_invalid", f"The header is not acceptable JSON: {error}.")
    if not isinstance(document, dict):
        _refuse("header_invalid", "The header must be a JSON object.")
    metadata = document.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(
        isinstance(value, str) for value in metadata.values()
    ):
        _refuse("header_invalid", "The header's __metadata__ must map names to strings.")
    if len(document) > MAX_TENSORS:
        _refuse(
            "too_many_tensors",
            f"The header lists {len(document)} tensors; at most {MAX_TENSORS} are read.",
        )
    if not document:
        cause = "Training with DeepSpeed ZeRO-3 saves such files unless the parameters are gathered first."
        hint = "Save again with stage3_gather_16bit_weights_on_model_save, or a newer transformers."
        _refuse("empty", f"The file holds no tensors. {cause}", hint)
    return document


def _entry(name: str, fields: object, findings: Findings) -> TensorEntry:
    if not _NAME.fullmatch(name) or ".." in name:
        expected = f"1 to {MAX_NAME_LENGTH} letters, digits, '_', '-' and single dots"
        _refuse(
            "name_invalid", f"Tensor names have {expected}, got {shown(name)}.", param=named(name)
        )
    if not isinstance(fields, dict) or fields.keys() != {"dtype", "shape", "data_offsets"}:
        _refuse(
            "header_invalid",
            f"Tensor {name} must have exactly dtype, shape and data_offsets.",
            param=name,
        )
    dtype = fields["dtype"]
    shape = fields["shape"]
    offsets = fields["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BYTES:
        message = (
            f"Tensor {name} has dtype {shown(dtype)}; expected one of {', '.join(DTYPE_BYTES)}."
        )
        code = "weights.dtype_unsupported"
        hint = "Cast the adapter to float16, bfloat16 or float32 before saving it."
        findings.note(AdapterIncompatibleError(message, code=code, param=name, hint=hint))
    if not _are_sizes(shape) or len(shape) > MAX_DIMENSIONS:
        expected = f"at most {MAX_DIMENSIONS} whole numbers from 0"
        _refuse(
            "shape_invalid",
            f"Tensor {name}: expected a shape of {expected}, got {shown(shape)}.",
            param=name,
        )
    if not _are_sizes(offsets) or len(offsets) != 2 or offsets[1] < offsets[0]:
        message = f"Tensor {name}: expected data_offsets [start, end], got {shown(offsets)}."
        _refuse("offset_invalid", message, param=name)
    return TensorEntry(name, str(dtype), tuple(shape), offsets[0], offsets[1])


def _are_sizes(values: object) -> bool:
    return isinstance(values, list) and all(
        type(value) is int and 0 <= value <= MAX_INT for value in values
    )


def _check_contiguous(tensors: list[TensorEntry], data_bytes: int) -> None:
    expected = 0
    for tensor in tensors:
        if tensor.start != expected:
            found = f"Tensor {tensor.name} starts at byte {tensor.start} of the data, expected {expected}"
            message = f"{found}: tensors must follow each other without gap or overlap."
            _refuse("offset_invalid", message, param=tensor.name)
        expected = tensor.end
    if expected > data_bytes:
        hint = (
            "Upload the file again; if it was cut where it was saved, save the adapter again first."
        )
        _refuse(
            "truncated",
            f"The tensors need {expected} bytes of data, the file has {data_bytes}.",
            hint,
        )
    if expected < data_bytes:
        _refuse(
            "trailing_bytes",
            f"The tensors end after {expected} bytes of data, the file has {data_bytes}.",
        )


def _check_bytes(tensor: TensorEntry) -> None:
    expected = DTYPE_BYTES[tensor.dtype] * math.prod(tensor.shape)
    if expected != tensor.end - tensor.start:
        takes = f"{tensor.dtype} of shape {list(tensor.shape)} takes {expected} bytes"
        message = (
            f"Tensor {tensor.name}: {takes}, its data_offsets span {tensor.end - tensor.start}."
        )
        _refuse("shape_invalid", message, param=tensor.name)


def _refuse(code: str, message: str, hint: str = _HINT, param: str | None = None) -> NoReturn:
    raise AdapterFormatError(message, code=f"weights.{code}", param=param, hint=hint)
