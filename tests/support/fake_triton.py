"""Launches of Triton kernels without a GPU: Triton binds and specialises their arguments, and nothing is computed.

Where Triton would compile a kernel, a variant of it is counted. Operands may be on a CPU or on `meta`.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

_devices = itertools.count(1000)


@dataclass(frozen=True)
class Launch:
    """One launch."""

    kernel: str
    grid: tuple[int, int, int]


@dataclass
class FakeTriton:
    """What was launched, and what it would have been compiled for."""

    launches: list[Launch] = field(default_factory=list)
    variants: Counter[str] = field(default_factory=Counter)
    """How many times each kernel would have been compiled."""

    @property
    def counts(self) -> Counter[str]:
        """Launches of each kernel."""
        return Counter(launch.kernel for launch in self.launches)


class _Driver:
    """A device that nothing was compiled for yet."""

    def __init__(self) -> None:
        self.device = next(_devices)

    def get_current_device(self) -> int:
        return self.device

    def get_current_stream(self, *_: object) -> int:
        return 0

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)


class _Kernel:
    """Stands for a compiled variant."""

    function = 0
    packed_metadata = ()

    def __init__(self, name: str, fake: FakeTriton) -> None:
        self.name, self.fake = name, fake

    def launch_metadata(self, *_: object) -> None:
        return None

    def run(self, x: int, y: int, z: int, *_: object) -> None:
        self.fake.launches.append(Launch(self.name, (x, y, z)))


@contextmanager
def fake_triton() -> Iterator[FakeTriton]:
    """Count launches and variants while it lasts, from no variants on. Not for a process that interprets kernels."""
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    fake, device = FakeTriton(), _Driver()

    def compiled(kernel: Any, key: str, *_: object) -> _Kernel:
        name = kernel.fn.__name__
        fake.variants[name] += 1
        kernel.device_caches[device.device][0][key] = found = _Kernel(name, fake)
        return found

    with (
        mock.patch.object(driver, "_active", device),
        mock.patch.object(JITFunction, "_do_compile", compiled),
    ):
        yield fake
