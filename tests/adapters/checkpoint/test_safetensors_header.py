"""The header parser: reads what safetensors writes, refuses everything else, and never fails in another way."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.numpy import save

from counted_calls import counted_calls
from lora_files import RawTensor, base_shape, container, header_of, q_and_v, tensor, weights_bytes
from manylora.adapters.checkpoint.findings import Findings
from manylora.adapters.checkpoint.safetensors_header import (
    DTYPE_BYTES,
    MAX_HEADER_BYTES,
    MAX_TENSORS,
    TensorEntry,
    check_header,
)
from manylora.errors import AdapterError, AdapterFormatError
from manylora.strict_json import STRING, check_depth
from refusals import is_presentable, outcome

GOOD = q_and_v(base_shape())
NUMPY_DTYPES = {"F32": np.float32, "F16": np.float16}


def read_header(file: io.BytesIO, size: int) -> tuple[TensorEntry, ...]:
    findings = Findings()
    return findings.passed(findings.attempt(check_header, file, size, findings))


def read(raw: bytes) -> tuple[TensorEntry, ...]:
    return read_header(io.BytesIO(raw), len(raw))


@settings(max_examples=100, deadline=None)
@given(
    shapes=st.dictionaries(
        st.from_regex(
            r"[A-Za-z_][A-Za-z0-9_]{0,20}(\.[A-Za-z0-9_]{1,10}){0,6}", fullmatch=True
        ).filter(lambda name: name != "__metadata__"),
        st.tuples(
            st.sampled_from(sorted(NUMPY_DTYPES)),
            st.lists(st.integers(0, 5), min_size=1, max_size=3),
        ),
        min_size=1,
        max_size=6,
    ),
    metadata=st.none() | st.dictionaries(st.text(max_size=8), st.text(max_size=8), max_size=3),
)
def test_files_of_the_safetensors_library_are_read_alike(
    shapes: dict[str, tuple[str, list[int]]], metadata: dict[str, str] | None
) -> None:
    rng = np.random.default_rng(0)
    arrays = {
        n: rng.normal(size=shape).astype(NUMPY_DTYPES[dtype])
        for n, (dtype, shape) in shapes.items()
    }
    raw = save(arrays, metadata)
    header = read(raw)
    assert {entry.name for entry in header} == set(arrays)
    for entry in header:
        array = arrays[entry.name]
        assert (entry.dtype, entry.shape) == (shapes[entry.name][0], array.shape)
        assert raw[entry.start : entry.end] == array.tobytes()


def test_entries_may_stand_in_any_order() -> None:
    backwards = dict(reversed(header_of(GOOD).items()))
    assert read(weights_bytes(GOOD, backwards)) == read(weights_bytes(GOOD))


class Counted(io.BytesIO):
    """A file that counts what is read of it."""

    num_read = 0

    def read(self, size: int | None = -1, /) -> bytes:
        data = super().read(size)
        self.num_read += len(data)
        return data


def calls_to_read(num_tensors: int) -> int:
    """Function calls that reading a header of the largest size and so many tensors takes."""
    many = {f"t{index}": tensor((1,)) for index in range(num_tensors)}
    header = json.dumps(header_of(many)).encode().ljust(MAX_HEADER_BYTES)
    raw = container(header, b"".join(t.data for t in many.values()))
    file = Counted(raw)
    with counted_calls() as calls:
        entries = read_header(file, len(raw))
    assert len(entries) == num_tensors
    assert file.num_read <= MAX_HEADER_BYTES + 512
    return calls()


def test_a_header_of_the_largest_size_and_number_of_tensors_is_read_in_linear_time() -> None:
    """Each byte once, none of the tensors' own, and work in proportion to their number."""
    assert calls_to_read(MAX_TENSORS) < 2.5 * calls_to_read(MAX_TENSORS // 2)


def test_a_file_whose_length_field_looks_like_another_format_is_still_read() -> None:
    for length in (0x8B1F, 0x0280, 0x0480):
        raw = json.dumps(header_of(GOOD)).encode()
        data = b"".join(raw_tensor.data for raw_tensor in GOOD.values())
        assert len(read(container(raw.ljust(length) if length > len(raw) else raw, data))) == len(
            GOOD
        )


def test_a_size_that_does_not_belong_to_the_file_is_refused() -> None:
    raw = weights_bytes(GOOD)
    with pytest.raises(AdapterFormatError) as caught:
        read_header(io.BytesIO(raw[:100]), len(raw))
    assert caught.value.code == "weights.header_truncated"


def test_escaped_quotes_do_not_hide_brackets_nor_show_false_ones() -> None:
    check_depth(b'{"[[[[\\"[[[[":1}', 1)
    check_depth(b'"\\\\"' + b"[]" * 10, 1)
    for raw in (b'"\\\\"[[[[[', b'{"a":"b","c":[[[[]]]]}', b'"\\"[["[[[[['):
        with pytest.raises(ValueError, match="nested"):
            check_depth(raw, 3)


@settings(deadline=None)
@given(raw=st.lists(st.sampled_from([b'"', b"\\", b"[", b"]", b"a", b"\n"])).map(b"".join))
@example(b'{"' + b'\\"' * 1_000)
@example(b'"' * 1_001)
@example(b'"\\' * 1_000)
@example(b"\\" * 1_000)
def test_hostile_quoting_has_no_quote_at_which_the_scan_for_strings_fails(raw: bytes) -> None:
    """So each byte is looked at once: a failed try at each quote would look at all that follows, each time."""
    assert b'"' not in STRING.sub(b"", raw)


JSON_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-(10**30), 10**30)
    | st.floats()
    | st.text(max_size=10)
    | st.sampled_from(["F32", "F16", "BF16", "F64", "__metadata__", "\ud800", "../x"]),
    lambda below: (
        st.lists(below, max_size=4) | st.dictionaries(st.text(max_size=6), below, max_size=4)
    ),
    max_leaves=8,
)
FIELDS = ("dtype", "shape", "data_offsets", "extra")


@st.composite
def mutated_headers(draw: st.DrawFn) -> bytes:
    """The good file with a few fields, entries or names changed."""
    header: dict[str, Any] = {name: dict(fields) for name, fields in header_of(GOOD).items()}
    for _ in range(draw(st.integers(1, 3))):
        name = draw(st.sampled_from(sorted(header)))
        action = draw(st.sampled_from(["field", "entry", "rename", "drop", "nudge", "metadata"]))
        if action == "field" and isinstance(header[name], dict):
            header[name][draw(st.sampled_from(FIELDS))] = draw(JSON_VALUES)
        elif action == "entry":
            header[name] = draw(JSON_VALUES)
        elif action == "rename":
            header[draw(st.text(max_size=20))] = header.pop(name)
        elif action == "drop" and len(header) > 1:
            del header[name]
        elif action == "nudge" and isinstance(header[name], dict):
            numbers = header[name].get(draw(st.sampled_from(["shape", "data_offsets"])))
            if (
                isinstance(numbers, list)
                and numbers
                and all(isinstance(number, int) for number in numbers)
            ):
                numbers[draw(st.integers(0, len(numbers) - 1))] += draw(
                    st.sampled_from([-8, -1, 1, 8, 2**32, 2**63])
                )
        else:
            header["__metadata__"] = draw(JSON_VALUES)
    return container(
        json.dumps(header).encode(), b"".join(raw_tensor.data for raw_tensor in GOOD.values())
    )


@st.composite
def mutated_bytes(draw: st.DrawFn) -> bytes:
    """The good file with a few bytes of its head changed, put in or taken out."""
    raw = bytearray(
        weights_bytes({name: RawTensor("F32", (1,), bytes(4)) for name in list(GOOD)[:2]})
    )
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(raw) - 1))
        action = draw(st.sampled_from(["set", "insert", "cut", "truncate", "token"]))
        if action == "set":
            raw[at] = draw(st.integers(0, 255))
        elif action == "insert":
            raw[at:at] = draw(st.binary(max_size=9))
        elif action == "cut":
            del raw[at : at + draw(st.integers(1, 9))]
        elif action == "truncate":
            del raw[at:]
        else:
            raw[at:at] = draw(
                st.sampled_from(
                    [b"NaN", b"-", b"{", b"[", b"]", b"}", b'"', b",", b"1e999", b"\\u0000"]
                )
            )
        if not raw:
            break
    return bytes(raw)


@settings(max_examples=300, deadline=None)
@given(raw=mutated_headers() | mutated_bytes() | st.binary(max_size=300))
def test_a_changed_file_is_refused_in_our_words_or_sound_for_the_safetensors_library_too(
    raw: bytes, tmp_path_factory: pytest.TempPathFactory
) -> None:
    header = outcome(lambda: read(raw))
    if isinstance(header, AdapterError):
        assert is_presentable(header, "weights.")
        return
    assert header[0].start == 8 + int.from_bytes(raw[:8], "little")
    assert header[-1].end == len(raw)
    assert all(entry.dtype in DTYPE_BYTES for entry in header)
    path: Path = tmp_path_factory.getbasetemp() / "accepted.safetensors"
    path.write_bytes(raw)
    with safe_open(path, framework="pt") as library:
        assert set(library.keys()) == {entry.name for entry in header}
