"""Plays many seeds of the simulation on all cores, or one, told pump by pump; scripts/simulate calls it."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from itertools import repeat
from typing import Literal

from simulation.compare import compare_overlap
from simulation.engine import Simulation, SimulationError, simulate
from simulation.scenario import Scenario, draw

BATCH = 50
MAX_SHOWN = 5

Mode = Literal["apart", "overlap", "compare"]


def play(first: int, count: int, mode: Mode) -> tuple[Counter[str], list[str]]:
    """Play some seeds; returns counts of what happened, and the failures."""
    counts: Counter[str] = Counter()
    failures: list[str] = []
    for seed in range(first, first + count):
        try:
            if mode == "compare":
                counts["requests with the same end"] += compare_overlap(seed)
            else:
                counts += simulate(seed, overlaps=mode == "overlap")
        except AssertionError as error:
            failures.append(str(error))
    return counts, failures


def play_all(first: int, count: int, mode: Mode) -> int:
    """Play seeds on all cores; returns the exit status."""
    started_s = time.monotonic()
    counts: Counter[str] = Counter()
    failures: list[str] = []
    starts = range(first, first + count, BATCH)
    sizes = [min(BATCH, first + count - start) for start in starts]
    with ProcessPoolExecutor(os.cpu_count()) as workers:
        for done, (batch_counts, batch_failures) in enumerate(
            workers.map(play, starts, sizes, repeat(mode)), 1
        ):
            counts += batch_counts
            for failure in batch_failures[: max(MAX_SHOWN - len(failures), 0)]:
                print(f"\r{failure}\n")
            failures += batch_failures
            print(
                f"\r{min(done * BATCH, count)} of {count} seeds, {len(failures)} failed",
                end="",
                flush=True,
            )
    del counts["fingerprint"]
    print(f", {time.monotonic() - started_s:.0f} s")
    for kind, number in sorted(counts.items()):
        print(f"  {kind:32} {number:12,}")
    return 1 if failures else 0


def tell(scenario: Scenario, *, overlaps: bool) -> int:
    """Play one seed and tell what happens; returns the exit status."""
    for name, value in _facts(scenario):
        print(f"{name} = {value}")
    simulation = Simulation(scenario, overlaps=overlaps)
    simulation.on_event = print
    try:
        counts = simulation.run()
    except SimulationError as error:
        print(error)
        return 1
    print(dict(counts))
    return 0


def _facts(scenario: Scenario) -> Iterator[tuple[str, object]]:
    for name in scenario.__dataclass_fields__:
        if name != "actions":
            yield name, getattr(scenario, name)


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="scripts/simulate", description=__doc__)
    parser.add_argument("--seeds", type=int, default=10_000, help="how many (default 10000)")
    parser.add_argument("--first", type=int, default=0, help="the first of them (default 0)")
    parser.add_argument("--seed", type=int, help="play this one alone and tell what happens")
    parser.add_argument(
        "--overlap", action="store_true", help="launch each step before the one before it is read"
    )
    parser.add_argument(
        "--compare",
        action="store_true",
        help="play each twice, with --overlap and without, and compare",
    )
    args = parser.parse_args()
    if args.seed is not None:
        return tell(draw(args.seed), overlaps=args.overlap)
    return play_all(
        args.first,
        args.seeds,
        "compare" if args.compare else "overlap" if args.overlap else "apart",
    )


if __name__ == "__main__":
    sys.exit(main())
