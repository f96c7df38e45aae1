from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import resource
import sys
import torch
from weft.engine.model.device import keep_freed_memory
torch.set_num_threads(1)
is_kept = sys.argv[1] == "keep" and keep_freed_memory()

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(20):
        torch.empty(40_000_000, dtype=torch.uint8).fill_(1)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

faults()
print(int(is_kept), faults())
"""
PAGES_OF_A_ROUND = 40_000_000 // resource.getpagesize()
HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def run(mode: str) -> tuple[int, int]:
    """Whether freed memory is kept, and pages that were fetched in 20 rounds; in a process of its own."""
    done = subprocess.run([sys.executable, "-P", "-c", PROGRAM, mode], capture_output=True, text=True, check=True)
    is_kept, faults = map(int, done.stdout.split())
    return is_kept, faults


def test_memory_that_was_freed_is_not_fetched_from_the_system_again() -> None:
    is_kept, faults = run("keep")
    if not is_kept:
        pytest.skip("a setting of newer glibc")
    assert faults < PAGES_OF_A_ROUND


@pytest.mark.skipif(
    HUGE_PAGES.exists() and "[always]" in HUGE_PAGES.read_text(), reason="pages are fetched by the hundred"
)
def test_without_it_large_blocks_are_fetched_every_time() -> None:
    _, faults = run("leave")
    assert faults > 10 * PAGES_OF_A_ROUND, "what this is for is no longer so: remove it"
