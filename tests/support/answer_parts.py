"""What writers of answers are given, without an engine."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from fake_engine import demo_tokenizer
from manylora.engine.request import GenerationRequest, RequestOutput
from manylora.engine.sampling_params import SamplingParams
from manylora.engine.text.text_stream import TextDelta, TextStream
from manylora.server.generation.choices import Choice, ChoiceStep
from manylora.server.generation.meter import Meter
from manylora.server.generation.prompts import Prompt
from manylora.server.generation.schemas import UsageView


def meter_of() -> Meter:
    """A meter that has counted this."""
    tokens = {"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10}
    details = {
        "prompt_tokens_details": {"cached_tokens": 4},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }
    return cast(Meter, SimpleNamespace(usage=UsageView.model_validate(tokens | details)))


def choice_of() -> Choice:
    params = SamplingParams(max_tokens=9)
    request = GenerationRequest(request_id="x", prompt_token_ids=[1], params=params)
    text = TextStream(demo_tokenizer(), params)
    return Choice(index=0, prompt_index=0, prompt=Prompt(token_ids=[1]), request=request, text=text)


def step_of(**delta: Any) -> ChoiceStep:
    """A step of one token."""
    output = RequestOutput(request_id="x", token_ids=[1])
    told = TextDelta(text="", token_ids=[1], **delta)
    return ChoiceStep(choice=choice_of(), output=output, delta=told, num_tokens=1)
