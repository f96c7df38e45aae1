"""Good adapters with a few things changed, as far as possible without breaking what lies around the change.

A mutant is its seed's: the same number makes the same bytes. Changes keep the file's structure, so that they reach
what is behind the first checks: the header stays JSON, offsets stay in step where they are not what is changed.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from functools import cache
from typing import Any

from bad_upload import EVIL_REGEX, Upload
from lora_files import PEFT_DEFAULTS, RawTensor, config_bytes, container, header_of, lora_tensors
from weft.adapters.base_shape import MODULE_PATHS, BaseShape

Header = dict[str, Any]
VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 4, 8, 16, 64, 65, 2**31, 2**53 + 1, 2**63, 2**64, 10**30, 0.5, 8.0, -0.0, 1e-300),
    *(1e308, float("nan"), float("inf"), "", "8", "q_proj", "a\0b", "\ud800", "x" * 5000, EVIL_REGEX, ".*", "../x"),
    *([], {}, [None], [[8]], ["q_proj"], {"q_proj": 8}, {"q_proj": 1e308}, {".*": 4}, {"": 8}, [0, 1], [[0, 2]]),
)
DTYPES = ("F32", "F16", "BF16", "F64", "I8", "U8", "BOOL", "F8_E4M3", "PICKLE", "f32", "", 4, None)
WORDS = ("model", "layers", "0", "1", "01", "-1", "99", "self_attn", "mlp", "q_proj", "gate_proj", "lm_head", "weight")
ENDS = ("lora_A", "lora_B", "lora_A.default", "bias", "base_layer", "..", "/etc/passwd", "é", "\0", "", "x" * 300)
PATTERNS = (
    *(b"\x00\x00\xc0\x7f", b"\xff\xff\xff\xff", b"\x00\x00\x80\x7f", b"\x00\x00\x80\xff", b"\x01\x00\x80\x7f"),
    *(
        b"\x00\x7c",
        b"\x00\xfc",
        b"\x01\x7e",
        b"\xff\x7f",
        b"\x00\x40\x1c\x46",
        b"\x00\x00\x00\x80",
        b"\x01\x00\x00\x00",
    ),
)
"""NaN, infinities, 10,000, minus zero and the smallest number, as they lie in F32, F16 and BF16."""


class Mutant:
    """An adapter being changed.

    Args:
        base: What it is an adapter of.
        seed: Says which adapter, and which changes.
    """

    def __init__(self, base: BaseShape, seed: int) -> None:
        self._rng = random.Random(seed)
        tensors, fields = _good(base, seed % 6)
        self._config: dict[str, Any] = dict(fields)
        self._header: Header = {name: dict(entry) for name, entry in header_of(tensors).items()}
        self._data = bytearray(b"".join(raw.data for raw in tensors.values()))
        self._length: int | None = None
        changes: tuple[tuple[Callable[[], None], int], ...] = (
            *((self._set_field, 3), (self._drop_field, 1), (self._nudge_rank, 2), (self._set_entry, 3)),
            *((self._nudge_number, 4), (self._rename, 3), (self._drop_tensor, 2), (self._swap, 2)),
            *((self._set_dtype, 2), (self._reshape, 3), (self._spoil_values, 8), (self._resize, 2)),
            *((self._set_length, 1), (self._grow, 1), (self._add_metadata, 1), (self._copy_tensor, 1)),
        )
        actions, weights = [action for action, _ in changes], [weight for _, weight in changes]
        for action in self._rng.choices(actions, weights, k=self._rng.choice((1, 1, 1, 1, 2, 2, 3, 5))):
            action()

    def upload(self) -> Upload:
        """The bytes; a few of the header are changed blindly now and then."""
        header = json.dumps({"__metadata__": {"format": "pt"}, **self._header}).encode("utf-8", "surrogatepass")
        config = json.dumps(self._config).encode("utf-8", "surrogatepass")
        return Upload(self._blur(config), container(self._blur(header), bytes(self._data), self._length))

    def _blur(self, raw: bytes) -> bytes:
        if self._rng.random() > 0.05 or not raw:
            return raw
        changed = bytearray(raw)
        at = self._rng.randrange(len(changed))
        piece = self._rng.choice((b"{", b"]", b'"', b"\\", b",", b"NaN", b"1e9", b"\xff", b"\0", b" "))
        changed[at : at + self._rng.randrange(3)] = piece
        return bytes(changed)

    def _name(self) -> str:
        return self._rng.choice(list(self._header)) if self._header else "none"

    def _entry(self) -> Header:
        entry = self._header.get(self._name())
        return entry if isinstance(entry, dict) else {}

    def _set_field(self) -> None:
        known = self._rng.random() < 0.95
        self._config[self._rng.choice(list(PEFT_DEFAULTS)) if known else "evil"] = self._rng.choice(VALUES)

    def _grow(self) -> None:
        self._config["revision"] = "x" * self._rng.choice((4000, 66_000))

    def _drop_field(self) -> None:
        self._config.pop(self._rng.choice(list(PEFT_DEFAULTS)), None)

    def _nudge_rank(self) -> None:
        field = self._rng.choice(("r", "lora_alpha"))
        if isinstance(self._config.get(field), int):
            self._config[field] += self._rng.choice((-8, -1, 1, 8, 56, 1000))
        pattern = self._rng.choice(("rank_pattern", "alpha_pattern"))
        key = self._rng.choice(("q_proj", "self_attn.q_proj", "layers.0.self_attn.q_proj", "proj", "0.mlp"))
        self._config[pattern] = {key: self._rng.choice((1, 4, 8, 16, 64, 65, 0, -1, 1.5))}

    def _set_entry(self) -> None:
        if self._rng.random() < 0.2:
            self._header[self._name()] = self._rng.choice(VALUES)
        else:
            self._entry()[self._rng.choice(("dtype", "shape", "data_offsets", "evil"))] = self._rng.choice(VALUES)

    def _nudge_number(self) -> None:
        numbers = self._entry().get(self._rng.choice(("shape", "data_offsets")))
        if isinstance(numbers, list) and numbers and all(type(number) is int for number in numbers):
            numbers[self._rng.randrange(len(numbers))] += self._rng.choice((-64, -8, -4, -1, 1, 4, 8, 2**32, 2**63))

    def _rename(self) -> None:
        name = self._name()
        parts = name.split(".")
        parts[self._rng.randrange(len(parts))] = self._rng.choice(WORDS + ENDS)
        if name in self._header:
            self._header[".".join(parts)] = self._header.pop(name)

    def _drop_tensor(self) -> None:
        """Without its bytes, so that what is left is a sound file."""
        name = self._name()
        entry = self._header.pop(name, None)
        place = entry.get("data_offsets") if isinstance(entry, dict) else None
        if isinstance(place, list) and len(place) == 2 and all(type(number) is int for number in place):
            begin, end = place
            if 0 <= begin <= end <= len(self._data):
                self._cut(begin, end)

    def _cut(self, begin: int, end: int) -> None:
        del self._data[begin:end]
        for entry in self._header.values():
            place = entry.get("data_offsets") if isinstance(entry, dict) else None
            if isinstance(place, list) and all(type(number) is int for number in place):
                entry["data_offsets"] = [number - (end - begin) if number >= end else number for number in place]

    def _swap(self) -> None:
        """Two tensors change names, or the order in the header."""
        first, second = self._name(), self._name()
        if first in self._header and second in self._header:
            self._header[first], self._header[second] = self._header[second], self._header[first]
        items = list(self._header.items())
        self._rng.shuffle(items)
        self._header = dict(items)

    def _set_dtype(self) -> None:
        self._entry()["dtype"] = self._rng.choice(DTYPES)

    def _reshape(self) -> None:
        """Another shape of as many numbers, mostly."""
        entry = self._entry()
        shape = entry.get("shape")
        if isinstance(shape, list) and len(shape) == 2 and all(type(extent) is int for extent in shape):
            rows, columns = shape
            choices = (
                [columns, rows],
                [rows * columns],
                [rows, columns, 1],
                [1, rows * columns],
                [rows // 2, columns * 2],
            )
            entry["shape"] = self._rng.choice((*choices, [rows * 2, columns], [0, columns], []))

    def _spoil_values(self) -> None:
        for _ in range(self._rng.choice((1, 1, 1, 3))):
            pattern = self._rng.choice(PATTERNS)
            at = self._rng.randrange(max(1, len(self._data) // 4)) * 4
            self._data[at : at + len(pattern)] = pattern

    def _resize(self) -> None:
        """Fewer or more bytes than the header says."""
        count = self._rng.choice((1, 4, 8, 4096))
        if self._rng.random() < 0.5:
            del self._data[len(self._data) - count :]
        else:
            self._data += bytes(count)

    def _set_length(self) -> None:
        self._length = self._rng.choice((0, 1, 7, 8, 100, 1 << 20, (1 << 20) + 1, 2**32, 2**63, 2**64 - 1))

    def _add_metadata(self) -> None:
        self._header["__metadata__"] = self._rng.choice((*VALUES, {"format": "np"}, {"format": 1}))

    def _copy_tensor(self) -> None:
        """The same matrix twice, in another spelling."""
        name = self._name()
        if name in self._header:
            self._header[name.replace(".weight", ".default.weight")] = self._header[name]


@cache
def _good(base: BaseShape, which: int) -> tuple[dict[str, RawTensor], dict[str, Any]]:
    """One of six adapters: of some modules, layers, ranks and number formats."""
    rng = random.Random(which)
    modules = rng.sample(range(len(MODULE_PATHS)), 1 + which)
    layers = range(base.num_layers) if which % 2 else [which % base.num_layers]
    rank = (2, 4, 8, 1, 16, 3)[which]
    ranks = {(layer, module): rank for layer in layers for module in modules}
    formats = (("F32",), ("F16",), ("BF16",), ("F32", "F16", "BF16"), ("BF16",), ("F32",))[which]
    return lora_tensors(base, ranks, formats), json.loads(config_bytes(r=rank, lora_alpha=2 * rank))
