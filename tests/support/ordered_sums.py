"""Matrix products of Triton's interpreter, whose sums have one order on every CPU and for every shape.

The interpreter takes numpy's, which are BLAS's: the order of a sum depends on the CPU and on the shape of the operands.
On a GPU it depends on neither, which is what tests of equal bits rest on.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from triton.runtime import interpreter


def order_sums() -> None:
    """Replace the interpreter's matrix product in this process."""
    interpreter.InterpreterBuilder.create_dot = _create_dot


def _create_dot(_: object, a: Any, b: Any, initial: Any, *__: object) -> interpreter.TensorHandle:
    total = np.zeros_like(initial.data)
    with np.errstate(all="ignore"):  # a matrix product of numpy's warns of no NaN either
        for k in range(a.data.shape[-1]):
            total += np.multiply(a.data[..., k : k + 1], b.data[..., k : k + 1, :], dtype=total.dtype)
        total += initial.data
    return interpreter.TensorHandle(total, initial.dtype.scalar)
