"""Compiles a kernel for sm_90 without a GPU, inside and outside of a watch, and prints what the watch found.

A program, not to be imported: it needs a process in which TRITON_INTERPRET is not set. Prints one JSON object.
"""

from __future__ import annotations

import json
import logging

import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from compile_watch import no_compiles
from manylora.kernels.triton.compiles import CompileWatch


class NoDevice:
    """A driver that knows what to compile for, and has nothing to run it on."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


@triton.jit  # type: ignore[untyped-decorator]
def add_kernel(x, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    i = tl.arange(0, BLOCK)
    tl.store(x + i, tl.load(x + i, mask=i < n) + 1, mask=i < n)


def add(n: int, block: int) -> None:
    add_kernel.warmup(torch.float32, n, BLOCK=block, grid=(1,))


def main() -> None:
    driver.set_active(NoDevice())
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("manylora.kernels.triton.compiles").addHandler(handler)
    seen: list[str] = []
    triton.knobs.runtime.jit_post_compile_hook = lambda **of_kernel: seen.append(
        of_kernel["fn"].name
    )
    add(100, 16)
    watch = CompileWatch()
    watch.begin()
    watch.begin()
    add(101, 16)
    with no_compiles():
        add(102, 16)
    complaint = ""
    try:
        with no_compiles():
            add(100, 32)
    except AssertionError as error:
        complaint = str(error)
    later = CompileWatch().begin()
    add(112, 16)  # it divides by 16
    watch.end()
    add(100, 64)
    later.end()
    add(100, 128)
    print(
        json.dumps(
            {
                "counts": watch.counts,
                "later": later.counts,
                "messages": messages,
                "complaint": complaint,
                "seen_by_the_hook_before": len(seen),
            }
        )
    )


if __name__ == "__main__":
    main()
