"""Compiles all Triton kernels for sm_90 without a GPU and prints how wide their memory accesses are.

A program, not to be imported: it needs a process in which TRITON_INTERPRET is not set. Prints one JSON object,
variant -> counts.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Mapping
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from weft.kernels.triton import attend as attend_triton
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
    "tensor_core": r"mma\.sync|wgmma\.mma_async",
}


def ptx_of(
    kernel: Any,
    dtype: str,
    constants: Mapping[str, object],
    scalars: Mapping[str, str],
    warps: int,
    stages: int,
    kv_dtype: str | None = None,
) -> str:
    """PTX of one variant; pointers, strides and the vocabulary are multiples of 16, as the launchers' are."""
    signature, attributes = {}, {}
    pages = dict.fromkeys(("k_pages", "v_pages"), f"*{kv_dtype}" if kv_dtype else None)
    for index, name in enumerate(kernel.arg_names):
        annotation = kernel.params[index].annotation
        if name in constants:
            signature[name] = "constexpr"
            continue
        signature[name] = (
            pages.get(name) or _pointer(name, dtype) or scalars.get(name) or ("i64" if "64" in annotation else "i32")
        )
        is_stride = signature[name] == "i64" and not kernel.params[index].do_not_specialize
        is_aligned = not kernel.params[index].do_not_specialize_on_alignment
        if is_stride or name == "V" or (signature[name].startswith("*") and is_aligned):
            attributes[index,] = [["tt.divisibility", 16]]
    constexprs = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constexprs, attrs=attributes)
    target = GPUTarget("cuda", 90, 32)
    return str(triton.compile(source, target=target, options={"num_warps": warps, "num_stages": stages}).asm["ptx"])


FLOATS = (*"xyqkv", "out", "arena", "k_pages", "v_pages", "residual", "new_residual", "weight", "gate_up")
FLOATS += ("table", "q_norm", "k_norm")
WIDE = ("planes", "scalings", "cos", "sin", "logits", "temperatures", "top_ps", "min_ps", "uniforms")
TABLES = ("offsets", "ranks", "block_table", "query_indptr", "context_lens", "top_ks")
INTEGERS = ("positions", "slot_mapping", "tokens", "sampled", "counters")


def _pointer(name: str, dtype: str) -> str | None:
    if name in FLOATS:
        return f"*{dtype}"
    if name in (*WIDE, "k_scales", "v_scales") or name.startswith("partial"):
        return "*fp32"
    return "*i32" if name in (*TABLES, *INTEGERS) or name.startswith(("tile_", "item_")) else None


def _lora_variants() -> dict[str, str]:
    found = {}
    # Llama-3-8B: a tile of decode with split-K, and one of a prompt; q, k, v of unequal width. Ranks to 64.
    for tile_rows, dtype in itertools.product((16, 64), ("bf16", "fp16", "fp32")):
        element_size, warps = 4 if dtype == "fp32" else 2, 4 if tile_rows == 16 else 8
        rank_block, k_block, split_k = sgmv_triton.block_sizes(4096, tile_rows, 8, element_size)
        shape = 3, 256 // element_size, 8, split_k, 16, False
        site = {"MODULE": 0, "BM": tile_rows, "SITE": shape}
        shrink = {"MODULE": 0, "BM": tile_rows, "K": 4096, "PITCH": 4096, "BR": rank_block, "BK": k_block}
        shrink |= {"NUM_SLICES": 3, "UNIT": shape[1], "GROUPS": 8, "SPLIT_K": split_k, "INTERPRET": False}
        expand = {**site, "W0": 4096, "W1": 1024, "W2": 1024, "ALIGN": 16, "BN": 128}
        gate = {**site, "SITE": (2, *shape[1:]), "N": 14336, "BN": 128}
        stages, eps = sgmv_triton.shrink_stages(element_size), {"eps": "fp32"}
        name = f"{tile_rows} {dtype}"
        found[f"shrink {name}"] = ptx_of(sgmv_triton.shrink_kernel, dtype, shrink, {}, warps, stages)
        found[f"expand {name}"] = ptx_of(sgmv_triton.expand_kernel, dtype, expand, {}, warps, 2)
        heads = {**site, **HEADS, **NO_NORMS, **NO_SCALES}
        found[f"expand heads {name}"] = ptx_of(attend_triton.heads_kernel, dtype, heads, eps, warps, 2)
        found[f"expand silu {name}"] = ptx_of(rows_triton.silu_and_mul_kernel, dtype, gate, {}, warps, 2)
        if tile_rows == 16:
            norm = {**site, "SITE": (1, *shape[1:]), "N": 4096, "BLOCK": 4096}
            norm["BN"] = rows_triton.NORM_BLOCK_BYTES // element_size
            found[f"expand norm {name}"] = ptx_of(rows_triton.expand_add_norm_kernel, dtype, norm, eps, 8, 2)
    heads = {"MODULE": 0, "BM": 16, "SITE": (3, 128, 8, 4, 16, False), **HEADS}
    found["expand heads int8"] = ptx_of(attend_triton.heads_kernel, "bf16", heads, eps, 4, 2, kv_dtype="i8")
    return found


def _attention_variants() -> dict[str, str]:
    shared = {"GROUP": 4, "D": 128, "BLOCK_D": 128, "PAGE_TOKENS": 16, "BLOCK_N": 64, "INTERPRET": False}
    scalars = {"scale": "fp32"}
    no_scales = {"k_scales": None, "v_scales": None}
    plain, limited = {"WINDOW": 0, **no_scales}, {"WINDOW": 4096, **no_scales}
    items = {**shared, "BLOCK_G": 16, "SPLIT": 256}
    chunks = {**shared, "BLOCK_M": 64}
    reduce = {"D": 128, "BLOCK_D": 128, "SPLIT": 256, "NUM_SPLITS": 5, "BLOCK_S": 8}
    item_kernel, chunk_kernel = attention_triton.item_kernel, attention_triton.chunk_kernel
    return {
        "items": ptx_of(item_kernel, "bf16", {**items, **plain, "NUM_SPLITS": 8}, scalars, 4, 2),
        "items limited": ptx_of(item_kernel, "bf16", {**items, **limited, "NUM_SPLITS": 1}, scalars, 4, 2),
        "items int8": ptx_of(
            item_kernel, "bf16", {**items, "WINDOW": 0, "NUM_SPLITS": 8}, scalars, 4, 2, kv_dtype="i8"
        ),
        "chunks int8": ptx_of(chunk_kernel, "bf16", {**chunks, "WINDOW": 0}, scalars, 4, 2, kv_dtype="i8"),
        "reduce": ptx_of(attention_triton.reduce_kernel, "bf16", {**reduce, "WINDOW": 0}, {}, 4, 2),
        "reduce limited": ptx_of(attention_triton.reduce_kernel, "bf16", {**reduce, "WINDOW": 300}, {}, 4, 2),
        "chunks": ptx_of(chunk_kernel, "bf16", {**chunks, **plain}, scalars, 4, 2),
        "chunks limited": ptx_of(chunk_kernel, "bf16", {**chunks, **limited}, scalars, 4, 2),
    }


HEADS = {"Q_HEADS": 32, "KV_HEADS": 8, "D": 128, "BLOCK": 64, "PAGE_TOKENS": 16, "LARGEST": 127.0}
NO_NORMS, NO_SCALES = dict.fromkeys(("q_norm", "k_norm")), dict.fromkeys(("k_scales", "v_scales"))
NO_DELTA: dict[str, object] = {
    **dict.fromkeys(("planes", "arena", "offsets", "ranks", "scalings", "tile_slot", "tile_start", "tile_length")),
    "MODULE": 0,
    "BM": 16,
    "SITE": (0, 1, 0, 0, 16, False),
}


def _row_variants() -> dict[str, str]:
    norm, eps = {"N": 4096, "BLOCK": 4096}, {"eps": "fp32"}
    heads, gate = {**NO_DELTA, **HEADS}, {**NO_DELTA, "N": 14336, "BN": 128}
    heads_kernel, embed_kernel = attend_triton.heads_kernel, rows_triton.embed_kernel
    return {
        "embed": ptx_of(embed_kernel, "bf16", {"N": 4096, "BLOCK": 1024}, {}, 4, 2),
        "norm": ptx_of(rows_triton.rms_norm_kernel, "bf16", {**norm, "ADD": False}, eps, 8, 2),
        "norm add": ptx_of(rows_triton.rms_norm_kernel, "bf16", {**norm, "ADD": True}, eps, 8, 2),
        "heads": ptx_of(heads_kernel, "bf16", {**heads, **NO_NORMS, **NO_SCALES}, eps, 4, 2),
        "heads normed": ptx_of(heads_kernel, "bf16", {**heads, **NO_SCALES}, eps, 4, 2),
        "heads int8": ptx_of(heads_kernel, "bf16", heads, eps, 4, 2, kv_dtype="i8"),
        "silu_and_mul": ptx_of(rows_triton.silu_and_mul_kernel, "bf16", gate, {}, 4, 2),
        "sample": ptx_of(sampling_triton.sample_kernel, "fp32", {"BLOCK": 4096}, {}, 8, 2),
    }


def main() -> None:
    """Print the counts of all variants."""
    variants = {**_lora_variants(), **_attention_variants(), **_row_variants()}
    counts = {
        name: {kind: len(re.findall(pattern, ptx)) for kind, pattern in PATTERNS.items()}
        for name, ptx in variants.items()
    }
    print(json.dumps(counts))


if __name__ == "__main__":
    main()
