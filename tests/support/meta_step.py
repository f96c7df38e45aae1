"""The whole step of an 8B model on the `meta` device: what is launched and copied, without a GPU and without numbers.

Triton binds and specialises its arguments and launches nothing (`fake_triton`). Reading a number from the device raises
by itself there.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from manylora.adapters.base_shape import MODULE_PATHS
from manylora.adapters.lora.layout import plan_layout
from manylora.adapters.lora.step import AdapterTables, PagedLora
from manylora.adapters.residency.entry import SlotLease
from manylora.benchmarks.model_shapes import MODELS
from manylora.engine.execution.sampler import Sampler
from manylora.engine.execution.step_program import StepDevice
from manylora.engine.model.decoder import Decoder, DecoderLayer
from manylora.engine.model.linear import Linear
from manylora.engine.sampling_params import SamplingParams
from manylora.engine.scheduling.plan import Chunk, SampleSpec, StepPlan
from manylora.engine.scheduling.request_pages import BlockTable
from manylora.kernels.attend import HeadNorms
from manylora.kernels.dispatch import triton_kernels
from manylora.memory.arena import Arena

META, BF16 = torch.device("meta"), torch.bfloat16
LLAMA = next(shape for shape in MODELS if shape.name == "Llama-3-8B")
VOCAB_SIZE, MAX_MODEL_LEN, NUM_PAGES, SLOTS, RANK = 128_256, 131_072, 50_001, 256, 16
FREE = {
    *(
        "view",
        "as_strided",
        "slice",
        "select",
        "split",
        "split_with_sizes",
        "empty",
        "new_empty",
        "empty_like",
    ),
    *(
        "transpose",
        "t",
        "unsqueeze",
        "expand",
        "detach",
        "alias",
        "_unsafe_view",
        "empty_strided",
        "squeeze",
    ),
    *("permute", "unbind", "new_empty_strided", "lift_fresh", "flatten"),
}
"""Operations of torch that launch nothing."""


def step_device(device: torch.device = META, *, has_head_norms: bool = False) -> StepDevice:
    """The 8B shape, with rank 16 on all linear layers in 64 adapter slots. Linear layers compute nothing on a CPU."""
    # A CPU would take longer to move logits of the whole vocabulary than for all of the step.
    vocab_size = VOCAB_SIZE if device == META else 1024
    spec = replace(LLAMA.spec(), vocab_size=vocab_size)
    geometry, base, kernels = LLAMA.geometry(), LLAMA.base(), triton_kernels()
    arena = Arena(geometry, NUM_PAGES if device == META else 4001, device, BF16)
    tables = AdapterTables(SLOTS, base, 64, geometry, device)
    ranks = {
        (layer, module): RANK
        for layer in range(LLAMA.num_layers)
        for module in range(len(MODULE_PATHS))
    }
    layout = plan_layout(ranks, base, geometry)
    for slot in range(64):
        pages = [
            1 + (slot * layout.num_pages + page) % (NUM_PAGES - 1)
            for page in range(layout.num_pages)
        ]
        tables.write(slot, layout, pages, ranks, dict.fromkeys(ranks, 0.5))
    half = LLAMA.head_dim // 2
    table = torch.zeros(MAX_MODEL_LEN if device == META else 8192, half, device=device)
    hidden, norm = LLAMA.hidden, torch.empty(LLAMA.hidden, dtype=BF16, device=device)
    head_norm = torch.empty(LLAMA.head_dim, dtype=BF16, device=device)
    head_norms = HeadNorms(head_norm, head_norm, 1e-6) if has_head_norms else None
    kv_width = LLAMA.num_kv_heads * LLAMA.head_dim
    layers = [
        DecoderLayer(
            input_norm=norm,
            qkv=_linear(hidden + 2 * kv_width, hidden, device),
            head_norms=head_norms,
            o=_linear(hidden, hidden, device),
            post_norm=norm,
            gate_up=_linear(2 * LLAMA.intermediate, hidden, device),
            down=_linear(hidden, LLAMA.intermediate, device),
        )
        for _ in range(LLAMA.num_layers)
    ]
    decoder = Decoder(
        spec=spec,
        kernels=kernels,
        embedding=torch.empty(vocab_size, hidden, dtype=BF16, device=device),
        layers=layers,
        norm=norm,
        head=_linear(vocab_size, hidden, device),
        rope=(table, table),
    )
    return StepDevice(
        decoder=decoder,
        arena=arena,
        lora=PagedLora(arena, tables, base, kernels),
        sampler=Sampler(kernels),
        max_samples=64,
        max_rows=2048,
        max_model_len=MAX_MODEL_LEN,
    )


def _linear(out_features: int, in_features: int, device: torch.device) -> Linear:
    if device == META:
        weight = torch.empty(out_features, in_features, dtype=BF16, device=META)
        return partial(torch.nn.functional.linear, weight=weight)
    return lambda x: torch.empty((len(x), out_features), dtype=BF16)


def a_plan(
    contexts: Sequence[int], num_adapters: int, params: SamplingParams, rows: int = 1, seed: int = 0
) -> StepPlan:
    """A step of so many rows for each request, whose adapters take turns; none without adapters."""
    rng, geometry = random.Random(seed), LLAMA.geometry()
    chunks = []
    for index, context in enumerate(contexts):
        table = BlockTable(geometry)
        table.append(
            [rng.randrange(1, 4001) for _ in range(geometry.blocks(context) * geometry.num_groups)]
        )
        slot = index * 7 % num_adapters if num_adapters else None
        chunks.append(
            Chunk(
                request_id=str(index),
                token_ids=[5] * rows,
                start=context - rows,
                block_table=table.pages,
                adapter=None
                if slot is None
                else SlotLease(slot=slot, generation=1, digest=str(slot)),
                sample=SampleSpec(params=params, seed=index, choice_index=0, output_index=index),
            )
        )
    return StepPlan(step=1, chunks=chunks, zero_pages=[1, 2])


@dataclass
class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """What torch does while it lasts."""

    operations: Counter[str] = field(default_factory=Counter)
    """Those that launch a kernel."""
    copies: int = 0
    """From the host to the device."""
    reads: int = 0
    """From the device to the host."""
    allocations: int = 0
    """Tensors on the device that are no views."""

    def __post_init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name == "copy_" and args[0].device.type != args[1].device.type:
            if args[0].device == META:
                self.copies += 1
            else:
                self.reads += 1
            return args[0]
        is_moved = name == "_to_copy" and (kwargs or {}).get("device", META) == META
        self.copies += is_moved and args[0].device != META
        out = func(*args, **(kwargs or {}))
        parts = out if isinstance(out, (tuple, list)) else (out,)
        if any(isinstance(part, torch.Tensor) and part.device == META for part in parts):
            is_new = all(each.alias_info is None for each in func._schema.returns)
            self.allocations += is_new
            if name not in FREE:
                self.operations[name] += 1
        return out
