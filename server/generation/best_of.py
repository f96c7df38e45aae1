"""Which candidates of a prompt are returned: OpenAI's `best_of`, and the ranks of a beam search."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby

from weft.server.generation.choices import Choice, Step


def best_choices(candidates: Sequence[Choice], steps: Iterable[Step], n: int) -> list[Choice]:
    """The `n` candidates of each prompt with the highest log-probability per token, best first.

    Candidates of a beam search come best first by its own score. Where there are no more than `n`, all are returned as
    they are.

    Args:
        candidates: Prompt by prompt.
        steps: All of them, with log-probabilities where there are more candidates than `n`.
        n: How many of each prompt.
    """
    logprobs: dict[int, list[float]] = {}
    for step in steps:
        logprobs.setdefault(step.choice.index, []).extend(entry.logprob for entry in step.delta.logprobs or ())

    def per_token(choice: Choice) -> float:
        own = logprobs[choice.index]
        return sum(own) / len(own) if own else 0.0

    best: list[Choice] = []
    for _, group in groupby(candidates, key=lambda choice: choice.prompt_index):
        of_prompt = list(group)
        if len(of_prompt) > n and of_prompt[0].request.beam is None:
            of_prompt.sort(key=per_token, reverse=True)
        best += of_prompt[:n]
    return best
