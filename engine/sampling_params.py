"""Sampling parameters of a request."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from typing import Literal

from manylora.errors import InvalidRequestError

GREEDY_BELOW = 1e-5
"""Temperatures below this mean the most likely token."""


MAX_LENGTH_PENALTY = 10.0
"""Largest length penalty. A length to this power is still a float."""


_BOUNDS: dict[str, tuple[float, float, str]] = {
    "max_tokens": (0, math.inf, ">= 0"),
    "temperature": (0, 100, "from 0 to 100"),
    "top_k": (-1, math.inf, ">= -1"),
    "top_p": (math.ulp(0), 1, "above 0, at most 1"),
    "min_p": (0, 1, "from 0 to 1"),
    "presence_penalty": (-2, 2, "from -2 to 2"),
    "frequency_penalty": (-2, 2, "from -2 to 2"),
    "repetition_penalty": (math.ulp(0), 10, "above 0, at most 10"),
    "seed": (-(1 << 63), (1 << 63) - 1, "a 64-bit integer"),
    "logprobs": (0, math.inf, ">= 0"),
    "prompt_logprobs": (0, math.inf, ">= 0"),
}
"""Smallest and largest value of each number, and how a refusal describes them."""
_OPTIONAL = ("seed", "logprobs", "prompt_logprobs")
"""Numbers that may be None."""


def _check(ok: bool, param: str, expected: str, got: object) -> None:
    if not ok:
        raise InvalidRequestError(
            f"{param} must be {expected}, got {json.dumps(got)}.", param=param
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Choice of tokens, and the end of a generation.

    Raises:
        InvalidRequestError: A value is out of range; `param` names it.
    """

    max_tokens: int = 16
    """Largest number of tokens to generate; 0 computes only the prompt (for echo with logprobs)."""
    temperature: float = 1.0
    """Divisor of the logits; 0 takes the most likely token."""
    top_k: int = 0
    """Keep the k most likely tokens; 0 or -1 keeps all."""
    top_p: float = 1.0
    """Keep the smallest set of tokens whose probability reaches this."""
    min_p: float = 0.0
    """Keep tokens at least this likely relative to the most likely one."""
    presence_penalty: float = 0.0
    """Penalty subtracted from the logits of tokens that were generated before."""
    frequency_penalty: float = 0.0
    """Penalty subtracted per occurrence among the generated tokens."""
    repetition_penalty: float = 1.0
    """Factor that divides positive and multiplies negative logits of tokens in prompt or output."""
    logit_bias: dict[int, float] = field(default_factory=dict)
    """Token id to an addend of its logit, -100 to 100."""
    seed: int | None = None
    """Seed, which makes sampling repeatable; None draws a new one."""
    logprobs: int | None = None
    """Report the chosen token's log-probability and this many alternatives; None reports nothing."""
    prompt_logprobs: int | None = None
    """Report log-probabilities of the prompt's tokens, with this many alternatives; None reports nothing."""
    stop: tuple[str, ...] = ()
    """Texts that end the generation. They are not part of the output."""
    stop_token_ids: tuple[int, ...] = ()
    """Token ids that end the generation."""
    ignore_eos: bool = False
    """Go on after the end-of-sequence token."""
    min_tokens: int = 0
    """Least number of tokens. Before it, no end-of-sequence or stop token is chosen, and stop strings do not count."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Token sequences that must not occur: if the output ends with all but the last token, that is never chosen."""
    allowed_token_ids: tuple[int, ...] = ()
    """Choose among these tokens only; empty allows all."""
    skip_special_tokens: bool = True
    """Leave special tokens out of the text."""
    include_stop_str_in_output: bool = False
    """Include the stop string, or the text of the stop token, in the output."""

    def __post_init__(self) -> None:
        for name, (low, high, expected) in _BOUNDS.items():
            value = getattr(self, name)
            is_absent = value is None and name in _OPTIONAL
            _check(is_absent or (value is not None and low <= value <= high), name, expected, value)
        for token_id, bias in self.logit_bias.items():
            _check(token_id >= 0, "logit_bias", "a map from token ids >= 0", token_id)
            _check(-100 <= bias <= 100, "logit_bias", "from -100 to 100", bias)
        _check(all(self.stop), "stop", "non-empty strings", "")
        _check(
            all(t >= 0 for t in self.stop_token_ids), "stop_token_ids", ">= 0", self.stop_token_ids
        )
        most = f"from 0 to max_tokens ({self.max_tokens})"
        _check(0 <= self.min_tokens <= self.max_tokens, "min_tokens", most, self.min_tokens)
        _check(all(self.bad_words), "bad_words", "sequences of at least one token", ())

    @property
    def is_greedy(self) -> bool:
        """True if the most likely token is taken, without a draw."""
        return self.temperature < GREEDY_BELOW

    @property
    def needs_history(self) -> bool:
        """True if logits depend on the tokens so far."""
        return bool(
            self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1.0
        )

    @property
    def changes_logits(self) -> bool:
        """True if the sampler may have to change the logits before the choice."""
        asked = self.logit_bias or self.min_tokens or self.bad_words or self.allowed_token_ids
        return bool(asked) or self.needs_history


@dataclass(frozen=True, slots=True, kw_only=True)
class BeamParams:
    """Beam search instead of sampling, with the fields and rules of `generate` in transformers.

    Raises:
        InvalidRequestError: A value is out of range; `param` names it.
    """

    width: int
    """Number of sequences that are kept at each step, and of returned hypotheses."""
    length_penalty: float = 1.0
    """Exponent of the length that divides the sum of log-probabilities; above 0 it prefers long hypotheses."""
    early_stopping: bool | Literal["never"] = False
    """Rule for the end. True ends the search at `width` hypotheses; False, when the best beam at its present length is
    no better than the worst hypothesis; "never", when it is no better at its best length either."""

    def __post_init__(self) -> None:
        _check(self.width >= 1, "n", ">= 1", self.width)
        ok = abs(self.length_penalty) <= MAX_LENGTH_PENALTY
        _check(
            ok, "length_penalty", f"at most {MAX_LENGTH_PENALTY:.0f} from 0", self.length_penalty
        )
