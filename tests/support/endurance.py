"""What a server holds between rounds of requests, and whether that grows."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import psutil

from idleness import seconds_until_idle
from weft_server import WeftServer

WARM_UP = 0.5
"""The part of all samples in which caches and pools of threads may still fill."""
SPAN = 4
"""Rounds between two samples that are compared: RSS grows by a MB at a time, so too few show nothing."""
LATE = {"processes": 0, "threads": 1, "fds": 3, "pages": 0}
"""What may come after the warm-up and is no leak: the last connection of a pool, with its thread and its files."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A server's processes while nothing runs."""

    requests: int
    """Answered until then."""
    processes: int
    threads: int
    fds: int
    rss_bytes: int
    pages: int
    """Pages of the pool, free ones included."""


def sample(server: WeftServer, requests: int) -> Sample:
    """Wait until nothing runs, and look at the server and all its children."""
    seconds_until_idle(server)
    parent = psutil.Process(server.process.pid)
    processes = [parent, *parent.children(recursive=True)]
    return Sample(
        requests=requests,
        processes=len(processes),
        threads=sum(process.num_threads() for process in processes),
        fds=sum(process.num_fds() for process in processes),
        rss_bytes=sum(process.memory_info().rss for process in processes),
        pages=sum(server.engine()["pages"].values()),
    )


def growth(samples: Sequence[Sample], *, max_bytes_per_request: float) -> dict[str, str]:
    """What grew after the warm-up, with the figures; empty when nothing did."""
    warm = samples[round(len(samples) * WARM_UP) :]
    grown = {
        name: f"{lowest} at the least in the end, {highest} at the most before"
        for name, late in LATE.items()
        for lowest, highest in [_end_and_begin([getattr(each, name) for each in warm])]
        if lowest > highest + late
    }
    slope = bytes_per_request(warm)
    if slope > max_bytes_per_request:
        grown["rss"] = f"{slope:.0f} bytes per request, {max_bytes_per_request:.0f} allowed"
    return grown


def bytes_per_request(samples: Sequence[Sample]) -> float:
    """The median slope of RSS between samples that are SPAN rounds apart, which a few single jumps do not move.

    Such a jump is the first meeting of some adapters, for which oneDNN compiles kernels. What is lost with each request
    is in every slope.
    """
    return statistics.median(
        (later.rss_bytes - earlier.rss_bytes) / (later.requests - earlier.requests)
        for earlier, later in zip(samples, samples[SPAN:], strict=False)
    )


def _end_and_begin(counts: list[int]) -> tuple[int, int]:
    """The least of the last third and the most of the first: what only wavers does not grow by them."""
    third = len(counts) // 3
    return min(counts[-third:]), max(counts[:third])
