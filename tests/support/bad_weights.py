"""Weights of bad uploads, with a good config: files that are no safetensors, and sound ones that are no adapter."""

from __future__ import annotations

import gzip
import io
import pickle
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from bad_upload import BadUpload, MaliciousPickle, Upload
from lora_files import (
    RawTensor,
    config_bytes,
    container,
    header_of,
    lora_name,
    q_and_v,
    tensor,
    weights_bytes,
)
from manylora.adapters.base_shape import BaseShape

Q = "self_attn.q_proj"


def container_cases(base: BaseShape) -> Iterator[BadUpload]:
    """Files that are not sound safetensors."""
    good = weights_bytes(q_and_v(base))
    for name, code, weights in [*_lengths(good), *_other_formats(), *_headers(), *_entries(base)]:
        yield _case(f"container: {name}", code, weights)
    huge = (
        ("a million empty tensors", "weights.header_too_large", partial(_many_tensors, 1_000_000)),
        ("99 MB of spaces", "weights.header_too_large", partial(bytes.__mul__, b" ", 99_000_000)),
        ("9,000 empty tensors", "weights.too_many_tensors", partial(_many_tensors, 9000)),
    )
    for name, code, header in huge:
        yield BadUpload(f"container: {name}", code, partial(_with_header, header))


def _with_header(make: Callable[[], bytes]) -> Upload:
    return Upload(config_bytes(), container(make()))


def _many_tensors(count: int) -> bytes:
    return (
        b"{"
        + b",".join(
            b'"t%07d":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}' % i for i in range(count)
        )
        + b"}"
    )


def _lengths(good: bytes) -> list[tuple[str, str, bytes]]:
    return [
        ("empty file", "weights.header_truncated", b""),
        ("seven bytes", "weights.header_truncated", good[:7]),
        ("eight bytes", "weights.header_truncated", good[:8]),
        ("cut inside the header", "weights.header_truncated", good[:60]),
        ("length beyond the file", "weights.header_truncated", container(b"{}", length=1000)),
        ("length one too large", "weights.header_truncated", container(b"{}", length=3)),
        ("length 2**64-1", "weights.header_too_large", container(b"{}", length=2**64 - 1)),
        (
            "length one over the limit",
            "weights.header_too_large",
            container(b"{}", length=(1 << 20) + 1),
        ),
        ("length 0", "weights.header_invalid", container(b"")),
        ("length 0 before a good file", "weights.header_invalid", bytes(8) + good),
        ("truncated body", "weights.truncated", good[:-1]),
        ("one byte after the end", "weights.trailing_bytes", good + b"\0"),
        ("a zip after the end", "weights.trailing_bytes", good + _zip()),
    ]


def _zip() -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("../../PWNED", b"x")
    return buffer.getvalue()


def _other_formats() -> list[tuple[str, str, bytes]]:
    code = "weights.not_safetensors"
    formats: list[tuple[str, bytes]] = [
        *((f"pickle protocol {p}", pickle.dumps(MaliciousPickle(), protocol=p)) for p in range(6)),
        ("zip", _zip()),
        ("empty zip", b"PK\x05\x06" + bytes(18)),
        ("tar", tarfile.TarInfo("x").tobuf() + bytes(1024)),
        ("gzip", gzip.compress(b"x" * 100, mtime=0)),
        ("gzip of today", gzip.compress(b"x" * 100, mtime=1_800_000_000)),
        ("7z", b"7z\xbc\xaf\x27\x1c\0\4" + bytes(64)),
        ("GGUF", b"GGUF\3\0\0\0" + bytes(64)),
        ("HDF5", b"\x89HDF\r\n\x1a\n" + bytes(64)),
        ("numpy", b"\x93NUMPY\1\0v\0{'descr': '<f4'}" + bytes(64)),
        ("ELF", b"\x7fELF\2\1\1" + bytes(64)),
        ("Git LFS pointer", b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n"),
        ("the config as weights", config_bytes()),
        ("an HTML page", b"<!DOCTYPE html><html></html>"),
    ]
    return [(name, code, weights) for name, weights in formats]


def _headers() -> list[tuple[str, str, bytes]]:
    code = "weights.header_invalid"
    one = '{"dtype":"F32","shape":[1],"data_offsets":[0,4]}'
    texts: list[tuple[str, bytes]] = [
        ("not UTF-8", b'{"\xff\xfe":1}'),
        ("UTF-16", '{"a":1}'.encode("utf-16")),
        ("not JSON", b"{nonsense}"),
        ("JSON cut short", b'{"a":'),
        ("two JSON values", b"{}{}"),
        ("JSON list", b"[1]"),
        ("JSON string", b'"{}"'),
        ("leading space", b" {}"),
        ("byte order mark", b"\xef\xbb\xbf{}"),
        ("nested lists", b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}"),
        ("nested objects", b'{"a":' * 50_000 + b"1" + b"}" * 50_000),
        ("a quote without end", b'{"' + b'\\"' * 400_000),
        ("a long number", b'{"a":' + b"9" * 1_000_000 + b"}"),
        ("a long fraction", b'{"a":0.' + b"9" * 1_000_000 + b"}"),
        ("NaN", b'{"a":NaN}'),
        ("duplicate names", f'{{"a":{one},"a":{one}}}'.encode()),
        ("names equal after escapes", f'{{"a":{one},"\\u0061":{one}}}'.encode()),
        (
            "duplicate keys in an entry",
            b'{"a":{"dtype":"F32","dtype":"F32","shape":[1],"data_offsets":[0,4]}}',
        ),
        ("metadata is a list", b'{"__metadata__":[]}'),
        ("metadata holds a number", b'{"__metadata__":{"format":1}}'),
        ("an entry is a number", b'{"a":1}'),
        ("an entry without shape", b'{"a":{"dtype":"F32","data_offsets":[0,4]}}'),
        (
            "an entry with a fourth key",
            b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4],"x":1}}',
        ),
    ]
    empty = [("no tensors", b"{}"), ("only metadata", b'{"__metadata__":{"format":"pt"}}')]
    return [
        *((f"header: {name}", code, container(text, bytes(4))) for name, text in texts),
        *((f"header: {name}", "weights.empty", container(text)) for name, text in empty),
    ]


def _entries(base: BaseShape) -> Iterator[tuple[str, str, bytes]]:
    """The good file with the second tensor's header entry changed."""
    tensors = q_and_v(base)
    header = header_of(tensors)
    second = list(header)[1]
    start, end = header[second]["data_offsets"]
    rows, columns = header[second]["shape"]
    offsets: list[tuple[str, Any]] = [
        ("overlap", [start - 4, end]),
        ("hole", [start + 4, end]),
        ("end before start", [end, start]),
        ("negative start", [-4, end]),
        ("start beyond 2**64", [2**64, 2**64 + 4]),
        ("three offsets", [start, end, 0]),
        ("offsets are strings", [str(start), str(end)]),
        ("offsets are true and false", [False, True]),
        ("offsets are floats", [float(start), float(end)]),
        ("offsets are null", None),
    ]
    shapes: list[tuple[str, Any]] = [
        ("shape says more than the bytes", [rows + 1, columns]),
        ("shape says less than the bytes", [1, 1]),
        ("shape overflows 64 bits", [2**32, 2**32]),
        ("shape with negative extents", [-rows, -columns]),
        ("shape with true", [True, columns]),
        ("shape with a float", [float(rows), float(columns)]),
        ("shape is null", None),
        ("shape of 100 dimensions", [1] * 100),
    ]
    dtypes = (
        "PICKLE",
        "I8",
        "U8",
        "BOOL",
        "F8_E4M3",
        "I32",
        "I64",
        "F64",
        "f32",
        "",
        None,
        4,
        ["F32"],
    )
    changes: list[tuple[str, str, str, Any]] = [
        *((name, "offset_invalid", "data_offsets", value) for name, value in offsets),
        *((name, "shape_invalid", "shape", value) for name, value in shapes),
        *((f"dtype {dtype!r}", "dtype_unsupported", "dtype", dtype) for dtype in dtypes),
    ]
    for name, code, field, value in changes:
        changed = {**header, second: {**header[second], field: value}}
        yield name, f"weights.{code}", weights_bytes(tensors, changed)


def meaning_cases(base: BaseShape) -> Iterator[BadUpload]:
    """Sound safetensors files that are no adapter for the base."""
    yield from _names(base)
    first_a, first_b = lora_name(0, Q, "A"), lora_name(0, Q, "B")
    width_in, width_out = base.modules[0].in_features, base.modules[0].out_features
    values = [
        ("NaN", "weights.non_finite", float("nan")),
        ("infinity", "weights.non_finite", float("inf")),
        ("minus infinity", "weights.non_finite", -float("inf")),
        ("-20000", "weights.value_too_large", -2e4),
    ]
    changes: list[tuple[str, str, dict[str, RawTensor]]] = [
        ("scalars", "weights.shape_invalid", {first_a: tensor(()), first_b: tensor(())}),
        ("one dimension", "weights.shape_invalid", {first_a: tensor((8 * width_in,))}),
        ("three dimensions", "weights.shape_invalid", {first_a: tensor((8, width_in, 1))}),
        (
            "rank 0",
            "weights.shape_invalid",
            {first_a: tensor((0, width_in)), first_b: tensor((width_out, 0))},
        ),
        (
            "empty tensors of ZeRO-3",
            "weights.shape_invalid",
            {first_a: tensor((0,)), first_b: tensor((0,))},
        ),
        ("A too wide", "weights.shape_mismatch", {first_a: tensor((8, width_in + 8))}),
        ("B too tall", "weights.shape_mismatch", {first_b: tensor((width_out + 8, 8))}),
        ("A transposed", "weights.shape_mismatch", {first_a: tensor((width_in, 8))}),
        ("A of another rank", "weights.rank_mismatch", {first_a: tensor((4, width_in))}),
        ("B of another rank", "weights.rank_mismatch", {first_b: tensor((width_out, 16))}),
        (
            "both of rank 16",
            "weights.rank_mismatch",
            {first_a: tensor((16, width_in)), first_b: tensor((width_out, 16))},
        ),
    ]
    for dtype in ("F32", "F16", "BF16"):
        changes += [
            (f"{name} in B as {dtype}", code, {first_b: _spoilt(width_out, dtype, value)})
            for name, code, value in values
        ]
    for name, code, change in changes:
        yield _case(f"meaning: {name}", code, weights_bytes({**q_and_v(base), **change}))
    for part, missing in (("A", first_b), ("B", first_a)):
        alone = {name: raw for name, raw in q_and_v(base).items() if name != missing}
        yield _case(
            f"meaning: {part} without its partner", "weights.pair_incomplete", weights_bytes(alone)
        )


def _spoilt(rows: int, dtype: str, value: float) -> RawTensor:
    """A B matrix whose last number is `value`."""
    good, bad = tensor((rows, 8), dtype), tensor((1,), dtype, value)
    return replace(good, data=good.data[: -len(bad.data)] + bad.data)


def _names(base: BaseShape) -> Iterator[BadUpload]:
    not_allowed = "weights.tensor_not_allowed"
    layer = "base_model.model.model.layers.0"
    names = [
        ("path traversal", "weights.name_invalid", "../../etc/passwd"),
        ("empty name", "weights.name_invalid", ""),
        ("name of 64 KB", "weights.name_invalid", "a" * 65536),
        ("name of 257 characters", "weights.name_invalid", "a" * 257),
        ("NUL in a name", "weights.name_invalid", "a\0b"),
        ("newline in a name", "weights.name_invalid", "a\nlevel=ERROR"),
        ("letters beyond ASCII", "weights.name_invalid", "base_model.modél.q"),
        ("lone surrogate", "weights.name_invalid", "a\ud800"),
        ("two dots", "weights.name_invalid", f"{layer}..self_attn.q_proj.lora_A.weight"),
        ("the embedding", not_allowed, "base_model.model.model.embed_tokens.weight"),
        ("a base weight", not_allowed, f"{layer}.self_attn.q_proj.weight"),
        ("a norm", not_allowed, f"{layer}.input_layernorm.weight"),
        ("unknown module", not_allowed, f"{layer}.self_attn.evil.lora_A.weight"),
        ("unknown module without parent", not_allowed, "evil"),
        (
            "token deltas",
            not_allowed,
            "base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta",
        ),
        ("a bias of B", not_allowed, f"{layer}.self_attn.q_proj.lora_B.bias"),
        ("module of another parent", not_allowed, f"{layer}.mlp.q_proj.lora_A.weight"),
        ("layer beyond the base", not_allowed, lora_name(base.num_layers, Q, "A")),
        ("layer -1", not_allowed, lora_name(-1, Q, "A")),
        ("layer 00", not_allowed, f"{layer}0.self_attn.q_proj.lora_A.weight"),
        ("no base_model prefix", not_allowed, "model.layers.0.mlp.up_proj.lora_A.weight"),
        ("another adapter's name", not_allowed, f"{layer}.mlp.up_proj.lora_A.evil.weight"),
        ("default twice", not_allowed, f"{layer}.mlp.up_proj.lora_A.default.default.weight"),
        ("wrapped by no wrapper", not_allowed, f"_orig_module.{layer}.mlp.up_proj.lora_A.weight"),
        ("lower-case lora_a", not_allowed, f"{layer}.mlp.up_proj.lora_a.weight"),
        ("lora_C", not_allowed, f"{layer}.mlp.up_proj.lora_C.weight"),
        ("a trailing dot", not_allowed, f"{layer}.mlp.up_proj.lora_A.weight."),
        (
            "a twin with default",
            "weights.duplicate_tensor",
            f"{layer}.self_attn.q_proj.lora_A.default.weight",
        ),
        (
            "a twin with _orig_mod",
            "weights.duplicate_tensor",
            f"_orig_mod.{layer}.self_attn.q_proj.lora_A.weight",
        ),
    ]
    extra = tensor((8, base.modules[0].in_features))
    for name, code, tensor_name in names:
        yield _case(f"name: {name}", code, weights_bytes({**q_and_v(base), tensor_name: extra}))


def _case(name: str, code: str, weights: bytes) -> BadUpload:
    return BadUpload(name, code, partial(Upload, config_bytes(), weights))
