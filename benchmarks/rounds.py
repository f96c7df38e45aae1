"""Runs that are compared take turns: a slow minute of the machine hits all of them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

from weft.benchmarks.report import spread

N = TypeVar("N")
R = TypeVar("R")


def take_turns(names: Iterable[N], repeats: int, run: Callable[[N, int], R], first: int = 0) -> dict[N, list[R]]:
    """Run all of them in every round, in the other order in every second one.

    Args:
        names: What takes turns.
        repeats: Rounds that count: 1 to `repeats`.
        run: Runs one of them; gets its name and the round.
        first: The round to begin with. Round 0 is run to warm up; 1 leaves it out.

    Returns:
        What `run` returned in the rounds that count, by name.
    """
    runs: dict[N, list[R]] = {name: [] for name in names}
    for round_ in range(first, repeats + 1):
        for name in runs if round_ % 2 else reversed(runs):
            found = run(name, round_)
            print(f"round {round_} of {repeats}: {name}", file=sys.stderr, flush=True)
            if round_:
                runs[name].append(found)
    return runs


def ratios(over: Sequence[float], under: Sequence[float]) -> dict[str, Any]:
    """The spread of ratios that are taken within rounds."""
    return spread([one / two for one, two in zip(over, under, strict=True)])
