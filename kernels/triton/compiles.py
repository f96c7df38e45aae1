"""Watch over compilations of Triton kernels while requests are served: each compilation holds all requests up.

Triton compiles a kernel for every new combination of constants, of integers that are 1 or divide by 16, and of pointers
that are 16-byte aligned. All kernels of steps are compiled before the first request, so a later compilation is an error
of a launcher. A kernel from Triton's cache on disk counts too, since loading it also holds a step up.
"""

from __future__ import annotations

import logging
import sys
from collections import Counter
from typing import Any

logger = logging.getLogger(__name__)


class CompileWatch:
    """Counts compilations by kernel and logs each, from `begin` to `end`. Thread: any may compile.

    Triton has one place for the hook. The hook that stood there before is called too, so watches may overlap.
    """

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        """Compilations since `begin`, by the kernel's name."""
        self._runtime: Any = None
        """Triton's object with the hook; None while this does not watch."""
        self._hook_before: Any = None

    def begin(self) -> CompileWatch:
        """Watch from now on; returns itself. Does nothing where Triton was not imported, as on a CPU."""
        triton = sys.modules.get("triton")
        if triton is not None and self._runtime is None:
            self._runtime = triton.knobs.runtime
            self._hook_before = self._runtime.jit_post_compile_hook
            self._runtime.jit_post_compile_hook = self._compiled
        return self

    def end(self) -> None:
        """Stop watching; the counts stay."""
        runtime, self._runtime = self._runtime, None
        # If a later watch has the place, it still calls this one, which hands on.
        if runtime is not None and runtime.jit_post_compile_hook == self._compiled:
            runtime.jit_post_compile_hook = self._hook_before

    def __enter__(self) -> CompileWatch:
        return self.begin()

    def __exit__(self, *_: object) -> None:
        self.end()

    def _compiled(self, **of_kernel: Any) -> None:
        if self._runtime is not None:
            kernel = of_kernel["fn"]
            self.counts[kernel.name] += 1
            logger.warning(
                "a kernel was compiled while requests are served: %s(%s)",
                kernel.name,
                _variant(kernel.jit_function.arg_names, of_kernel["compile"]),
            )
        if self._hook_before:
            self._hook_before(**of_kernel)


def _variant(names: list[str], compiled: dict[str, Any]) -> str:
    """Name of a variant: its constants, and the arguments that are known to divide by 16."""
    constants = [f"{names[place[0]]}={value}" for place, value in compiled["constants"].items()]
    attributes: dict[tuple[int, ...], Any] = compiled["configs"][0]
    aligned = [
        names[place[0]] for place, found in attributes.items() if ["tt.divisibility", 16] in found
    ]
    options = [f"{option}={compiled[option]}" for option in ("num_warps", "num_stages")]
    return "; ".join(
        (", ".join((*constants, *options)), f"dividing by 16: {', '.join(aligned) or 'none'}")
    )
