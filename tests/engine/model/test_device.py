from __future__ import annotations

import platform
import resource
import subprocess
import sys

import pytest
import torch

from manylora.config import usable_cores
from manylora.engine.model import device
from manylora.engine.model.device import choose_threads, has_idle_core


@pytest.mark.parametrize(
    ("setting", "asked_by_model", "is_fast", "expected"),
    [
        ("auto", "bfloat16", True, torch.bfloat16),
        ("auto", "float16", True, torch.bfloat16),
        ("auto", "bfloat16", False, torch.float32),
        ("auto", "float16", False, torch.float32),
        ("auto", "float32", True, torch.float32),
        ("auto", None, True, torch.float32),
        ("float32", "bfloat16", True, torch.float32),
        ("bfloat16", "float32", False, torch.bfloat16),
    ],
)
def test_a_cpu_computes_models_of_16_bits_in_bfloat16(
    setting: str,
    asked_by_model: str | None,
    is_fast: bool,
    expected: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(device, "has_fast_bfloat16", lambda: is_fast)
    assert device.choose_dtype(setting, asked_by_model, torch.device("cpu")) == expected


def test_tiny_models_take_one_thread_and_others_all_cores() -> None:
    assert choose_threads(0, 2 << 20) == 1
    assert choose_threads(0, 1 << 30) == usable_cores()


def test_the_setting_wins() -> None:
    assert choose_threads(3, 2 << 20) == 3


def test_a_core_is_idle_where_steps_have_fewer_threads_than_there_are_cores(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        "manylora.engine.model.device.usable_cores", lambda: torch.get_num_threads()
    )
    assert not has_idle_core()
    monkeypatch.setattr(
        "manylora.engine.model.device.usable_cores", lambda: torch.get_num_threads() + 1
    )
    assert has_idle_core()


PROGRAM = """
import platform
import resource
import torch
from manylora.engine.model.device import keep_freed_memory
torch.set_num_threads(1)
is_kept = keep_freed_memory()

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(20):
        torch.empty(40_000_000, dtype=torch.uint8).fill_(1)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

faults()
print(int(is_kept), faults())
"""
PAGES_OF_A_ROUND = 40_000_000 // resource.getpagesize()


def test_memory_that_was_freed_is_not_fetched_from_the_system_again() -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-c", PROGRAM], capture_output=True, text=True, check=True
    )
    is_kept, faults = map(int, done.stdout.split())
    if not is_kept:
        pytest.skip("a setting of newer glibc")
    assert faults < PAGES_OF_A_ROUND


FRAGMENTS = """
from pathlib import Path
import torch
from manylora.engine.model.device import keep_freed_memory
torch.set_num_threads(1)

def resident_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

before = resident_bytes()
blocks = [torch.ones(100_000, dtype=torch.uint8) for _ in range(1_000)]
kept = blocks[::20]
del blocks
freed = resident_bytes()
keep_freed_memory()
print(before, freed, resident_bytes())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc only")
def test_what_loading_freed_between_what_it_keeps_is_given_back() -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-c", FRAGMENTS], capture_output=True, text=True, check=True
    )
    before, freed, after = map(int, done.stdout.split())
    assert freed - before > 60e6, "the heap holds what was freed"
    assert after - before < 20e6
