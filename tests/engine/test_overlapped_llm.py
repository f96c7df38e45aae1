"""An engine on a CPU whose steps overlap says what one says whose steps do not."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from manylora import LLM
from manylora.engine.sampling_params import SamplingParams

DEMO = Path(__file__).resolve().parents[2] / "manylora" / "demo" / "manylora-demo"
PROMPTS = [
    "The quick brown",
    "One two three four five six seven",
    "A",
    "To be or not to be",
    "In the beginning",
] * 2
PARAMS = [
    SamplingParams(max_tokens=24, temperature=0.0),
    SamplingParams(max_tokens=40, temperature=1.5, seed=1),
    SamplingParams(max_tokens=30, temperature=1.2, seed=2, repetition_penalty=1.3, logprobs=2),
    SamplingParams(max_tokens=20, temperature=1.0, top_p=0.9, seed=3, min_tokens=9),
    SamplingParams(max_tokens=33, temperature=1.0, seed=4, stop=("e",)),
    SamplingParams(max_tokens=17, temperature=1.0, seed=5, prompt_logprobs=1),
    SamplingParams(max_tokens=25, temperature=1.4, seed=6, bad_words=((40, 41), (42,))),
    SamplingParams(max_tokens=12, temperature=1.2, seed=7),
    SamplingParams(max_tokens=1, temperature=0.0, logprobs=1),
    SamplingParams(
        max_tokens=22, temperature=1.3, seed=8, stop_token_ids=tuple(range(60, 100)), logprobs=0
    ),
]
GRAMMARS = [None] * 7 + ["start: /[1-9][0-9]{2,5}/", None, None]


@pytest.fixture(scope="module")
def llms() -> Iterator[dict[str, LLM]]:
    with ExitStack() as stack:
        yield {
            overlap: stack.enter_context(
                LLM(
                    DEMO,
                    device="cpu",
                    dtype="float32",
                    memory_gib=0.05,
                    host_gib=0.05,
                    max_running=7,
                    overlap=overlap,
                )
            )
            for overlap in ("off", "on")
        }


def test_completions_are_the_same(llms: dict[str, LLM]) -> None:
    """All kinds of requests in one batch; some wait for a row, and some end by what nobody knows ahead."""
    said = {
        overlap: llm.generate(PROMPTS, PARAMS, grammar=GRAMMARS) for overlap, llm in llms.items()
    }
    assert said["on"] == said["off"]
    llms["on"].engine.core.check()
    counts = llms["on"].engine.core.status().pages
    assert counts["kv"] == counts["quarantine"] == 0


def test_a_row_behind_the_end_is_computed_only_where_steps_overlap(llms: dict[str, LLM]) -> None:
    num_rows = {}
    for overlap, llm in llms.items():
        before = llm.engine.core.num_steps
        (completion,) = llm.generate(PROMPTS[9], PARAMS[9])
        assert completion.finish_reason == "stop"
        num_rows[overlap] = llm.engine.core.num_steps - before - len(completion.token_ids)
    assert num_rows == {"off": 0, "on": 1}
