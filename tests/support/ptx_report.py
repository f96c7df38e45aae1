"""Compiles the Triton kernels without a GPU and prints what came of it: `ptx_report.py ARCHITECTURE [KIND...] [--all]`.

A program, not to be imported: it needs a process in which TRITON_INTERPRET is not set. ARCHITECTURE is 80, 90 or 100,
KIND a key of `KINDS` (all of them if none is given). Prints one JSON object, variant -> counts of instructions, and
registers, bytes of stack and bytes of shared memory. Without --all, it leaves out the variants that are minor.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from weft.kernels.triton import attention as attention_triton
from weft.kernels.triton import rows as rows_triton
from weft.kernels.triton import sampling as sampling_triton
from weft.kernels.triton import sgmv as sgmv_triton

PATTERNS = {
    "async_16": r"cp\.async\.c[ag]\.shared\.global\S* .*, 0x10\b",
    "async_narrow": r"cp\.async\.ca\.shared\.global\S* .*, 0x[48]\b",
    "load_16_bytes": r"ld\.global\S*\.(?:v4\.b32|v2\.b64)\b",
    "load_2_bytes": r"ld\.global\S*\.[bu]16\b",
    "store_16_bytes": r"st\.global\S*\.(?:v4\.b32|v2\.b64)\b",
    "store_2_bytes": r"st\.global\S*\.[bu]16\b",
    "tensor_core": r"mma\.sync|wgmma\.mma_async|tcgen05\.mma",
}
CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
FLOATS = (*"xyqkv", "out", "arena", "k_pages", "v_pages", "residual", "new_residual", "weight", "gate_up")
WIDE = ("planes", "scalings", "cos", "sin", "logits", "temperatures", "top_ps", "min_ps", "uniforms")
TABLES = ("offsets", "ranks", "block_table", "tiles", "top_ks", "work", "counters")
LONGS = ("positions", "slot_mapping", "tokens")


@dataclass(frozen=True)
class Variant:
    """What a kernel is compiled for; pointers, strides and the vocabulary are multiples of 16, as in launches."""

    kernel: Any
    dtype: str
    constants: Mapping[str, object]
    scalars: Mapping[str, str]
    warps: int
    stages: int
    kv_dtype: str | None = None
    is_minor: bool = False
    """Whether it differs from another variant in the dtype or in a number."""
    options: Mapping[str, object] | None = None
    """Further options of the launch."""

    def compile(self, arch: int) -> Any:
        """Compile it for a GPU of this compute capability."""
        signature, attributes = {}, {}
        pages = dict.fromkeys(("k_pages", "v_pages"), f"*{self.kv_dtype}" if self.kv_dtype else None)
        for index, name in enumerate(self.kernel.arg_names):
            parameter = self.kernel.params[index]
            if name in self.constants:
                signature[name] = "constexpr"
                continue
            signature[name] = (
                pages.get(name)
                or _pointer(name, self.dtype)
                or self.scalars.get(name)
                or ("i64" if "64" in parameter.annotation else "i32")
            )
            is_stride = signature[name] == "i64" and not parameter.do_not_specialize
            is_aligned = signature[name].startswith("*") and not parameter.do_not_specialize_on_alignment
            if is_stride or is_aligned or name == "V":
                attributes[index,] = [["tt.divisibility", 16]]
        constexprs = {(self.kernel.arg_names.index(name),): value for name, value in self.constants.items()}
        source = ASTSource(fn=self.kernel, signature=signature, constexprs=constexprs, attrs=attributes)
        options = {"num_warps": self.warps, "num_stages": self.stages, **(self.options or {})}
        return triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)


def _pointer(name: str, dtype: str) -> str | None:
    if name in FLOATS:
        return f"*{dtype}"
    if name in (*WIDE, "k_scales", "v_scales") or name.startswith("partial"):
        return "*fp32"
    if name in LONGS:
        return "*i64"
    return "*i32" if name in TABLES or name.startswith(("tile_", "item_")) else None


def _lora_variants() -> dict[str, Variant]:
    found = {}
    # Llama-3-8B: q, k, v of unequal width; a decode tile with split-K and a prefill tile.
    for tile_rows, capacity in ((16, 8), (64, 64)):
        rank_block, column_block, k_block, split_k = sgmv_triton.block_sizes(4096, tile_rows, capacity, 8)
        shared = {"MODULE": 0, "NUM_SLICES": 3, "UNIT": 128, "GROUPS": 8, "SPLIT_K": split_k, "BM": tile_rows}
        shared["INTERPRET"] = False
        shrink = {**shared, "K": 4096, "PITCH": 4096, "BR": rank_block, "BK": k_block}
        expand = {**shared, "W0": 4096, "W1": 1024, "W2": 1024, "ALIGN": 16, "BN": column_block, "BR": 16}
        for dtype in ("bf16", "fp16", "fp32"):
            name, is_minor = f"{tile_rows} {dtype}", dtype != "bf16"
            found[f"shrink {name}"] = Variant(sgmv_triton.shrink_kernel, dtype, shrink, {}, 4, 3, is_minor=is_minor)
            found[f"expand {name}"] = Variant(sgmv_triton.expand_kernel, dtype, expand, {}, 4, 2, is_minor=is_minor)
    return found


def _attention_variants() -> dict[str, Variant]:
    found = {}
    dtypes = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "i8": torch.int8}
    # Llama-3-8B, Qwen2.5-0.5B, and heads of 80 and of 24 numbers; with a window, and with keys and values of int8.
    for heads, dtype, window, kv_dtype, is_minor in (
        ((32, 8, 128), "bf16", 0, None, False),
        ((32, 8, 128), "bf16", 4096, None, True),
        ((32, 8, 128), "bf16", 0, "i8", False),
        ((32, 8, 128), "bf16", 4096, "i8", True),
        ((32, 8, 128), "fp16", 0, None, True),
        ((32, 8, 128), "fp32", 0, None, False),
        ((14, 2, 64), "bf16", 0, None, True),
        ((32, 8, 80), "bf16", 0, None, True),
    ):
        num_heads, num_kv_heads, head_dim = heads
        shared: dict[str, object] = {"PAGE_TOKENS": 16, "WINDOW": window, "INTERPRET": False}
        if kv_dtype is None:
            shared |= {"k_scales": None, "v_scales": None}
        name = f"{head_dim} {dtype}" + f" window {window}" * bool(window) + " int8" * bool(kv_dtype)
        for kind, kernel, sizes in (
            ("items", attention_triton.item_kernel, attention_triton.item_sizes(*heads, dtypes[kv_dtype or dtype])),
            (
                "chunks",
                attention_triton.chunk_kernel,
                attention_triton.chunk_sizes(num_heads // num_kv_heads, head_dim, dtypes[dtype]),
            ),
        ):
            warps, stages = sizes.pop("num_warps"), sizes.pop("num_stages")
            found[f"{kind} {name}"] = Variant(
                *(kernel, dtype, {**sizes, **shared}, {"factor": "fp32"}, warps, stages, kv_dtype, is_minor),
                options={"enable_fp_fusion": False},
            )
    return found


def _row_variants() -> dict[str, Variant]:
    norm = {"N": 4096, "BLOCK": 4096}
    rope = {"HALF": 64, "BLOCK_H": 16, "BLOCK_D": 64}
    kv_write = {"PAGE_TOKENS": 16, "HEADS": 8, "D": 128, "BLOCK": 1024}
    kv_write_int8 = {"PAGE_TOKENS": 16, "D": 128, "BLOCK": 128, "LARGEST": 127.0}
    silu_and_mul = {"N": 14336, "BLOCK": 1024}
    eps = {"eps": "fp32"}
    return {
        "norm": Variant(rows_triton.rms_norm_kernel, "bf16", {**norm, "ADD": False}, eps, 4, 2),
        "norm add": Variant(rows_triton.rms_norm_kernel, "bf16", {**norm, "ADD": True}, eps, 4, 2),
        "rope": Variant(rows_triton.rope_kernel, "bf16", rope, {}, 4, 2),
        "silu_and_mul": Variant(rows_triton.silu_and_mul_kernel, "bf16", silu_and_mul, {}, 4, 2),
        "kv_write": Variant(rows_triton.kv_write_kernel, "bf16", kv_write, {}, 4, 2),
        "kv_write int8": Variant(rows_triton.kv_write_int8_kernel, "bf16", kv_write_int8, {}, 1, 2, kv_dtype="i8"),
    }


def _sampling_variants() -> dict[str, Variant]:
    return {"sample": Variant(sampling_triton.sample_kernel, "fp32", {"BLOCK": 4096}, {}, 8, 2)}


KINDS: dict[str, Callable[[], dict[str, Variant]]] = {
    "attention": _attention_variants,
    "lora": _lora_variants,
    "rows": _row_variants,
    "sampling": _sampling_variants,
}


def figures(compiled: Any) -> dict[str, int]:
    """Counts of instructions, and what a program takes of its processor."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        command = [str(CUOBJDUMP), "--dump-resource-usage", file.name]
        used = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = {kind: len(re.findall(pattern, str(compiled.asm["ptx"]))) for kind, pattern in PATTERNS.items()}
    for name, key in (("registers", "REG"), ("stack", "STACK"), ("local", "LOCAL")):
        found[name] = max(map(int, re.findall(rf"\b{key}:(\d+)", used)))
    return {**found, "shared": compiled.metadata.shared}


def main() -> None:
    """Print the figures of variants for one architecture."""
    parser = argparse.ArgumentParser()
    parser.add_argument("arch", type=int)
    parser.add_argument("kinds", nargs="*", default=list(KINDS))
    parser.add_argument("--all", action="store_true")
    options = parser.parse_args()
    found = {name: each for kind in options.kinds for name, each in KINDS[kind]().items()}
    variants = {name: each for name, each in found.items() if options.all or not each.is_minor}
    print(json.dumps({name: figures(each.compile(options.arch)) for name, each in variants.items()}))


if __name__ == "__main__":
    main()
