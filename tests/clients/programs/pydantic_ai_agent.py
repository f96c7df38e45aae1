"""pydantic-ai with both of its OpenAI models: `openai:` asks Responses, `openai-chat:` asks chat completions."""

from __future__ import annotations

import asyncio
import os
from typing import Any

from feature import (
    ADAPTER,
    AGENT_QUESTION,
    ANSWER,
    BASE,
    CARD_QUESTION,
    KEY,
    QUESTION,
    V1,
    Card,
    Pick,
    equal,
    feature,
    has_both,
    is_scarf,
    price_of,
    where_is,
)

os.environ |= {"OPENAI_BASE_URL": V1, "OPENAI_API_KEY": KEY}

from pydantic_ai import Agent, NativeOutput, PromptedOutput, ToolOutput
from pydantic_ai.settings import ModelSettings

greedy = ModelSettings(temperature=0, max_tokens=200)


async def streamed(agent: Agent[None, Any]) -> str:
    async with agent.run_stream(QUESTION) as run:
        return "".join([piece async for piece in run.stream_text(delta=True, debounce_by=None)])


for provider in ("openai", "openai-chat"):
    adapter, base = f"{provider}:{ADAPTER}", f"{provider}:{BASE}"

    with feature(f"{provider}: run"):
        equal(Agent(adapter, model_settings=greedy).run_sync(QUESTION).output, ANSWER)

    with feature(f"{provider}: run_stream"):
        equal(asyncio.run(streamed(Agent(adapter, model_settings=greedy))), ANSWER)

    with feature(f"{provider}: tools"):
        agent = Agent(base, tools=[where_is, price_of], model_settings=greedy)
        equal(has_both(agent.run_sync(AGENT_QUESTION).output), True)

    with feature(f"{provider}: ToolOutput"):
        picking = Agent(base, output_type=ToolOutput(Pick), model_settings=greedy, retries=0)
        equal(type(picking.run_sync(CARD_QUESTION).output), Pick)

    for output in (NativeOutput, PromptedOutput):
        with feature(f"{provider}: {output.__name__}"):
            typed: Agent[None, Any] = Agent(
                base, output_type=output(Card), model_settings=greedy, retries=0
            )
            equal(is_scarf(typed.run_sync(CARD_QUESTION).output), True)
