"""Prints the figures that the engine reaches of each goal of fairness, in virtual time."""

from __future__ import annotations

import argparse
import sys
import time

from fairness.goals import GOALS


def main() -> int:
    """The command; returns 1 if a goal is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--policy", choices=("fair", "fcfs"), default="fair")
    parser.add_argument("--only", default="", help="goals whose name has this in it")
    args = parser.parse_args()
    num_missed = 0
    for goal in GOALS:
        if args.only not in goal.name:
            continue
        started_s = time.monotonic()
        value = goal.measure(args.policy)
        num_missed += not goal.holds(value)
        verdict = "" if goal.holds(value) else "missed"
        print(
            f"{goal.name:58} {value:12.4g} {goal.bound:>10} {verdict:7} {time.monotonic() - started_s:5.1f} s",
            flush=True,
        )
    return 1 if num_missed else 0


if __name__ == "__main__":
    sys.exit(main())
