"""Keys and values scattered over poisoned pages, and the cases that cover attention."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from manylora.kernels.attention_batch import AttentionBatch
from manylora.kernels.kv_layer import KvLayer, quantise

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
NAN = float("nan")
NUM_LAYERS = 2
LAYER = 1


@dataclass(frozen=True)
class AttentionCase:
    """One call: (query rows, context) of each request and the sizes of the heads."""

    requests: tuple[tuple[int, int], ...]
    q_heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    page_tokens: int = 16
    dtype: torch.dtype = F32
    window: int | None = None
    padding_rows: int = 0
    is_int8: bool = False
    """Whether keys and values are int8 with scales."""

    def __str__(self) -> str:
        lens = ",".join(f"{rows}/{context}" for rows, context in self.requests[:4])
        kind = f"{self.q_heads}:{self.kv_heads}x{self.head_dim}p{self.page_tokens}-{str(self.dtype)[6:]}"
        return f"{lens}-{kind}-w{self.window}" + "-int8" * self.is_int8


DECODE = ((1, 1), (1, 15), (1, 16), (1, 17), (1, 100))
MIXED = ((1, 40), (20, 20), (3, 33), (12, 60), (1, 0), (17, 17), (1, 64))


def listed_batch(
    block_tables: Sequence[Sequence[int]],
    query_lens: Sequence[int],
    context_lens: Sequence[int],
    device: torch.device,
    page_tokens: int,
) -> AttentionBatch:
    """A batch of requests one after the other; the rows of one without context belong to no request."""
    sizes = [len(pages) for pages in block_tables]
    columns = zip(
        np.cumsum(query_lens) - query_lens,
        query_lens,
        np.subtract(context_lens, query_lens),
        np.cumsum(sizes) - sizes,
        strict=True,
    )
    runs = [run for run, context in zip(columns, context_lens, strict=True) if context]
    table = np.array([page for pages in block_tables for page in pages], dtype=np.int32)
    return AttentionBatch.build(
        table, np.array(runs, dtype=np.int32).reshape(-1, 4).T, page_tokens, device
    )


class ScatteredKv:
    """The operands of one call: an arena with strided layers whose unused places are NaN, page 0 zero.

    With int8, unused scales are NaN.
    """

    def __init__(
        self, case: AttentionCase, device: torch.device | str = "cpu", seed: int = 0
    ) -> None:
        self.case = case
        generator = torch.Generator().manual_seed(seed)
        blocks = [-(-context // case.page_tokens) for _, context in case.requests]
        num_pages = sum(blocks) + 5
        pages = random.Random(seed).sample(range(1, num_pages), sum(blocks))
        shape = (num_pages, NUM_LAYERS, 2, case.kv_heads, case.page_tokens, case.head_dim)
        self.arena = (
            torch.full(shape, -1, dtype=torch.int8)
            if case.is_int8
            else torch.full(shape, NAN, dtype=case.dtype)
        )
        self.scales = torch.full(shape[:-1], NAN)
        self.arena[0] = self.scales[0] = 0
        self.block_tables: list[list[int]] = []
        for count, (_, context) in zip(blocks, case.requests, strict=True):
            table, pages = pages[:count], pages[count:]
            self.block_tables.append(table)
            for start, page in zip(range(0, context, case.page_tokens), table, strict=True):
                live = min(case.page_tokens, context - start)
                values = torch.randn((2, case.kv_heads, live, case.head_dim), generator=generator)
                values = values.to(case.dtype)
                if case.is_int8:
                    values, self.scales[page, LAYER, :, :, :live] = quantise(values)
                self.arena[page, LAYER, :, :, :live] = values
        rows = sum(rows for rows, _ in case.requests) + case.padding_rows
        fused = torch.randn((rows, case.q_heads + 3, case.head_dim), generator=generator).to(
            case.dtype
        )
        self.q = fused.to(device)[
            :, 1 : case.q_heads + 1
        ]  # strided, as a slice of a fused projection
        self.arena, self.scales = self.arena.to(device), self.scales.to(device)
        self.k_pages, self.v_pages = self.arena[:, LAYER, 0], self.arena[:, LAYER, 1]
        self.kv_scales = (
            (self.scales[:, LAYER, 0], self.scales[:, LAYER, 1]) if case.is_int8 else None
        )
        self.batch = self.build(torch.device(device))
        self.scale = case.head_dim**-0.5

    @property
    def layer(self) -> KvLayer:
        return KvLayer(self.k_pages, self.v_pages, self.kv_scales, self.case.window)

    def build(self, device: torch.device) -> AttentionBatch:
        return listed_batch(
            self.block_tables,
            [rows for rows, _ in self.case.requests],
            [context for _, context in self.case.requests],
            device,
            self.case.page_tokens,
        )

    def attend(
        self, version: Callable[..., torch.Tensor], q: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The output of an implementation, for other queries than the case's own where they are given."""
        return version(self.q if q is None else q, self.layer, self.batch, self.scale)

    def attend_to(
        self,
        version: Callable[..., torch.Tensor],
        request: int,
        start: int,
        end: int,
        q: torch.Tensor,
    ) -> torch.Tensor:
        """The output for positions `start` to `end` of a request that are all there is in a step."""
        tables = [self.block_tables[request]]
        batch = listed_batch(tables, [end - start], [end], self.q.device, self.case.page_tokens)
        return version(q, self.layer, batch, self.scale)


def odd_vectors(dtype: torch.dtype = F32) -> torch.Tensor:
    """Vectors of what is hard to store in 8 bits, [14, 64].

    Narrow ones have no numbers of less than 2^-126, which CPUs and Triton's interpreter take for 0.
    """
    generator = torch.Generator().manual_seed(0)
    x = torch.randn((14, 64), generator=generator)
    x[1] *= 1e30
    x[2] *= 1e-38
    x[3] = 0
    x[4] *= 1e-43
    x[5] = torch.arange(64) / 2
    x[5, 0] = -127  # halves of a scale of 1
    x[6] = 2.0**-149  # a scale that rounds to 0
    x[7] = 190 * 2.0**-149  # which the scale, rounded down, has more than 127 times
    x[8, 40] = NAN
    x[9, 7] = math.inf
    x[10, 63] = -math.inf
    x[11, 1:] = 0
    return x if dtype == F32 else torch.where(x.abs() < 2.0**-126, 0, x).to(dtype)
