"""Compiles the Triton kernels without a GPU and prints what came of it: `ptx_report.py ARCHITECTURE... [--all 90]`.

A program, not to be imported: it needs a process in which TRITON_INTERPRET is not set. ARCHITECTURE is 80, 90 or 100.
Prints one JSON object, architecture -> variant -> counts of instructions, and registers, bytes of stack and bytes of
shared memory. Variants that are minor are compiled for the architecture of --all alone.
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
import subprocess
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from manylora.kernels.triton import attend as attend_triton
from manylora.kernels.triton import attention as attention_triton
from manylora.kernels.triton import rows as rows_triton
from manylora.kernels.triton import sampling as sampling_triton
from manylora.kernels.triton import sgmv as sgmv_triton

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
FLOATS = (
    *"xyqkv",
    "qkv",
    "out",
    "k_pages",
    "v_pages",
    "residual",
    "new_residual",
    "weight",
    "gate_up",
)
WIDE = ("cos", "sin", "logits")
FLOATS += ("table", "q_norm", "k_norm")
TABLES = ("block_table", "tiles", "words", "listed", "work")
INTEGERS = ("positions", "slot_mapping", "tokens", "sampled", "counters")


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
        signature: dict[str, object] = {}
        attributes: dict[tuple[int, ...], object] = {}
        pages = dict.fromkeys(
            ("k_pages", "v_pages"), f"*{self.kv_dtype}" if self.kv_dtype else None
        )
        for index, name in enumerate(self.kernel.arg_names):
            parameter = self.kernel.params[index]
            if name in self.constants:
                signature[name] = "constexpr"
                continue
            if name == "delta":
                signature[name] = ("*fp32", f"*{self.dtype}", "*i32", "*i32", "*fp32", "i32", "i32")
                attributes |= {(index, place): [["tt.divisibility", 16]] for place in range(5)}
                continue
            kind = signature[name] = (
                pages.get(name)
                or _pointer(name, self.dtype)
                or self.scalars.get(name)
                or ("i64" if "64" in parameter.annotation else "i32")
            )
            is_stride = kind == "i64" and not parameter.do_not_specialize
            is_aligned = kind.startswith("*") and not parameter.do_not_specialize_on_alignment
            if is_stride or is_aligned or name == "V":
                attributes[index,] = [["tt.divisibility", 16]]
        constexprs = {
            (self.kernel.arg_names.index(name),): value for name, value in self.constants.items()
        }
        source = ASTSource(
            fn=self.kernel, signature=signature, constexprs=constexprs, attrs=attributes
        )
        options = {"num_warps": self.warps, "num_stages": self.stages, **(self.options or {})}
        return triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)


def _pointer(name: str, dtype: str) -> str | None:
    if name in FLOATS:
        return f"*{dtype}"
    if name in (*WIDE, "k_scales", "v_scales") or name.startswith("partial"):
        return "*fp32"
    return "*i32" if name in (*TABLES, *INTEGERS) or name.startswith("item_") else None


def _lora_variants() -> dict[str, Variant]:
    found = {}
    # Llama-3-8B: a tile of decode with split-K, and one of a prompt; q, k, v of unequal width. Ranks to 64.
    for tile_rows, dtype in itertools.product((16, 64), ("bf16", "fp16", "fp32")):
        element_size, warps = 4 if dtype == "fp32" else 2, 4 if tile_rows == 16 else 8
        sizes = sgmv_triton.shrink_sizes(4096, tile_rows, 8, element_size)
        shape = 3, 256 // element_size, 8, sizes["SPLIT_K"], 16, False, 0
        site = {"BM": tile_rows, "SITE": shape}
        shrink: dict[str, object] = {
            "MODULE": 0,
            "BM": tile_rows,
            "K": 4096,
            "PITCH": 4096,
            "INTERPRET": False,
        }
        shrink |= {"NUM_SLICES": 3, "UNIT": shape[1], "GROUPS": 8, **sizes}
        expand = {**site, "W0": 4096, "W1": 1024, "W2": 1024, "ALIGN": 16, "BN": 128}
        gate = {**site, "SITE": (2, *shape[1:]), "N": 14336, "BN": 128}
        eps, name, minor = {"eps": "fp32"}, f"{tile_rows} {dtype}", dtype != "bf16"
        stages = sizes["num_stages"]
        del shrink["num_stages"]
        found[f"shrink {name}"] = Variant(
            sgmv_triton.shrink_kernel,
            dtype,
            shrink,
            {},
            sgmv_triton.SHRINK_WARPS,
            stages,
            is_minor=minor,
        )
        found[f"expand {name}"] = Variant(
            sgmv_triton.expand_kernel, dtype, expand, {}, warps, 2, is_minor=minor
        )
        heads = {**site, **HEADS, **NO_NORMS, **NO_SCALES}
        found[f"expand heads {name}"] = Variant(
            attend_triton.heads_kernel, dtype, heads, eps, warps, 3, is_minor=minor
        )
        found[f"expand silu {name}"] = Variant(
            rows_triton.silu_and_mul_kernel,
            dtype,
            gate,
            {},
            rows_triton.SILU_WARPS,
            2,
            is_minor=minor,
        )
        if tile_rows == 16:
            norm = {**site, "SITE": (1, *shape[1:]), "N": 4096, "BLOCK": 4096}
            norm["BN"] = rows_triton.NORM_BLOCK_BYTES // element_size
            found[f"expand norm {name}"] = Variant(
                rows_triton.expand_add_norm_kernel, dtype, norm, eps, 8, 2, is_minor=minor
            )
    heads = {"BM": 16, "SITE": (3, 128, 8, 4, 16, False, 0), **HEADS}
    found["expand heads int8"] = Variant(
        attend_triton.heads_kernel, "bf16", heads, eps, 4, 3, kv_dtype="i8"
    )
    return found


def _attention_variants() -> dict[str, Variant]:
    found = {}
    dtypes = {
        "bf16": torch.bfloat16,
        "fp16": torch.float16,
        "fp32": torch.float32,
        "i8": torch.int8,
    }
    # Llama-3-8B, Qwen2.5-0.5B, Llama-2-7B, and heads of 80 numbers; with keys and values of int8.
    for (heads, dtype, kv_dtype, is_minor), window in itertools.product(
        (
            ((32, 8, 128), "bf16", None, False),
            ((32, 8, 128), "bf16", "i8", False),
            ((32, 8, 128), "fp16", None, True),
            ((32, 8, 128), "fp16", "i8", False),
            ((32, 8, 128), "fp32", None, False),
            ((14, 2, 64), "bf16", None, True),
            ((32, 32, 128), "bf16", None, False),
            ((32, 32, 128), "bf16", "i8", True),
            ((32, 8, 80), "bf16", None, True),
            ((16, 8, 256), "bf16", None, False),
            ((16, 8, 256), "bf16", "i8", True),
        ),
        (0, 4096),
    ):
        if is_minor and window:
            continue  # the window is tried with those that differ in more than a number
        num_heads, num_kv_heads, head_dim = heads
        shared: dict[str, object] = {"PAGE_TOKENS": 16, "WINDOW": window, "INTERPRET": False}
        if kv_dtype is None:
            shared |= {"k_scales": None, "v_scales": None}
        group, kept = num_heads // num_kv_heads, dtypes[kv_dtype or dtype]
        name = (
            f"{head_dim} {dtype}" + " one head" * (group == 1) + f" window {window}" * bool(window)
        )
        name += " int8" * bool(kv_dtype)
        for kind, kernel, constants in (
            (
                "items",
                attention_triton.item_kernel,
                attention_triton.item_sizes(*heads, dtypes[dtype], kept),
            ),
            (
                "chunks",
                attention_triton.chunk_kernel,
                attention_triton.chunk_sizes(group, head_dim, dtypes[dtype], kept),
            ),
        ):
            sizes, minor = dict(constants), is_minor or bool(window)
            warps, stages = sizes.pop("num_warps"), sizes.pop("num_stages")
            registers = {"maxnreg": sizes.pop("maxnreg")} if "maxnreg" in sizes else {}
            found[f"{kind} {name}"] = Variant(
                *(
                    kernel,
                    dtype,
                    {**sizes, **shared},
                    {"factor": "fp32"},
                    warps,
                    stages,
                    kv_dtype,
                    minor,
                ),
                options={"enable_fp_fusion": False, **registers},
            )
    return found


HEADS = {"Q_HEADS": 32, "KV_HEADS": 8, "D": 128, "BLOCK": 64, "PAGE_TOKENS": 16, "LARGEST": 127.0}
NO_NORMS, NO_SCALES = dict.fromkeys(("q_norm", "k_norm")), dict.fromkeys(("k_scales", "v_scales"))
NO_DELTA: dict[str, object] = {
    **dict.fromkeys(("delta", "tiles")),
    "BM": 16,
    "SITE": (0, 1, 0, 0, 16, False, 0),
}


def _row_variants() -> dict[str, Variant]:
    norm, eps = {"N": 4096, "BLOCK": 4096}, {"eps": "fp32"}
    heads, gate = {**NO_DELTA, **HEADS}, {**NO_DELTA, "N": 14336, "BN": 128}
    heads_kernel, embed_kernel = attend_triton.heads_kernel, rows_triton.embed_kernel
    return {
        "embed": Variant(embed_kernel, "bf16", {"N": 4096, "BLOCK": 1024}, {}, 4, 2),
        "norm": Variant(rows_triton.rms_norm_kernel, "bf16", {**norm, "ADD": False}, eps, 8, 2),
        "norm add": Variant(rows_triton.rms_norm_kernel, "bf16", {**norm, "ADD": True}, eps, 8, 2),
        "heads": Variant(heads_kernel, "bf16", {**heads, **NO_NORMS, **NO_SCALES}, eps, 4, 3),
        "heads normed": Variant(heads_kernel, "bf16", {**heads, **NO_SCALES}, eps, 4, 3),
        "heads int8": Variant(heads_kernel, "bf16", heads, eps, 4, 3, kv_dtype="i8"),
        "silu_and_mul": Variant(
            rows_triton.silu_and_mul_kernel, "bf16", gate, {}, rows_triton.SILU_WARPS, 2
        ),
    }


def _sampling_variants() -> dict[str, Variant]:
    # A vocabulary of 152,000 tokens.
    pointers = {"state": "*fp32", "found": "*fp32", "masses": "*i64"}
    chunks, top_k, top_p = {"CHUNKS": 64}, {"MASS": False}, {"MASS": True}
    kernels: dict[str, tuple[Any, Mapping[str, object]]] = {
        "sample stats": (sampling_triton.stats_kernel, chunks),
        "sample edges top-k": (sampling_triton.edges_kernel, {**chunks, **top_k}),
        "sample edges top-p": (sampling_triton.edges_kernel, {**chunks, **top_p}),
        "sample bound top-k": (sampling_triton.bound_kernel, top_k),
        "sample bound top-p": (sampling_triton.bound_kernel, top_p),
        "sample draw": (sampling_triton.draw_kernel, chunks),
    }
    return {
        name: Variant(kernel, "fp32", constants, pointers, sampling_triton.WARPS, 3)
        for name, (kernel, constants) in kernels.items()
    }


KINDS: tuple[Callable[[], dict[str, Variant]], ...] = (
    _attention_variants,
    _lora_variants,
    _row_variants,
    _sampling_variants,
)


def figures(compiled: Any) -> dict[str, int]:
    """Counts of instructions, and what a program takes of its processor."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        command = [str(CUOBJDUMP), "--dump-resource-usage", file.name]
        used = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = {
        kind: len(re.findall(pattern, str(compiled.asm["ptx"])))
        for kind, pattern in PATTERNS.items()
    }
    for name, key in (("registers", "REG"), ("stack", "STACK"), ("local", "LOCAL")):
        found[name] = max(map(int, re.findall(rf"\b{key}:(\d+)", used)))
    return {**found, "shared": compiled.metadata.shared}


def report(arch: int, *, is_whole: bool) -> dict[str, dict[str, int]]:
    """The figures of variants for one architecture."""
    for sizes in (attention_triton.item_sizes, attention_triton.chunk_sizes):
        sizes.cache_clear()  # those of the architecture before
    with mock.patch.object(attention_triton, "architecture", return_value=f"sm{arch}"):
        found = {name: each for make in KINDS for name, each in make().items()}
    return {
        name: figures(each.compile(arch))
        for name, each in found.items()
        if is_whole or not each.is_minor
    }


def main() -> None:
    """Print the figures of variants."""
    parser = argparse.ArgumentParser()
    parser.add_argument("archs", type=int, nargs="+")
    parser.add_argument("--all", type=int)
    options = parser.parse_args()
    print(json.dumps({arch: report(arch, is_whole=arch == options.all) for arch in options.archs}))


if __name__ == "__main__":
    main()
