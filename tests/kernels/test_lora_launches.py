"""What a step launches beside attention on a GPU, and that no batch makes Triton compile a kernel again."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fake_triton import FakeTriton, fake_triton
from implementations import BF16, CPU, F32, INTERPRETS, TRITON
from weft.adapters.lora.step import LoraStep, PagedLora
from weft.adapters.lora.tables import AdapterTables
from weft.adapters.lora.tiles import tile_capacity, tile_rows
from weft.benchmarks.model_shapes import MODELS, ModelShape
from weft.engine.model.decoder import Decoder, DecoderLayer, KvViews, StepRows
from weft.engine.model.rope import RopeTable
from weft.kernels.attend import HeadNorms
from weft.memory.arena import Arena

pytestmark = pytest.mark.skipif(INTERPRETS, reason="the interpreter compiles nothing")
pytest.importorskip("triton", reason="needs Triton, which is there on Linux")
META = torch.device("meta")
LLAMA = MODELS[0]
SMALL = ModelShape("small", num_layers=2, hidden=128, intermediate=256, num_heads=4, num_kv_heads=2)
SIZES = ("heads", "x_row", "x_head", "layer", "num_layers", "num_modules", "num_tokens")
FREE = {"empty", "empty_like", "empty_strided", "new_empty", "view", "_unsafe_view", "t", "split", "slice", "select"}
FREE |= {"split_with_sizes", "unbind", "detach", "as_strided", "transpose", "zeros"}  # counters are made once


class Operations(TorchDispatchMode):
    """Counts torch operators that launch something."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().removeprefix("aten::").split(".")[0]
        if name not in FREE:
            self.counts[name] += 1
        return func(*args, **(kwargs or {}))


class Model:
    """A model without numbers, and steps of it."""

    def __init__(self, shape: ModelShape, device: torch.device, head_norms: bool = False) -> None:
        empty = partial(torch.empty, dtype=BF16, device=device)
        self.device, kv_width = device, shape.num_kv_heads * shape.head_dim
        spec, kernels, hidden = shape.spec(), TRITON.make(), shape.hidden
        norms = HeadNorms(empty(shape.head_dim), empty(shape.head_dim), 1e-6) if head_norms else None

        def linear(in_features: int, out_features: int) -> Any:
            return partial(torch.nn.functional.linear, weight=empty(out_features, in_features))

        layers = [
            DecoderLayer(
                input_norm=empty(hidden),
                qkv=linear(hidden, hidden + 2 * kv_width),
                head_norms=norms,
                o=linear(hidden, hidden),
                post_norm=empty(hidden),
                gate_up=linear(hidden, 2 * shape.intermediate),
                down=linear(shape.intermediate, hidden),
            )
            for _ in range(shape.num_layers)
        ]
        tables = [torch.empty(4096, shape.head_dim // 2, dtype=F32, device=device) for _ in range(2)]
        self.decoder = Decoder(
            spec=spec,
            kernels=kernels,
            embedding=empty(1000, hidden),
            layers=layers,
            norm=empty(hidden),
            head=linear(hidden, 1000),
            rope=RopeTable(*tables),
        )
        self.arena = Arena(shape.geometry(), 40, device, BF16)
        base = shape.base()
        self.tables = AdapterTables(256, base, 64, shape.geometry(), device)
        self.lora = PagedLora(self.arena, self.tables, base, kernels)
        self.kv = KvViews.of(self.arena)

    def run(self, num_rows: int, has_adapters: bool, offset: int = 0, has_sampled: bool = True) -> None:
        """A step whose numbers lie `offset` elements from the beginning of a packed tensor."""
        capacity = tile_capacity(num_rows, self.tables.slots, tile_rows(num_rows))
        packed = torch.zeros(offset + 5 * num_rows + 3 * capacity, dtype=torch.int32, device=self.device)
        sizes = [offset, *[num_rows] * 5, 3 * capacity]
        _, tokens, positions, slots, sampled, _, tiles = torch.split(packed, sizes)
        rows = StepRows(
            tokens=tokens,
            positions=positions,
            slot_mapping=(slots,) * len(set(self.kv.groups)),
            attention=(SimpleNamespace(),) * len(set(self.kv.groups)),  # type: ignore[arg-type]
            sampled=sampled if has_sampled else None,
        )
        step: LoraStep | None = None
        if has_adapters:
            step = self.lora.static_step(tiles.view(3, capacity), tile_rows(num_rows))
        self.decoder.forward(rows, self.kv, step)


@contextmanager
def launches() -> Iterator[FakeTriton]:
    """What is launched but for attention."""
    from weft.kernels.triton import attend

    stub = {"paged_attention": lambda q, *_: torch.empty_like(q)}
    with fake_triton() as fake, mock.patch.dict(attend.attend.__kwdefaults__, stub):
        yield fake


def sum_layouts(kernel: Any, constants: dict[str, object], arch: int) -> list[str]:
    """How the threads of a compiled kernel hold what it sums up; that decides the order of the sum."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.compiler import compile as compile_kernel

    signature, aligned = {}, {}
    for index, name in enumerate(kernel.arg_names):
        is_table = name in {"offsets", "ranks", "counters"} or name.startswith("tile_")
        is_wide = "int64" in kernel.params[index].annotation or name in {"x_row", "x_head"}
        pointer = "*fp32" if name in {"planes", "scalings"} else "*i32" if is_table else "*bf16"
        scalar = {"eps": "fp32"} | dict.fromkeys(SIZES, "i64" if is_wide else "i32")
        signature[name] = "constexpr" if name in constants else scalar.get(name, pointer)
        if signature[name] in ("*bf16", "i64"):
            aligned[index,] = [["tt.divisibility", 16]]
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
    from weft.kernels.triton import rows

    size = {"N": 4096, "BLOCK": 4096}
    alone = sum_layouts(rows.rms_norm_kernel, {**size, "ADD": True}, arch)
    site = {"MODULE": 0, "BM": 16, "SITE": (1, 128, 8, 4, 16, False), "BN": 256}
    assert alone == sum_layouts(rows.expand_add_norm_kernel, {**size, **site}, arch)
    assert len(alone) == 1


@pytest.mark.parametrize("head_norms", [False, True], ids=["plain", "normed heads"])
def test_a_layer_of_the_base_is_four_products_and_four_kernels_beside_attention(head_norms: bool) -> None:
    model, layers = Model(LLAMA, META, head_norms), LLAMA.num_layers
    with launches() as fake, Operations() as operations:
        model.run(32, has_adapters=False)
    assert operations.counts == {"mm": 4 * layers}
    assert fake.counts == {
        "embed_kernel": 1,
        "rms_norm_kernel": 1 + 2 * layers,
        "heads_kernel": layers,
        "silu_and_mul_kernel": layers,
    }


@pytest.mark.parametrize("head_norms", [False, True], ids=["plain", "normed heads"])
def test_adapters_at_all_sites_are_four_kernels_more_a_layer(head_norms: bool) -> None:
    model, layers = Model(LLAMA, META, head_norms), LLAMA.num_layers
    with launches() as fake, Operations() as operations:
        model.run(32, has_adapters=True)
    assert operations.counts == {"mm": 4 * layers}
    assert fake.counts == {
        "embed_kernel": 1,
        "rms_norm_kernel": 1,
        "shrink_kernel": 4 * layers,
        "heads_kernel": layers,
        "silu_and_mul_kernel": layers,
        "expand_add_norm_kernel": 2 * layers,
    }


def test_no_batch_compiles_a_kernel_again() -> None:
    model = Model(SMALL, CPU)
    with launches() as fake:
        for num_rows in (1, 2, 3, *range(64, 3, -1)):
            model.run(num_rows, has_adapters=num_rows % 3 > 0, offset=num_rows)
            model.run(num_rows, has_adapters=num_rows % 3 == 0, offset=7 * num_rows)
        decode = fake.variants.copy()
        for num_rows in (128, 200, 511, 512):
            model.run(num_rows, has_adapters=True, offset=num_rows)
            model.run(num_rows, has_adapters=False)
    # One variant for the base and one with adapters, which of a norm is there for each of the two sites.
    assert decode == {
        "embed_kernel": 1,
        "rms_norm_kernel": 2,
        "shrink_kernel": 4,
        "heads_kernel": 2,
        "silu_and_mul_kernel": 2,
        "expand_add_norm_kernel": 2,
    }
    assert fake.variants - decode == {
        "shrink_kernel": 4,
        "heads_kernel": 1,
        "silu_and_mul_kernel": 1,
        "expand_kernel": 2,
    }
