from __future__ import annotations

import platform
import resource
import subprocess
import sys

import pytest

PROGRAM = """
import resource
import sys
import torch
from weft.engine.model.heap import keep_freed_memory
torch.set_num_threads(1)
if sys.argv[1] == "keep":
    assert keep_freed_memory()

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(20):
        torch.empty(40_000_000, dtype=torch.uint8).fill_(1)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

faults()
print(faults())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="a setting of glibc")
def test_memory_that_was_freed_is_not_fetched_from_the_system_again() -> None:
    def faults(mode: str) -> int:
        done = subprocess.run([sys.executable, "-P", "-c", PROGRAM, mode], capture_output=True, text=True, check=True)
        return int(done.stdout)

    pages_of_a_round = 40_000_000 // resource.getpagesize()
    assert faults("keep") < pages_of_a_round
    assert faults("leave") > 10 * pages_of_a_round, "what this is for is no longer so: remove it"
