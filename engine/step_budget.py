"""How much a step may compute besides the interactive requests that decode: prompts, and the batch lane.

Without `scheduler.itl_target_ms` prompts take what `scheduler.step_tokens` leaves, and the batch lane makes a step with
interactive requests longer by at most `scheduler.batch_stretch`. For a while after such steps its own steps are no
longer than those, so that whoever comes next does not wait for a long one. With a target both take what that leaves.

How long a step will take is predicted with a line, `seconds = overhead + unit_s * units`, which is fitted to the last
steps. Units are those of `weft.engine.prices`; one is the time of a prompt token, so the slope is known from the start.
"""

from __future__ import annotations

import math

from weft.config import SchedulerConfig

MIN_TOKENS = 16
"""However slow steps are, prompts go on."""
KEPT = 0.98
"""A step counts as much as the one after it, times this."""
PRIOR_VARIANCE = 64.0
"""Units squared; steps that differ by less tell little about the slope, and the one measured at start is kept."""
CALM_S = 60.0
"""So long after the last interactive request, by the time of steps, the batch lane fills whole steps again."""
MAX_SLOPE_ERROR = 4.0
"""The slope is never off the one measured at start by more than this factor."""


class StepTime:
    """Predicts the seconds of a step from its units, by weighted least squares.

    Args:
        unit_s: Seconds of a unit, as measured at start.
    """

    def __init__(self, unit_s: float) -> None:
        self._start_unit_s = unit_s
        self._weight = self._units = self._seconds = self._variance = self._covariance = 0.0

    def note(self, units: float, seconds: float) -> None:
        """Learn from a step."""
        self._weight = self._weight * KEPT + 1
        share = 1 / self._weight
        units_off, seconds_off = units - self._units, seconds - self._seconds
        self._units += share * units_off
        self._seconds += share * seconds_off
        self._variance = (1 - share) * (self._variance + share * units_off * units_off)
        self._covariance = (1 - share) * (self._covariance + share * units_off * seconds_off)

    @property
    def unit_s(self) -> float:
        """Seconds of one more unit."""
        start_s = self._start_unit_s
        slope = (self._covariance + PRIOR_VARIANCE * start_s) / (self._variance + PRIOR_VARIANCE)
        return min(max(slope, start_s / MAX_SLOPE_ERROR), start_s * MAX_SLOPE_ERROR)

    @property
    def overhead_units(self) -> float:
        """What a step takes besides its units, in units."""
        return max(self._seconds / self.unit_s - self._units, 0.0)


class StepBudget:
    """What steps may compute.

    Args:
        config: The largest step, the target, and the stretch.
        unit_s: Seconds of a unit, as measured at start.
    """

    def __init__(self, config: SchedulerConfig, unit_s: float) -> None:
        self._max_tokens = config.step_tokens
        self._target_s = None if config.itl_target_ms is None else config.itl_target_ms / 1000
        self._stretch = config.batch_stretch
        self._time = StepTime(unit_s)
        self._usual_units = 0.0
        """What interactive requests have in a step of late."""
        self._batch_s = math.inf
        """Time of steps since the last one with an interactive request."""

    @property
    def has_target(self) -> bool:
        """Whether steps have a target."""
        return self._target_s is not None

    @property
    def is_calm(self) -> bool:
        """Whether interactive requests were there of late, so that steps of the batch lane are kept short."""
        return self._batch_s < CALM_S

    def tokens(self, num_decoding: int, units: float) -> int:
        """Tokens for prompts, and for the batch lane beside interactive requests.

        Args:
            num_decoding: Other requests, with one token each.
            units: Their price.
        """
        left = self._max_tokens - num_decoding
        if self._target_s is None:
            return left
        in_time = self._target_s / self._time.unit_s - self._time.overhead_units - units
        return min(left, max(int(in_time), MIN_TOKENS))

    def batch_units(self, units: float | None) -> float:
        """Units for the batch lane; enough for one token.

        Args:
            units: Of the interactive requests that decode in the step. Prompts do not count: who waits for a first
                token should not wait the longer for a batch, the longer the prompt. None: there is no such request.
        """
        if self._target_s is not None:
            return math.inf  # part of the tokens
        if units:
            self._usual_units += (1 - KEPT) * (units - self._usual_units)
        alone = self._usual_units if units is None else 0.0
        return max((self._stretch - 1) * (self._time.overhead_units + (units or alone)) + alone, 1.0)

    def note_step(self, units: float, seconds: float, has_interactive: bool) -> None:
        """Learn from a step; its units are 0 where they were not counted."""
        self._batch_s = 0.0 if has_interactive else self._batch_s + seconds
        if units:
            self._time.note(units, seconds)
