"""How near is each operation to what the machine can do?

    weft bench kernels [--model Qwen2.5-0.5B] [--rows 1,32] [--json benchmarks/results/kernels-cpu.json]
    weft bench kernels --kv-dtype int8 --contexts 4096

Times the operations of a step as the engine calls them, on random data in the shapes of a model: LoRA at each site for
several mixes of adapters, attention at decode and over a prompt, norms and sampling. Each call takes
another layer's weights and pages; what is small in all layers together still comes from a cache. The floor of an
operation is the time that its bytes take at the bandwidth of a large copy or its arithmetic at the speed of a large
product, both measured in the same run. With `--kv-dtype int8`, attention is also timed over int8 keys and values, and
its results on random numbers are compared with those over bfloat16 ones. Prints a table and, last, one JSON line. For a
CPU; `scripts/gpu kernels` times the same operations on a GPU.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, get_args

import torch

from weft.adapters.base_shape import SITES, BaseShape
from weft.adapters.lora.layout import adapter_pages, plan_layout
from weft.adapters.lora.step import LoraStep, PagedLora
from weft.adapters.lora.tables import AdapterTables
from weft.benchmarks.model_shapes import MODELS, QWEN, ModelShape
from weft.benchmarks.report import AddOption, counts
from weft.config import KvDtype
from weft.errors import ConfigError
from weft.kernels.attention_batch import AttentionBatch
from weft.kernels.dispatch import kernels_for
from weft.kernels.kv_layer import KvLayer
from weft.kernels.plain.rows import kv_write
from weft.kernels.sampling import RowSampling, SamplingColumns
from weft.memory.arena import Arena
from weft.memory.geometry import SCALE_BYTES

DTYPE = torch.bfloat16
VOCAB_SIZE = 32_000
MIXES = {
    "1 of rank 16": (16,),
    "8 of rank 8": (8,) * 8,
    "8 of ranks 8 to 64": (8, 16, 32, 64, 8, 16, 32, 64),
    "10 of rank 24": (24,) * 10,
    "32 of rank 16": (16,) * 32,
}
"""Ranks of the adapters of a batch, on all linear layers. Mixed ranks and rank 24 have equally many bytes."""
PROMPT_TOKENS = 512
CALLS = 30
KV_PAGES = 256
LAUNCH_S = 3e-6
"""The least time of one kernel in a CUDA graph."""


@dataclass(frozen=True, slots=True)
class Work:
    """One operation, and the least bytes and arithmetic that it needs."""

    name: str
    run: Callable[[int], object]
    """Runs the operation; takes the number of the call."""
    num_bytes: float
    flops: float = 0.0
    out: torch.Tensor | None = None
    """What it adds to, if anything."""


@dataclass(frozen=True, slots=True)
class Machine:
    """The speed of the device: of a large copy and of a large product."""

    bytes_per_s: float
    flops_per_s: float
    launch_s: float = 0.0

    def floor_s(self, work: Work) -> float:
        """The least time of an operation."""
        return max(work.num_bytes / self.bytes_per_s, work.flops / self.flops_per_s, self.launch_s)


class KernelBench:
    """Makes operations on random data in the shapes of a model.

    Args:
        model: Its sizes. The calls take its layers in turn.
        device: Where to compute.
        kv_dtype: Of keys and values.
        kv_pages: Pages for keys and values, at least.
    """

    def __init__(
        self, model: ModelShape, device: torch.device, kv_dtype: KvDtype = "auto", kv_pages: int = KV_PAGES
    ) -> None:
        self.model, self.device, self.num_layers = model, device, model.num_layers
        self.base, self.geometry = model.base(), model.geometry(kv_dtype=kv_dtype)
        self.kernels = kernels_for(device, DTYPE)
        self.arena = Arena(self.geometry, arena_pages(model, kv_pages), device, DTYPE)
        self.arena.elements.copy_(self._random(1, self.geometry.page_elements))
        self.tables = AdapterTables(64, self.base, 64, self.geometry, device)

    def lora(self, ranks: Sequence[int], rows: int) -> list[Work]:
        """LoRA at each site for a batch of adapters of these ranks, each with at least one row.

        They take the slots and pages of the adapters of the call before: do not run its work any more.

        Raises:
            ValueError: The arena has too few pages for them.
        """
        next_page = 1  # each mix takes the same pages
        for slot, rank in enumerate(ranks):
            of_modules = all_modules(self.base, rank)
            layout = plan_layout(of_modules, self.base, self.geometry)
            pages = list(range(next_page, next_page + layout.num_pages))
            next_page += layout.num_pages
            if next_page > self.arena.num_pages:
                raise ValueError(f"ranks: expected adapters of fewer than {self.arena.num_pages} pages, got {ranks}")
            self.tables.write(slot, layout, pages, of_modules, dict.fromkeys(of_modules, 0.5))
        step = PagedLora(self.arena, self.tables, self.base).prepare(sorted(row % len(ranks) for row in range(rows)))
        if step is None:
            raise AssertionError("adapters of a rank above 0 change something")
        works = []
        for index, site in enumerate(SITES):
            modules = [self.base.modules[m] for m in site.modules]
            x = self._random(rows, modules[0].in_features)
            y = self._random(rows, sum(self.base.site_widths(index)))
            weights = sum(ranks) * sum(m.in_features + m.out_features for m in modules) * DTYPE.itemsize
            moved = weights + x.nbytes + 2 * y.nbytes
            works.append(Work(f"LoRA {site.name}", self._applied(step, index, x, y), moved, out=y))
        return works

    def _applied(self, step: LoraStep, site: int, x: torch.Tensor, y: torch.Tensor) -> Callable[[int], object]:
        return lambda call: step.apply(call % self.num_layers, site, x, y)

    def small(self, rows: int) -> list[Work]:
        """Operations that only pass over activations."""
        model, kernels = self.model, self.kernels
        x, residual = self._random(rows, model.hidden), self._random(rows, model.hidden)
        weight = torch.ones(model.hidden, dtype=DTYPE, device=self.device)
        gate_up = self._random(rows, 2 * model.intermediate)
        return [
            Work("add and norm", lambda _: kernels.fused_add_rms_norm(x, residual, weight, 1e-6), 4 * x.nbytes),
            Work("SiLU and product", lambda _: kernels.silu_and_mul(gate_up), gate_up.nbytes * 3 // 2),
            self.sampling(rows, "greedy", RowSampling(temperature=0.0)),
        ]

    def sampling(self, rows: int, about: str, row: RowSampling, vocab_size: int = VOCAB_SIZE) -> Work:
        """The choice of a token for each of so many rows."""
        logits = torch.randn(rows, vocab_size, device=self.device)
        columns = SamplingColumns.build([row] * rows, self.device)
        return Work(f"{about} sampling", lambda _: self.kernels.sample(logits, columns), logits.nbytes)

    def queries(self, count: int) -> torch.Tensor:
        """So many query rows, [count, Hq, D]."""
        model = self.model
        return self._random(count, model.num_heads * model.head_dim).view(-1, model.num_heads, model.head_dim)

    def attention(
        self,
        rows: int,
        context: int,
        query: int = 1,
        pages: Sequence[int] = (),
        q: torch.Tensor | None = None,
    ) -> Work:
        """Decode attention of so many requests, or of `query` tokens that end a prompt of `context` tokens.

        Their keys and values are in `pages`, which are those from the second on if none are given.
        """
        model, geometry, blocks = self.model, self.geometry, self.geometry.blocks(context)
        # Where the requests need more pages than there are, they share some: reading them costs the same on a CPU.
        pages = pages or [1 + (1 + index) % (self.arena.num_pages - 1) for index in range(rows * blocks)]
        tables = [pages[row * blocks : (row + 1) * blocks] for row in range(rows)]
        lengths = [query] * rows, [context] * rows
        batch = AttentionBatch.build(tables, *lengths, self.device, geometry.page_tokens)
        q = self.queries(rows * query) if q is None else q
        vector_bytes, stored = geometry.head_dim * geometry.dtype_bytes, ""
        if geometry.is_kv_int8:
            vector_bytes, stored = geometry.head_dim + SCALE_BYTES, " of int8"
        kv_bytes = rows * context * vector_bytes * 2 * model.num_kv_heads
        layers = [self._kv(layer) for layer in range(self.num_layers)]

        def attend(call: int) -> object:
            return self.kernels.paged_attention(q, layers[call % self.num_layers], batch, model.head_dim**-0.5)

        flops = 4 * len(q) * (context - query / 2) * model.num_heads * model.head_dim
        name = f"attention, {'context' if query == 1 else 'prompt of'} {context}{stored}"
        return Work(name, attend, kv_bytes + 2 * q.nbytes, flops)

    def decoded(self, context: int) -> torch.Tensor:
        """Attention of one row over the keys and values of a first layer, all normally distributed: [Hq, D].

        The numbers are the same in each format.
        """
        model, geometry = self.model, self.geometry
        draw = torch.Generator().manual_seed(0)
        heads = model.num_heads + 2 * model.num_kv_heads
        fused = torch.randn((context, heads, model.head_dim), generator=draw).to(DTYPE).to(self.device)
        q, k, v = torch.split(fused, [model.num_heads, model.num_kv_heads, model.num_kv_heads], dim=1)
        pages = list(range(1, 1 + geometry.blocks(context)))
        kv = self._kv(0)
        slots = torch.arange(context, device=self.device) + geometry.page_tokens  # from page 1 on
        kv_write(k, v, kv, slots)
        batch = AttentionBatch.build([pages], [1], [context], self.device, geometry.page_tokens)
        return self.kernels.paged_attention(q[-1:], kv, batch, model.head_dim**-0.5)[0]

    def _kv(self, layer: int) -> KvLayer:
        return KvLayer(*self.arena.kv(layer), self.arena.kv_scales(layer))

    def _random(self, rows: int, width: int) -> torch.Tensor:
        return torch.randn(rows, width, device=self.device).mul_(0.02).to(DTYPE)


def arena_pages(model: ModelShape, kv_pages: int = KV_PAGES) -> int:
    """Pages that hold the adapters of each mix, and KV cache that is too large for processor caches."""
    base, geometry = model.base(), model.geometry()
    mixes = [sum(adapter_pages(all_modules(base, rank), base, geometry) for rank in mix) for mix in MIXES.values()]
    return max(*mixes, kv_pages) + 1


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Norm of the difference, relative to that of what is expected."""
    return float((found.double() - expected.double()).norm() / expected.double().norm())


def all_modules(base: BaseShape, rank: int) -> dict[tuple[int, int], int]:
    """The rank of each module of each layer, of an adapter on all linear layers."""
    return dict.fromkeys(itertools.product(range(base.num_layers), range(len(base.modules))), rank)


def measure_machine(device: torch.device, num_bytes: int = 1 << 28, side: int = 1536) -> Machine:
    """Bandwidth of a copy of so many bytes, read and written, and speed of a product of square matrices.

    The numbers are random: on zeros a GPU needs less power and is faster.
    """
    source = torch.randn(num_bytes // 4, device=device)
    target = torch.empty_like(source)
    square = torch.randn(side, side, device=device).to(DTYPE)
    copy_s = call_s(lambda _: target.copy_(source), device)
    product_s = call_s(lambda _: torch.mm(square, square), device)
    return Machine(2 * num_bytes / copy_s, 2 * side**3 / product_s, LAUNCH_S if device.type == "cuda" else 0.0)


def call_s(run: Callable[[int], object], device: torch.device) -> float:
    """Median seconds of a call that follows others, which takes its number: on a GPU as CUDA graphs replay it."""
    if device.type != "cuda":
        return statistics.median(timings_in_turns([run], 5)[0])
    from triton.testing import do_bench_cudagraph  # not installed where there is no GPU

    numbers = itertools.count()
    with torch.inference_mode():
        return float(do_bench_cudagraph(lambda: run(next(numbers)), return_mode="median")) / 1e3


def timings_in_turns(runs: Sequence[Callable[[int], object]], calls: int) -> list[list[float]]:
    """Seconds of each call of each operation; a slow moment of the machine hits all of them."""
    seconds = [list[float]() for _ in runs]
    with torch.inference_mode():
        for call, (run, times) in itertools.product(range(2 * calls), zip(runs, seconds, strict=True)):
            started_s = time.perf_counter()
            run(call)
            times.append(time.perf_counter() - started_s)
    return [times[calls:] for times in seconds]


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Time all operations beside their floors."""
    device = torch.device("cpu")
    model = next(each for each in MODELS if each.name == options.model)
    longest = (arena_pages(model) - 1) * model.geometry().page_tokens
    if max(options.contexts, default=0) > longest:
        raise ConfigError(
            f"--contexts must be at most {longest}, which the pages of {model.name} hold", param="contexts"
        )
    if options.threads:
        torch.set_num_threads(options.threads)
    machine = measure_machine(device)
    bench = KernelBench(model, device)
    caches = [bench, KernelBench(model, device, "int8")] if options.kv_dtype == "int8" else [bench]
    found: dict[str, dict[str, Any]] = {}
    for rows in options.rows:
        decodes = [[cache.attention(rows, context) for cache in caches] for context in options.contexts]
        for works in (*([work] for work in bench.small(rows)), *decodes):
            found |= figures(works, machine, f", {rows} rows")
        for about, ranks in MIXES.items():
            for work in bench.lora(ranks, rows) if len(ranks) <= rows else ():  # the next mix takes its place
                found |= figures([work], machine, f", {rows} rows, {about}")
    found |= figures([cache.attention(1, PROMPT_TOKENS, PROMPT_TOKENS) for cache in caches], machine)
    errors = {
        context: relative_error(cache.decoded(context), bench.decoded(context))
        for context in options.contexts
        for cache in caches[1:]
    }
    for context, error in errors.items():
        print(f"attention to {context:,} tokens: int8 differs from bfloat16 by {error:.2%}", file=sys.stderr)
    return {
        "device": "cpu",
        "model": model.name,
        "gigabytes_per_s": machine.bytes_per_s / 1e9,
        "teraflops": machine.flops_per_s / 1e12,
        "operations": found,
        "int8_errors": errors,
        "table": [{"operation": name, **each} for name, each in found.items()],
    }


def figures(works: Sequence[Work], machine: Machine, where: str = "") -> dict[str, dict[str, float]]:
    """Medians of operations beside their floors, in microseconds, by their names and `where`; they are run in turns."""
    found = {}
    for work, seconds in zip(works, timings_in_turns([work.run for work in works], CALLS), strict=True):
        us, floor_us = 1e6 * statistics.median(seconds), 1e6 * machine.floor_s(work)
        found[f"{work.name}{where}"] = {"us": us, "floor_us": floor_us, "ratio": us / floor_us}
    return found


def add_options(add: AddOption) -> None:
    """Add its options."""
    add("--model", choices=[model.name for model in MODELS], default=QWEN.name, help="take the shapes of this model")
    add("--rows", type=counts, default="1,32", help="rows of a decode batch, comma-separated")
    add("--contexts", type=counts, default="128,1024", help="tokens that decode attends to, comma-separated")
    add("--kv-dtype", choices=get_args(KvDtype), default="auto", help="int8 also times attention over int8 KV cache")
    add("--threads", type=int, default=0, help="on a CPU; 0 leaves it to torch")
