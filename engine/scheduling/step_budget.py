"""Budget of a step for prompts and for the batch lane, besides the interactive requests that decode.

Without `scheduler.itl_target_ms` prompts take what `scheduler.step_tokens` leaves. The batch lane makes the decoding
part of a step with interactive requests longer by at most `scheduler.batch_stretch`. For a minute after such a step,
its own steps are kept as short, and the next interactive request does not wait long. With a target, all steps keep it.

The time of a step is predicted with a line, `seconds = overhead + unit_s * units`, which is fitted to the last steps.
Units are those of `manylora.engine.fairness.prices`; one is the time of a prompt token, so the slope is known from the
start.
"""

from __future__ import annotations

import math

from manylora.config import SchedulerConfig

MIN_TOKENS = 16
"""Tokens of prompts of interactive requests in a step, however slow steps are."""
TARGET_AIM = 0.9
"""Part of the target that steps are to take: half of them take longer than predicted, and the way to the client takes
time too."""
KEPT = 0.98
"""Weight of a step, relative to the step after it."""
PRIOR_VARIANCE = 64.0
"""Variance of units below which steps tell little about the slope, so that the one measured at start is kept."""
MAX_SLOPE_ERROR = 4.0
"""Largest factor between the slope and the one measured at start."""
MAX_SURPRISE = 3.0
"""Largest multiple of the predicted time, and of the mean, that a step counts as: a longer one says that the machine
paused."""
USUAL_FRACTION = 0.05
"""Weight of the last step in the mean of steps with interactive requests."""
KEEPS_SHORT_S = 60.0
"""Seconds of steps after the last interactive request, after which the batch lane fills whole steps again."""


class StepTime:
    """Predicts the seconds of a step from its units, by weighted least squares.

    Args:
        unit_s: Seconds of a unit, as measured at start.
    """

    def __init__(self, unit_s: float) -> None:
        self._start_unit_s = unit_s
        self._weight = 0.0
        self._units = 0.0
        self._seconds = 0.0
        self._variance = 0.0
        self._covariance = 0.0

    def note(self, units: float, seconds: float) -> None:
        """Learn from a step."""
        if self._weight > 1 / (1 - KEPT) / 2:
            seconds = min(seconds, MAX_SURPRISE * max(self.seconds(units), self._seconds))
        self._weight = self._weight * KEPT + 1
        share = 1 / self._weight
        units_off = units - self._units
        seconds_off = seconds - self._seconds
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

    def seconds(self, units: float) -> float:
        """Predicted time of a step of `units`; negative where the line is too steep."""
        return self._seconds + self.unit_s * (units - self._units)

    def units(self, seconds: float) -> float:
        """Units of a step that is predicted to take `seconds`."""
        return self._units + (seconds - self._seconds) / self.unit_s


class StepBudget:
    """Tokens and units that steps may compute.

    Args:
        config: The target and the stretch.
        step_tokens: Most tokens in one step.
        unit_s: Seconds of a unit, as measured at start.
    """

    def __init__(self, config: SchedulerConfig, step_tokens: int, unit_s: float) -> None:
        self.max_tokens = step_tokens
        self._target_s = (
            None if config.itl_target_ms is None else TARGET_AIM * config.itl_target_ms / 1000
        )
        self._stretch = config.batch_stretch
        self._time = StepTime(unit_s)
        self._usual_s = 0.0
        """Seconds of steps with interactive requests of late, without the part of the batch lane."""
        self._batch_s = math.inf
        """Time of steps since the last one with an interactive request."""

    @property
    def has_target(self) -> bool:
        """True if steps have a target."""
        return self._target_s is not None

    @property
    def keeps_short(self) -> bool:
        """True if there were interactive requests in the last minute: then steps of the batch lane are kept short."""
        return self._batch_s < KEEPS_SHORT_S

    def units(self, decoding: float) -> float:
        """Units that a target leaves beside the `decoding` units of interactive requests; may be below 0."""
        return math.inf if self._target_s is None else self._time.units(self._target_s) - decoding

    def batch_units(self, decoding: float | None) -> float:
        """Units for the batch lane, besides the bound of `units`.

        Args:
            decoding: Units of the interactive requests that decode in the step. Prompts do not count: the longer one
                is, the longer a first token waits anyway. None: no interactive request is in the step.
        """
        if self._target_s is not None:
            return math.inf
        if decoding is None:
            return self._time.units(self._stretch * self._usual_s)
        return (self._stretch - 1) * max(self._time.seconds(decoding), 0.0) / self._time.unit_s

    def note_step(
        self, units: float, batch_units: float, seconds: float, has_interactive: bool
    ) -> None:
        """Learn from a step.

        Args:
            units: Price of the step; 0 where it was not counted.
            batch_units: Part of `units` that the batch lane caused.
            seconds: Time that the step took.
            has_interactive: True if an interactive request was in it.
        """
        self._batch_s = 0.0 if has_interactive else self._batch_s + seconds
        if units:
            self._time.note(units, seconds)
        if has_interactive:
            own_s = max(seconds - batch_units * self._time.unit_s, 0.0)
            self._usual_s += (own_s - self._usual_s) * (USUAL_FRACTION if self._usual_s else 1.0)
