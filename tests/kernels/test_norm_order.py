"""A norm that adds what adapters yield sums in the order of one that does not: a base row has the same bits in both."""

from __future__ import annotations

import re
from typing import Any

import pytest

from implementations import INTERPRETS

pytestmark = pytest.mark.skipif(INTERPRETS, reason="the interpreter compiles nothing")
pytest.importorskip("triton", reason="needs Triton, which is there on Linux")
SIZES = ("heads", "x_row", "x_head", "layer", "num_tokens")
DELTA = ("*fp32", "*bf16", "*i32", "*i32", "*fp32", "i32", "i32")
"""Planes, arena, offsets, ranks, scalings, number of layers and of modules."""


def sum_layouts(kernel: Any, constants: dict[str, object], arch: int) -> list[str]:
    """How the threads of a compiled kernel hold what it sums up; that decides the order of the sum."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.compiler import compile as compile_kernel

    signature: dict[str, object] = {}
    aligned: dict[tuple[int, ...], object] = {}
    for index, name in enumerate(kernel.arg_names):
        is_wide = "int64" in kernel.params[index].annotation or name in {"x_row", "x_head"}
        pointer = "*i32" if name in {"tiles", "counters"} else "*bf16"
        scalar = {"eps": "fp32", "delta": DELTA} | dict.fromkeys(SIZES, "i64" if is_wide else "i32")
        signature[name] = "constexpr" if name in constants else scalar.get(name, pointer)
        if signature[name] in ("*bf16", "i64"):
            aligned[index,] = [["tt.divisibility", 16]]
        if name == "delta":
            aligned[index, 1] = [["tt.divisibility", 16]]
    places = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    source = ASTSource(fn=kernel, signature=signature, constexprs=places, attrs=aligned)
    options = {"num_warps": 8, "num_stages": 2}
    text = compile_kernel(source, target=GPUTarget("cuda", arch, 32), options=options).asm["ttgir"]
    layouts = dict(re.findall(r"^#(\w+) = (.*)$", text, re.MULTILINE))
    sums = re.findall(r'"tt\.reduce"\(.*?\}\) : \((tensor<\w+), #(\w+)>\)', text, re.DOTALL)
    return [f"{shape} {layouts[name]}" for shape, name in sums]


@pytest.mark.slow
@pytest.mark.parametrize("arch", [80, 90, 100])
def test_a_norm_with_a_delta_sums_in_the_same_order_as_one_without(arch: int) -> None:
    from manylora.kernels.triton import rows

    size = {"N": 4096, "BLOCK": 4096}
    alone = sum_layouts(rows.rms_norm_kernel, {**size, "ADD": True}, arch)
    site = {"BM": 16, "SITE": (1, 128, 8, 4, 16, False, 0), "BN": 256}
    assert alone == sum_layouts(rows.expand_add_norm_kernel, {**size, **site}, arch)
    assert len(alone) == 1
