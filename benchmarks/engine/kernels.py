"""The operations of a step as the engine calls them, on random data in the shapes of a model, and their floors.

LoRA at each site for several mixes of adapters, attention at decode and over a prompt, norms and sampling. Each call
takes another layer's weights and pages; on a CPU, what is small in all layers together still comes from a cache. The
floor of an operation is the time that its bytes take at the bandwidth of a large copy or its arithmetic at the speed of
a large product. `manylora bench gpu kernels` times them, with `--cpu` on a CPU.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from manylora.adapters.base_shape import SITES, BaseShape
from manylora.adapters.lora.layout import plan_layout
from manylora.adapters.lora.step import AdapterTables, LoraStep, PagedLora
from manylora.benchmarks.model_shapes import ModelShape
from manylora.config import KvDtype
from manylora.kernels.attention_batch import AttentionBatch
from manylora.kernels.dispatch import Kernels, kernels_for
from manylora.kernels.kv_layer import KvLayer
from manylora.kernels.sampling import RowSampling, sampling_words
from manylora.memory.arena import Arena
from manylora.memory.geometry import SCALE_BYTES

DTYPE = torch.bfloat16
SCALE = 0.02
"""Standard deviation of random numbers."""
SAMPLINGS = {
    "greedy": RowSampling(temperature=0.0),
    "top-p": RowSampling(temperature=0.8, top_p=0.9, uniform=0.5),
    "top-k": RowSampling(temperature=0.8, top_k=40, uniform=0.5),
    "top-k and top-p": RowSampling(temperature=0.8, top_k=40, top_p=0.9, uniform=0.5),
}
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
    """The tensor that it adds to, if any."""


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
        num_pages: For keys and values, and for the adapters of a call of `lora`; page 0 is among them.
        kv_dtype: Of keys and values.
        kernels: The operations; those of the device when None.
        query_scale: Standard deviation of the queries of attention.
    """

    def __init__(
        self,
        model: ModelShape,
        device: torch.device,
        num_pages: int,
        kv_dtype: KvDtype = "auto",
        kernels: Kernels | None = None,
        query_scale: float = SCALE,
    ) -> None:
        self.model = model
        self.query_scale = query_scale
        self.device = device
        self.num_layers = model.num_layers
        self.base = model.base()
        self.geometry = model.geometry(kv_dtype=kv_dtype)
        self.kernels = kernels or kernels_for(device, DTYPE)
        self.arena = Arena(self.geometry, num_pages, device, DTYPE)
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
                raise ValueError(
                    f"ranks: expected adapters of fewer than {self.arena.num_pages} pages, got {ranks}"
                )
            self.tables.write(slot, layout, pages, of_modules, dict.fromkeys(of_modules, 0.5))
        lora = PagedLora(self.arena, self.tables, self.base, self.kernels)
        step = lora.prepare(sorted(row % len(ranks) for row in range(rows)))
        if step is None:
            raise AssertionError("adapters of a rank above 0 change something")
        works = []
        for index, site in enumerate(SITES):
            modules = [self.base.modules[m] for m in site.modules]
            x = self._random(rows, modules[0].in_features)
            y = self._random(rows, sum(self.base.site_widths(index)))
            weights = (
                sum(ranks) * sum(m.in_features + m.out_features for m in modules) * DTYPE.itemsize
            )
            moved = weights + x.nbytes + 2 * y.nbytes
            works.append(Work(f"LoRA {site.name}", self._applied(step, index, x, y), moved, out=y))
        return works

    def _applied(
        self, step: LoraStep, site: int, x: torch.Tensor, y: torch.Tensor
    ) -> Callable[[int], object]:
        return lambda call: step.apply(call % self.num_layers, site, x, y)

    def small(self, rows: int) -> list[Work]:
        """Operations that only pass over activations."""
        model = self.model
        kernels = self.kernels
        x = self._random(rows, model.hidden)
        residual = self._random(rows, model.hidden)
        weight = torch.ones(model.hidden, dtype=DTYPE, device=self.device)
        gate_up = self._random(rows, 2 * model.intermediate)
        return [
            Work(
                "add and norm",
                lambda _: kernels.fused_add_rms_norm(x, residual, weight, 1e-6),
                4 * x.nbytes,
            ),
            Work(
                "SiLU and product", lambda _: kernels.silu_and_mul(gate_up), gate_up.nbytes * 3 // 2
            ),
        ]

    def sampling(self, rows: int, about: str, vocab_size: int) -> list[Work]:
        """Make the choice of a token for each of `rows` rows, in one way of `SAMPLINGS`."""
        logits = torch.randn(rows, vocab_size).to(self.device)
        columns = torch.from_numpy(sampling_words([SAMPLINGS[about]] * rows)).to(self.device)
        name = f"{about} sampling"
        return [Work(name, lambda _: self.kernels.sample(logits, columns), logits.nbytes)]

    def attention(
        self, rows: int, context: int, query: int = 1, pages: Sequence[int] = ()
    ) -> list[Work]:
        """Make decode attention of `rows` requests, or of `query` tokens that end a prompt of `context` tokens.

        Their keys and values are in `pages`, which are those from the second on if none are given.
        """
        model = self.model
        geometry = self.geometry
        blocks = self.geometry.blocks(context)
        # Where the requests need more pages than there are, they share some: reading them costs the same on a CPU.
        pages = pages or [
            1 + (1 + index) % (self.arena.num_pages - 1) for index in range(rows * blocks)
        ]
        runs = np.array(
            [[row * query, query, context - query, row * blocks] for row in range(rows)],
            dtype=np.int32,
        ).T
        batch = AttentionBatch.build(
            np.array(pages, dtype=np.int32), runs, geometry.page_tokens, self.device
        )
        q = self._random(rows * query, model.num_heads * model.head_dim, self.query_scale)
        q = q.view(-1, model.num_heads, model.head_dim)
        vector_bytes = geometry.head_dim * geometry.dtype_bytes
        stored = ""
        if geometry.is_kv_int8:
            vector_bytes = geometry.head_dim + SCALE_BYTES
            stored = " of int8"
        kv_bytes = rows * context * vector_bytes * 2 * model.num_kv_heads
        layers = [
            KvLayer(*self.arena.kv(layer), self.arena.kv_scales(layer))
            for layer in range(self.num_layers)
        ]

        def attend(call: int) -> object:
            return self.kernels.paged_attention(
                q, layers[call % self.num_layers], batch, model.head_dim**-0.5
            )

        flops = 4 * len(q) * (context - query / 2) * model.num_heads * model.head_dim
        name = f"attention, {'context' if query == 1 else 'prompt of'} {context}{stored}"
        return [Work(name, attend, kv_bytes + 2 * q.nbytes, flops)]

    def _random(self, rows: int, width: int, scale: float = SCALE) -> torch.Tensor:
        """Random numbers, drawn on the host, so that those for two devices can be the same."""
        return torch.randn(rows, width).mul_(scale).to(self.device, DTYPE)


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Norm of the difference, relative to that of what is expected."""
    return float((found.double() - expected.double()).norm() / expected.double().norm())


def all_modules(base: BaseShape, rank: int) -> dict[tuple[int, int], int]:
    """The rank of each module of each layer, of an adapter on all linear layers."""
    return dict.fromkeys(itertools.product(range(base.num_layers), range(len(base.modules))), rank)


def measure_machine(device: torch.device, num_bytes: int, side: int) -> Machine:
    """Measure the bandwidth of a copy, read and written, and the speed of a product of square matrices.

    The numbers are random: on zeros a GPU needs less power and is faster.
    """
    source = torch.randn(num_bytes // 4, device=device)
    target = torch.empty_like(source)
    square = torch.randn(side, side, device=device).to(DTYPE)
    copy_s = call_s(lambda _: target.copy_(source), device)
    product_s = call_s(lambda _: torch.mm(square, square), device)
    return Machine(
        2 * num_bytes / copy_s, 2 * side**3 / product_s, LAUNCH_S if device.type == "cuda" else 0.0
    )


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
        for call, (run, times) in itertools.product(
            range(2 * calls), zip(runs, seconds, strict=True)
        ):
            started_s = time.perf_counter()
            run(call)
            times.append(time.perf_counter() - started_s)
    return [times[calls:] for times in seconds]
