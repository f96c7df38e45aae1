"""How many tokens a step may compute besides those of the interactive requests that decode.

Without a target that is what `scheduler.step_tokens` leaves. With `scheduler.itl_target_ms` it shrinks by a tenth after
a step that took longer than the target, and grows by `GROWTH_TOKENS` after one that used all of it in time: the
additive increase and multiplicative decrease of congestion control.
"""

from __future__ import annotations

from weft.config import SchedulerConfig

MIN_TOKENS = 16
"""However slow steps are, prompts go on."""
GROWTH_TOKENS = 16
DECREASE = 0.9


class StepBudget:
    """The token budget of steps.

    Args:
        config: The largest step, and the target.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self._max_tokens = config.step_tokens
        self._target_s = None if config.itl_target_ms is None else config.itl_target_ms / 1000
        self._allowed = config.step_tokens
        self._planned = 0

    @property
    def is_bounded(self) -> bool:
        """Whether there is a target; then tokens of requests in the batch lane that decode are part of the budget."""
        return self._target_s is not None

    def tokens(self, num_decoding: int) -> int:
        """Tokens left for prompts, and see `is_bounded`, in a step with so many decoding requests besides."""
        self._planned = min(self._max_tokens - num_decoding, self._allowed)
        return self._planned

    def note_step(self, used: int, seconds: float) -> None:
        """Learn from a step that computed `used` tokens of the budget."""
        if self._target_s is None:
            return
        if seconds > self._target_s and used:
            # A step of few tokens says little about how many may be.
            self._allowed = max(int(max(min(self._allowed, used), self._allowed // 2) * DECREASE), MIN_TOKENS)
        elif used >= self._planned:
            self._allowed = min(self._allowed + GROWTH_TOKENS, self._max_tokens)
