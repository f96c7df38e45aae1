"""Triton's interpreter with matrix products that are the same on every CPU, and with less work for each call.

The interpreter takes numpy's products, which are BLAS's: the order of a sum depends on the CPU and on the shape of the
operands. On a GPU it depends on neither, which is what tests of equal bits rest on.
"""

from __future__ import annotations

import functools
from types import FunctionType, ModuleType
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter

_launch = interpreter.GridExecutor.__call__
_patched: set[frozenset[str]] = set()
"""Language modules of functions called in this launch."""


def tune_interpreter() -> None:
    """Change the interpreter of this process."""
    interpreter.InterpreterBuilder.create_dot = _create_dot
    interpreter.GridExecutor.__call__ = _launch_kernel
    interpreter.InterpretedFunction.__call__ = _call_function


def _create_dot(_: object, a: Any, b: Any, initial: Any, *__: object) -> interpreter.TensorHandle:
    """Multiply matrices, and add one product after the other to each sum."""
    total = np.zeros_like(initial.data)
    with np.errstate(all="ignore"):  # a matrix product of numpy's warns of no NaN either
        for k in range(a.data.shape[-1]):
            total += np.multiply(
                a.data[..., k : k + 1], b.data[..., k : k + 1, :], dtype=total.dtype
            )
        total += initial.data
    return interpreter.TensorHandle(total, initial.dtype.scalar)


def _launch_kernel(executor: Any, *args: object, **kwargs: object) -> None:
    _patched.clear()
    _launch(executor, *args, **kwargs)


def _call_function(function: Any, *args: object, **kwargs: object) -> object:
    """Call a function of a kernel. The interpreter changes the language at each call; here once for each launch."""
    modules = _language_of(function.fn)
    if modules not in _patched:
        interpreter._patch_lang(function.fn)
        _patched.add(modules)
    try:
        return function.rewrite()(*args, **kwargs)
    except Exception as error:
        raise interpreter.InterpreterError(repr(error)) from error


@functools.cache
def _language_of(function: FunctionType) -> frozenset[str]:
    found = (value for value in function.__globals__.values() if isinstance(value, ModuleType))
    return frozenset(module.__name__ for module in found if module in (tl, tl.core))
