"""openai-agents with both of its models: Responses, which is the default, and chat completions."""

from __future__ import annotations

import asyncio
from typing import Any

from agents import Agent, ModelSettings, Runner, function_tool, set_tracing_disabled
from agents.models.openai_chatcompletions import OpenAIChatCompletionsModel
from agents.models.openai_responses import OpenAIResponsesModel
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
    equal,
    feature,
    has_both,
    is_scarf,
    price_of,
    where_is,
)
from openai import AsyncOpenAI

set_tracing_disabled(True)
greedy = ModelSettings(temperature=0, max_tokens=200)
forced = ModelSettings(temperature=0, max_tokens=200, tool_choice="transfer_to_clerk")
tools = [function_tool(where_is), function_tool(price_of)]


async def streamed(agent: Agent[Any]) -> str:
    run, text = Runner.run_streamed(agent, QUESTION), ""
    async for event in run.stream_events():
        if event.type == "raw_response_event" and event.data.type == "response.output_text.delta":
            text += event.data.delta
    equal(run.final_output, text)
    return text


async def main(make: type[Any], name: str) -> None:
    client = AsyncOpenAI(base_url=V1, api_key=KEY, max_retries=0)
    adapter, base = (
        make(model=ADAPTER, openai_client=client),
        make(model=BASE, openai_client=client),
    )
    clerk: Agent[Any] = Agent("clerk", model=adapter, model_settings=greedy)

    with feature(f"{name}: run"):
        equal((await Runner.run(clerk, QUESTION)).final_output, ANSWER)

    with feature(f"{name}: run_streamed"):
        equal(await streamed(clerk), ANSWER)

    with feature(f"{name}: tools"):
        agent: Agent[Any] = Agent("helper", model=base, tools=tools, model_settings=greedy)
        equal(has_both((await Runner.run(agent, AGENT_QUESTION)).final_output), True)

    with feature(f"{name}: output_type"):
        typed: Agent[Any] = Agent("cards", model=base, output_type=Card, model_settings=greedy)
        equal(is_scarf((await Runner.run(typed, CARD_QUESTION)).final_output), True)

    with feature(f"{name}: handoff"):
        door: Agent[Any] = Agent("door", model=base, handoffs=[clerk], model_settings=forced)
        run = await Runner.run(door, QUESTION)
        equal(run.last_agent.name, "clerk")


for each in (OpenAIResponsesModel, OpenAIChatCompletionsModel):
    asyncio.run(main(each, {OpenAIResponsesModel: "Responses"}.get(each, "chat completions")))
