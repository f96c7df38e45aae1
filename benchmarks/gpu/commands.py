"""Cases that are programs of their own: the tests on the device, and the same under compute-sanitizer."""

from __future__ import annotations

import importlib.util
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from weft import demo
from weft.benchmarks.gpu.case_log import Case, Figures
from weft.benchmarks.gpu.machine import MODES, Setup, mode_settings
from weft.engine.llm import LLM
from weft.engine.sampling_params import SamplingParams
from weft.errors import EngineError

ROOT = Path(__file__).resolve().parents[2]
TAIL_LINES = 15
NUM_REQUESTS = 200
SANITIZED = {
    "memcheck": "bfloat16 and (uniform-896 or deltas or attention) or captured_graph or no_distribution",
    "racecheck": "bfloat16 and (repeat or deltas) or captured_graph",
    "synccheck": "bfloat16 and repeat or captured_graph",
}
"""Tests by the tool that watches them: memory accesses, races in shared memory, barriers."""


def check_cases(setup: Setup) -> list[Case]:
    """The demo's recorded answers on this device, then the tests that want a GPU, and what the machine is."""
    tests = ["-m", "gpu", "tests/kernels", *gpu_tests(), "-q", f"--junitxml={setup.out / 'junit.xml'}"]
    if setup.jobs > 1 and importlib.util.find_spec("xdist"):
        tests += ["-n", str(setup.jobs), "--dist", "worksteal"]
    if setup.is_tiny:
        tests = ["--collect-only", "-q", "tests/test_tree.py"]
    return [
        *(Case(f"demo answers, {mode}", partial(_demo, setup, mode)) for mode in MODES),
        Case("tests", lambda _: run_command(pytest(*tests), setup, "tests")),
        Case("nvidia-smi", partial(_tool, setup, ["nvidia-smi", "-q"])),
        Case("nvcc", partial(_tool, setup, ["nvcc", "--version"])),
    ]


def gpu_tests() -> list[str]:
    """Files of tests that want a GPU, beside the kernels': others may need packages that the machine does not have."""
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    return [str(file) for file in files if file.parent.name != "kernels" and "mark.gpu" in file.read_text()]


def sanitize_cases(setup: Setup) -> list[Case]:
    """A few tests under each tool, without torch's cache of memory, which would hide accesses outside of a tensor."""
    return [Case(tool, partial(_sanitized, setup, tool, tests)) for tool, tests in SANITIZED.items()]


def _sanitized(setup: Setup, tool: str, tests: str, _: Mapping[str, Figures]) -> Figures:
    sanitizer = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "9", "--print-limit", "20"]
    command = [*sanitizer, *pytest("-m", "gpu", "tests/kernels", "-k", tests, "-q")]
    return _tool(setup, command, {}, PYTORCH_NO_CUDA_MEMORY_CACHING="1")


def pytest(*arguments: str) -> list[str]:
    """The command that runs tests in this Python."""
    return [sys.executable, "-P", "-m", "pytest", "-p", "no:cacheprovider", *arguments]


def _tool(setup: Setup, command: Sequence[str], _: Mapping[str, Figures], **environment: str) -> Figures:
    if shutil.which(command[0]) is None:
        return {"absent": f"{command[0]} is not on PATH"}
    name = command[2] if command[0] == "compute-sanitizer" else command[0]
    return run_command(command, setup, name, **environment)


def run_command(command: Sequence[str], setup: Setup, name: str, **environment: str) -> Figures:
    """Run a program; all that it prints goes to NAME.log in the folder of the results.

    Raises:
        EngineError: It failed, or the time of the verb was up.
    """
    path = setup.out / f"{name}.log"
    start_s = time.monotonic()
    inherited = os.environ  # noqa: TID251 - a program gets what this one got
    with path.open("w") as log:
        program = subprocess.Popen(
            command,
            stdout=log,
            stderr=subprocess.STDOUT,
            cwd=ROOT,
            env={**inherited, **environment},
            start_new_session=True,
        )
        try:
            status = program.wait(setup.seconds)
        except subprocess.TimeoutExpired as error:
            os.killpg(program.pid, signal.SIGKILL)  # with the programs that it started
            program.wait()
            about = f"{name} was stopped after {setup.seconds:.0f} s; {path.name} has what it printed"
            raise EngineError(about) from error
    tail = path.read_text(errors="replace").splitlines()[-TAIL_LINES:]
    if status:
        raise EngineError(f"{name} ended with status {status}: {' | '.join(tail[-3:])}")
    return {"measured": time.monotonic() - start_s, "unit": "s", "tail": tail}


def _demo(setup: Setup, mode: str, _: Mapping[str, Figures]) -> Figures:
    """Ask the shipped model for its recorded answers, adapters coming and going, with freed pages poisoned."""
    expected = json.loads(demo.EXPECTED.read_text())
    asked = [
        (question["prompt_token_ids"], name, answer)
        for question in expected["questions"]
        for name, answer in question["answers"].items()
    ]
    drawn = random.Random(0).choices(asked, k=setup.sized(NUM_REQUESTS, 20))
    settings = {"memory_gib": 1 / 512, "host_gib": 1 / 64, "max_running": 16, **mode_settings(mode)}
    with LLM(demo.MODEL, device=setup.device.type, dtype="float32", poison=True, **settings) as llm:
        answers = llm.generate(
            [prompt for prompt, _, _ in drawn],
            SamplingParams(max_tokens=64, temperature=0),
            [None if name == "base" else demo.ADAPTERS / name for _, name, _ in drawn],
        )
        status = llm.engine.core.status()
    wrong = [
        (name, found.text, answer)
        for (_, name, answer), found in zip(drawn, answers, strict=True)
        if found.text != answer
    ]
    if wrong:
        raise EngineError(f"{len(wrong)} of {len(drawn)} answers differ: {wrong[0]}")
    return {"measured": len(drawn), "unit": "answers as recorded", "loads": status.loads, "evictions": status.evictions}
