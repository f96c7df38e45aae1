"""Launch constants of the Triton kernels that were measured to be best, by architecture and kernel.

A launcher calls `plan` with its default constants. The constants decide the speed of a kernel and the order of its
sums, so they must not change while an engine lives. `scripts/gpu kernels` measures other constants and writes the
faster ones; its file becomes `plans.json` beside this one.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import torch

PLANS = Path(__file__).with_name("plans.json")
"""{architecture: {kernel: {constant: value}}}. The file may be missing."""


asked: dict[str, dict[str, int]] = {}
"""Last result of `plan` by kernel: the constants that a benchmark can vary."""
_trials: dict[str, dict[str, int]] = {}


def plan(kernel: str, **constants: int) -> dict[str, int]:
    """The constants to launch a kernel with.

    Args:
        kernel: Its name, with the sizes that the choice depends on: `items`, `shrink 4096 16`.
        **constants: Defaults of the launcher, for a kernel that was not measured.

    Raises:
        ValueError: The plan has constants that the launcher does not know.
    """
    better = _trials.get(kernel) or measured(architecture()).get(kernel, {})
    if better.keys() - constants.keys():
        unknown = sorted(set(better) - set(constants))
        raise ValueError(
            f"plan of {kernel}: expected constants of {sorted(constants)}, got {unknown}"
        )
    asked[kernel] = {**constants, **better}
    return dict(asked[kernel])


@contextmanager
def trying(kernel: str, **constants: int) -> Iterator[None]:
    """Make `plan` return these constants for a kernel until the block is left."""
    _trials[kernel] = constants
    try:
        yield
    finally:
        del _trials[kernel]


@cache
def architecture() -> str:
    """Architecture of the current GPU, such as `sm90`; `cpu` without a GPU."""
    if not torch.cuda.is_available():
        return "cpu"
    major, minor = torch.cuda.get_device_capability()
    return f"sm{major}{minor}"


@cache
def measured(of: str) -> dict[str, dict[str, int]]:
    """The constants in `PLANS` for an architecture."""
    if not PLANS.exists():
        return {}
    found: dict[str, dict[str, int]] = json.loads(PLANS.read_text()).get(of, {})
    return found
