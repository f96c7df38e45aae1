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
from manylora.engine.execution.packed_step import host_rows, pack_step
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

    def timed_linear(*operands: Any, **named: Any) -> Linear:  # noqa: ANN401 - those of make_linear
        return clock.around("linear layers", make_linear(*operands, **named))

    with ExitStack() as stack:
        for owner, name, timed in (
            (weights, "kernels_for", timed_kernels),
            (weights, "make_linear", timed_linear),
            (
                weights,
                "make_head",
                lambda *operands: clock.around("linear layers", make_head(*operands)),
            ),
            (PagedLora, "prepare", clock.around("LoRA preparation", PagedLora.prepare)),
            (LoraStep, "apply", clock.around("LoRA", LoraStep.apply)),
            (runner, "pack_step", clock.around("batch", pack_step)),
            (runner, "host_rows", clock.around("batch", host_rows)),
            (Decoder, "forward", clock.around("rest of the decoder", Decoder.forward)),
            (Decoder, "logits", clock.around("rest of the decoder", Decoder.logits)),
            (Sampler, "sample", clock.around("sampling", Sampler.sample)),
            (EngineCore, "pump", clock.around("scheduling", EngineCore.pump)),
        ):
            stack.enter_context(patch.object(owner, name, timed))
        yield clock
