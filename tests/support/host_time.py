"""How long the host takes for a decode step of 32 rows of an 8B model: a program, python -P tests/support/host_time.py.

Milliseconds of thread time, the median of 25 steps. Triton binds its arguments and launches nothing, linear layers
allocate their output alone, as in `step_device`, and no pages are zeroed. A replayed step stands for a CUDA graph: one
call that does nothing.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
from fake_triton import fake_triton
from manylora.engine.execution.packed_step import pack_step
from manylora.engine.execution.step_programs import StepPrograms
from manylora.engine.sampling_params import SamplingParams
from meta_step import LLAMA, a_plan, step_device

CPU = torch.device("cpu")


def thread_ms(run: Callable[[], object]) -> float:
    """Median milliseconds of this thread."""
    run()
    run()
    seconds = []
    for _ in range(25):
        started_s = time.thread_time()
        run()
        seconds.append(time.thread_time() - started_s)
    return statistics.median(seconds) * 1e3


@torch.inference_mode()
def main() -> None:
    """Print base and 32 adapters, launched one by one and replayed."""
    torch.set_num_threads(1)
    device, found = step_device(CPU), {}
    params = SamplingParams(temperature=0.7, top_p=0.9)
    with fake_triton():
        for name, num_adapters in (("base", 0), ("32 adapters", 32)):
            for mode in ("eager", "replayed"):
                plan = a_plan([1024] * 32, num_adapters, params)

                def capture(launch: Callable[[], None]) -> Callable[[], None]:
                    launch()
                    return lambda: None

                programs = StepPrograms(device, max_running=32, capture=None)

                def step(plan=plan, programs=programs) -> None:  # type: ignore[no-untyped-def]
                    packed = pack_step(plan, LLAMA.geometry(), device.arena.num_pages)
                    program = programs.program(packed)
                    program.load(
                        packed, [chunk.sample for chunk in plan.chunks if chunk.sample], None
                    )
                    program.run()
                    program.collect()

                step()
                if mode == "replayed":
                    for program in programs.decode.values():
                        program.record(capture)
                found[f"{name}, {mode}"] = round(thread_ms(step), 2)
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
