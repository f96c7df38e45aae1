"""Good adapters with a few things changed, as far as possible without breaking what lies around the change.

Most changes keep the file's structure, so that they reach what is behind the first checks: the header stays JSON, and
offsets stay in step where they are not what is changed.
"""

from __future__ import annotations

import json
import random
from dataclasses import replace
from functools import cache
from typing import Any

from bad_upload import EVIL_REGEX, Upload
from lora_files import RawTensor, config_bytes, container, header_of, lora_tensors
from manylora.adapters.base_shape import MODULE_PATHS, BaseShape

VALUES: tuple[Any, ...] = (
    *(
        None,
        True,
        False,
        0,
        1,
        -1,
        4,
        8,
        16,
        64,
        65,
        2**31,
        2**53 + 1,
        2**63,
        2**64,
        10**30,
        0.5,
        8.0,
        -0.0,
        1e-300,
    ),
    *(
        1e308,
        float("nan"),
        float("inf"),
        "",
        "8",
        "q_proj",
        "a\0b",
        "\ud800",
        "x" * 5000,
        EVIL_REGEX,
        ".*",
        "../x",
    ),
    *(
        [],
        {},
        [None],
        [[8]],
        ["q_proj"],
        {"q_proj": 8},
        {"q_proj": 1e308},
        {".*": 4},
        {"": 8},
        [0, 1],
        [[0, 2]],
    ),
    *("F32", "F16", "BF16", "F64", "I8", "U8", "BOOL", "F8_E4M3", "PICKLE", "f32", "x" * 66_000),
)
STEPS = (-1000, -64, -8, -4, -1, 1, 4, 8, 56, 2**32, 2**63)
WORDS = (
    *(
        "model",
        "layers",
        "0",
        "1",
        "01",
        "-1",
        "99",
        "self_attn",
        "mlp",
        "q_proj",
        "gate_proj",
        "lm_head",
        "weight",
    ),
    *(
        "lora_A",
        "lora_B",
        "lora_A.default",
        "bias",
        "base_layer",
        "..",
        "/etc/passwd",
        "é",
        "\0",
        "",
        "x" * 300,
    ),
)
NUMBERS = (
    *(
        b"\x00\x00\xc0\x7f",
        b"\xff\xff\xff\xff",
        b"\x00\x00\x80\x7f",
        b"\x00\x00\x80\xff",
        b"\x01\x00\x80\x7f",
    ),
    *(b"\x00\x7c", b"\x00\xfc", b"\x01\x7e", b"\xff\x7f"),
    *(b"\x00\x40\x1c\x46", b"\x00\x00\x00\x80", b"\x01\x00\x00\x00"),
)
"""NaN, infinities, 10,000, minus zero and the smallest number, as they lie in F32, F16 and BF16."""
PIECES = (b"{", b"]", b'"', b"\\", b",", b"NaN", b"1e9", b"\xff", b"\0", b" ")
LENGTHS = (0, 1, 7, 8, 100, 1 << 20, (1 << 20) + 1, 2**32, 2**63, 2**64 - 1)
MODULES = ("q_proj", "self_attn.q_proj", "layers.0.self_attn.q_proj", "proj", "0.mlp")
KINDS = {"config": 6, "ranks": 4, "tensors": 18, "header": 9, "size": 2, "length": 1}
"""What is changed, and how often."""


def mutant(base: BaseShape, seed: int) -> Upload:
    """An adapter of the base with one to five changes; the same number makes the same bytes."""
    rng = random.Random(seed)
    tensors, fields = _good(base, seed % 6)
    tensors, config = dict(tensors), json.loads(fields)
    kinds = rng.choices(list(KINDS), list(KINDS.values()), k=rng.choice((1, 1, 1, 1, 2, 2, 3, 5)))
    for _ in range(kinds.count("ranks")):
        config[rng.choice(("r", "lora_alpha"))] += rng.choice(STEPS[:-2])
        config[rng.choice(("rank_pattern", "alpha_pattern"))] = {
            rng.choice(MODULES): rng.choice((1, 4, 8, 16, 64, 65, 0, -1, 1.5))
        }
    for _ in range(kinds.count("config")):
        _change_tree(rng, config)
    for _ in range(kinds.count("tensors")):
        if tensors:
            _change_tensors(rng, tensors)
    header = {"__metadata__": {"format": "pt"}, **header_of(tensors)}
    for _ in range(kinds.count("header")):
        _change_tree(rng, header)
    data = b"".join(raw.data for raw in tensors.values())
    for _ in range(kinds.count("size")):
        count = rng.choice((1, 4, 8, 4096))
        data = data[:-count] if rng.random() < 0.5 else data + bytes(count)
    length = rng.choice(LENGTHS) if "length" in kinds else None
    return Upload(_written(rng, config), container(_written(rng, header), data, length))


def _change_tree(rng: random.Random, node: Any) -> None:
    """Change something at a random place of JSON."""
    key = rng.choice(list(node) if isinstance(node, dict) else range(len(node)))
    how = rng.random()
    if isinstance(node[key], (dict, list)) and node[key] and how < 0.85:
        _change_tree(rng, node[key])
    elif type(node[key]) is int and how < 0.5:
        node[key] += rng.choice(STEPS)
    elif isinstance(node, dict) and how < 0.1:
        del node[key]
    elif isinstance(node, dict) and how < 0.2:
        node[_renamed(rng, key)] = node.pop(key)
    else:
        node[key] = rng.choice(VALUES)


def _change_tensors(rng: random.Random, tensors: dict[str, RawTensor]) -> None:
    """Change one tensor, or where it stands; the header will say so."""
    name, other = rng.choices(list(tensors), k=2)
    raw = tensors[name]
    match rng.choices(("numbers", "shape", "name", "drop", "swap", "twin"), (8, 3, 3, 2, 2, 1))[0]:
        case "numbers":
            data = bytearray(raw.data)
            for _ in range(rng.choice((1, 1, 1, 3))):
                number = rng.choice(NUMBERS)
                at = rng.randrange(len(data) // 4) * 4
                data[at : at + len(number)] = number
            tensors[name] = replace(raw, data=bytes(data[: len(raw.data)]))
        case "shape":
            rows, columns = raw.shape if len(raw.shape) == 2 else (1, 8)
            shapes = [(columns, rows), (rows * columns,), (rows, columns, 1), (1, rows * columns)]
            shapes += [(rows // 2, columns * 2), (rows * 2, columns), (0, columns), ()]
            tensors[name] = replace(raw, shape=rng.choice(shapes))
        case "name":
            tensors[_renamed(rng, name)] = tensors.pop(name)
        case "drop":
            del tensors[name]
        case "swap":
            tensors[name], tensors[other] = tensors[other], raw
        case _:
            tensors[name.replace(".weight", ".default.weight")] = raw


def _renamed(rng: random.Random, name: str) -> str:
    parts = name.split(".")
    parts[rng.randrange(len(parts))] = rng.choice(WORDS)
    return ".".join(parts)


def _written(rng: random.Random, tree: dict[str, Any]) -> bytes:
    """The JSON, with a byte changed blindly now and then."""
    raw = json.dumps(tree).encode("utf-8", "surrogatepass")
    at = rng.randrange(len(raw))
    return (
        raw[:at] + rng.choice(PIECES) + raw[at + rng.randrange(3) :] if rng.random() < 0.05 else raw
    )


@cache
def _good(base: BaseShape, which: int) -> tuple[dict[str, RawTensor], bytes]:
    """One of six adapters: of some modules, layers, ranks and number formats."""
    rng = random.Random(which)
    modules = rng.sample(range(len(MODULE_PATHS)), 1 + which)
    layers = range(base.num_layers) if which % 2 else [which % base.num_layers]
    rank = (2, 4, 8, 1, 16, 3)[which]
    ranks = {(layer, module): rank for layer in layers for module in modules}
    formats = (("F32",), ("F16",), ("BF16",), ("F32", "F16", "BF16"), ("BF16",), ("F32",))[which]
    return lora_tensors(base, ranks, formats), config_bytes(r=rank, lora_alpha=2 * rank)
