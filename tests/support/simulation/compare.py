"""Plays a scenario with overlapping steps and without; each request must get the same."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from simulation.engine import Simulation
from simulation.scenario import Scenario, draw

End = tuple[list[int], str | None, int]
"""Tokens, reason, and prompt tokens to bill."""
Played = tuple[Counter[str], dict[str, End]]
"""Counts of events, and the ends of the requests that got all tokens they asked for."""


def play(seed: int, overlaps: bool) -> Played:
    """Run the scenario of a seed.

    Raises:
        SimulationError: Something happened that must not.
    """
    simulation = Simulation(draw(seed), overlaps=overlaps)
    return simulation.run(), _ends(simulation)


def compare_overlap(seed: int, play: Callable[[int, bool], Played] = play) -> int:
    """Play a seed twice; returns how many requests ended in both runs with all that they asked for.

    Raises:
        AssertionError: One of them got other tokens, or something happened that must not.
    """
    (_, apart), (_, overlapped) = play(seed, False), play(seed, True)
    both = apart.keys() & overlapped.keys()
    differing = {key for key in both if apart[key] != overlapped[key]}
    if _same_requests_end(draw(seed)):
        differing |= apart.keys() ^ overlapped.keys()
    if differing:
        shown = "".join(
            f"\n  {key}: {apart.get(key)} and {overlapped.get(key)}" for key in sorted(differing)
        )
        raise AssertionError(
            f"seed {seed}: requests end otherwise with overlap than without:{shown}"
        )
    return len(both)


def _ends(simulation: Simulation) -> dict[str, End]:
    lasts = {
        request_id: (life.tokens, life.outputs[-1]) for request_id, life in simulation.lives.items()
    }
    return {
        request_id: (tokens, last.finish_reason, last.computed_prompt_tokens)
        for request_id, (tokens, last) in lasts.items()
        if last.finish_reason in ("stop", "length")
    }


def _same_requests_end(scenario: Scenario) -> bool:
    """True if nothing that depends on the moment (an abort, a deadline, a fault) decides which requests end."""
    has_deadlines = any(
        action.request and action.request.flow.deadline_s for action in scenario.actions
    )
    faults = scenario.faults
    has_faults = (
        scenario.step_raises
        or scenario.unsound
        or faults.fails
        or faults.hangs
        or faults.copy_fails
    )
    return (
        {action.verb for action in scenario.actions} == {"submit"}
        and not has_deadlines
        and not has_faults
    )
