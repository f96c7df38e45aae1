"""The device of a run: what it is, what it can do at best, and how work on it is timed."""

from __future__ import annotations

import gc
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import torch

from weft.benchmarks.engine.kernels import Machine
from weft.benchmarks.model_shapes import MODELS, ModelShape
from weft.config import ModelConfig

N = TypeVar("N", int, float)
MODES = ("graph", "eager")
"""Whether the engine captures its decode steps."""
GRAPH_SETTING = "cuda_graphs"
GRAPH_CALLS = 20
"""Calls that one captured graph holds. A launch of it is then far shorter than what it computes."""
REPLAYS = 30
TINY = ModelShape("tiny", num_layers=2, hidden=64, intermediate=160, num_heads=4, num_kv_heads=2)
LAUNCH_S = 3e-6
"""The least time of one kernel in a graph."""
_QUERY = "driver_version,clocks.sm,clocks.max.sm,clocks.mem,power.draw,temperature.gpu,memory.used,memory.total"


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What the cases of a verb run on."""

    device: torch.device
    out: Path
    """Folder of the results."""
    is_tiny: bool = False
    """Whether sizes are those of a toy, so that the verbs can be tested on a CPU."""
    jobs: int = 1
    """Processes for tests."""
    seconds: float = 540.0
    """That the verb may take."""

    @property
    def model(self) -> ModelShape:
        """Its sizes are those of the operations and steps."""
        return TINY if self.is_tiny else MODELS[0]

    @property
    def vocab_size(self) -> int:
        """Of the steps."""
        return 512 if self.is_tiny else 128_256

    @property
    def scratch(self) -> Path:
        """Folder for generated adapters, which are too large for that of the results."""
        return self.out / "model" if self.is_tiny else Path(tempfile.gettempdir()) / f"weft-{self.model.name}"

    @cached_property
    def machine(self) -> Machine:
        """What the device can do at best, measured once."""
        return measure_machine(self.device, is_tiny=self.is_tiny)

    def sized(self, full: N, tiny: N) -> N:
        """A size of the real run, or of the toy."""
        return tiny if self.is_tiny else full


def measure_machine(device: torch.device, *, is_tiny: bool = False) -> Machine:
    """Bandwidth of a large copy, counting bytes read and written, and speed of a large product, of random numbers."""
    num_bytes, side = (1 << 22, 128) if is_tiny else (1 << 32, 8192)
    source = torch.randn(num_bytes // 4, device=device)
    target = torch.empty_like(source)
    square = torch.randn(side, side, device=device).to(torch.bfloat16)
    copy_s = per_call_s(lambda _: target.copy_(source), device, calls=2)
    product_s = per_call_s(lambda _: torch.mm(square, square), device, calls=2)
    return Machine(2 * num_bytes / copy_s, 2 * side**3 / product_s, LAUNCH_S)


def mode_settings(mode: str) -> dict[str, bool]:
    """Settings of `model` for one of `MODES`; none where this engine captures no graphs."""
    return {GRAPH_SETTING: mode == MODES[0]} if GRAPH_SETTING in {each.name for each in fields(ModelConfig)} else {}


class Timer:
    """Calls that follow each other, again and again: on CUDA as one graph, each replay between two events.

    Args:
        run: The work; takes the number of the call, which says what data to take.
        device: Where it runs. On a CPU the host's clock stands in for the events.
        calls: Calls of one pass.
    """

    def __init__(self, run: Callable[[int], object], device: torch.device, calls: int) -> None:
        self._run, self._calls = run, calls
        self._graph: torch.cuda.CUDAGraph | None = None
        self._pass()  # compiles the kernels
        if device.type == "cuda":
            torch.cuda.synchronize()
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph):
                self._pass()

    def seconds(self, passes: int) -> list[float]:
        """Seconds of each pass."""
        if self._graph is None:
            return [timed_s(self._pass) for _ in range(passes)]
        pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(passes)]  # type: ignore[no-untyped-call]
        self._graph.replay()
        for start, end in pairs:
            start.record()
            self._graph.replay()
            end.record()
        torch.cuda.current_stream().synchronize()
        return [start.elapsed_time(end) / 1e3 for start, end in pairs]

    @torch.inference_mode()
    def _pass(self) -> None:
        for call in range(self._calls):
            self._run(call)


def timed_s(run: Callable[[], object]) -> float:
    """Seconds of a call on the host's clock."""
    start_s = time.perf_counter()
    run()
    return time.perf_counter() - start_s


def per_call_s(run: Callable[[int], object], device: torch.device, calls: int = GRAPH_CALLS) -> float:
    """Median seconds of a call among `calls` that follow each other."""
    passes = REPLAYS if device.type == "cuda" else 2
    return statistics.median(Timer(run, device, calls).seconds(passes)) / calls


def release(device: torch.device) -> bool:
    """Give memory back that nothing refers to any more; returns whether the device still works."""
    gc.collect()
    if device.type != "cuda":
        return True
    try:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    except RuntimeError:
        return False
    return True


def describe_device(device: torch.device) -> dict[str, Any]:
    """What a result was measured on; of a GPU also its driver, clocks, power and temperature as they are now."""
    about: dict[str, Any] = {"name": device.type, "cuda": torch.version.cuda}
    if device.type == "cuda":
        found = torch.cuda.get_device_properties(device)
        about |= {"capability": f"{found.major}.{found.minor}", "multiprocessors": found.multi_processor_count}
        about |= {"name": found.name, "memory_gib": found.total_memory / (1 << 30)}
    if shutil.which("nvidia-smi"):
        command = ["nvidia-smi", f"--query-gpu={_QUERY}", "--format=csv,noheader"]
        told = subprocess.run(command, capture_output=True, text=True, check=False).stdout
        about |= dict(zip(_QUERY.split(","), told.strip().split(", "), strict=False))
    return about
