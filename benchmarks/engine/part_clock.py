"""Measures where the time of a step goes: inside `timed_parts`, engines are built with a clock around each part.

For the CPU, where an operation is done when its call returns. A part's time is without that of the parts it calls.
"""

from __future__ import annotations

import itertools
import time
from collections import defaultdict
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any, ParamSpec, TypeVar
from unittest.mock import patch

from manylora.adapters.lora.step import LoraStep, PagedLora
from manylora.engine.core import EngineCore
from manylora.engine.execution import runner
from manylora.engine.execution.sampler import Sampler
from manylora.engine.model.checkpoint import weights
from manylora.engine.model.decoder import Decoder
from manylora.engine.model.linear import Linear, make_head, make_linear
from manylora.kernels.dispatch import Kernels, kernels_for

P = ParamSpec("P")
R = TypeVar("R")

GROUPS = {
    "linear layers": ("linear layers",),
    "LoRA": ("LoRA", "LoRA preparation"),
    "attention": ("attention",),
    "norms, activations, Python": ("norms", "activation", "rest of the decoder"),
    "sampling, batch, scheduling": ("sampling", "batch", "scheduling"),
}
"""Parts that tables add up. Attention includes rope and storing keys and values; the rest
of the decoder is Python."""
PARTS = tuple(itertools.chain(*GROUPS.values()))
_KERNEL_PARTS = {
    **dict.fromkeys(("rms_norm", "fused_add_rms_norm"), "norms"),
    **dict.fromkeys(("paged_attention", "attend"), "attention"),
    "silu_and_mul": "activation",
}
_FUNCTIONS = (
    (PagedLora, "prepare", "LoRA preparation"),
    (LoraStep, "apply", "LoRA"),
    (runner, "pack_step", "batch"),
    (runner, "host_rows", "batch"),
    (Decoder, "forward", "rest of the decoder"),
    (Decoder, "logits", "rest of the decoder"),
    (Sampler, "sample", "sampling"),
    (EngineCore, "pump", "scheduling"),
)
"""Functions by their owner and name, and the part that they belong to."""


class PartClock:
    """Adds up the seconds of functions by the part that they belong to.

    Args:
        now: Tells the time in seconds.
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._open: list[str] = []
        self._since_s = 0.0

    def around(self, part: str, function: Callable[P, R]) -> Callable[P, R]:
        """Wrap a function: its seconds count for `part`."""

        def run(*arguments: P.args, **keywords: P.kwargs) -> R:
            self._charge()
            self._open.append(part)
            try:
                return function(*arguments, **keywords)
            finally:
                self._charge()
                self._open.pop()

        return run

    def _charge(self) -> None:
        now_s = self._now()
        if self._open:
            self.seconds[self._open[-1]] += now_s - self._since_s
        self._since_s = now_s


@contextmanager
def timed_parts() -> Generator[PartClock]:
    """Time the parts of all engines that are built or run until the block is left."""
    clock = PartClock()

    def timed_kernels(*operands: Any) -> Kernels:  # noqa: ANN401 - those of kernels_for
        kernels = kernels_for(*operands)
        timed = {
            name: clock.around(part, getattr(kernels, name)) for name, part in _KERNEL_PARTS.items()
        }
        return replace(kernels, **timed)

    def timed_maker(make: Callable[P, Linear]) -> Callable[P, Linear]:
        def timed_linear(*arguments: P.args, **keywords: P.kwargs) -> Linear:
            return clock.around("linear layers", make(*arguments, **keywords))

        return timed_linear

    makers: dict[str, Callable[..., Any]] = {
        "kernels_for": timed_kernels,
        "make_linear": timed_maker(make_linear),
        "make_head": timed_maker(make_head),
    }
    with ExitStack() as stack:
        for name, timed in makers.items():
            stack.enter_context(patch.object(weights, name, timed))
        for owner, name, part in _FUNCTIONS:
            timed = clock.around(part, getattr(owner, name))
            stack.enter_context(patch.object(owner, name, timed))
        yield clock
