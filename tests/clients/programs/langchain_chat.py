"""langchain-openai: chat, completions, structured output by every method, tools, an agent, and Responses."""

from __future__ import annotations

import asyncio
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
from langchain.agents import create_agent
from langchain_openai import ChatOpenAI, OpenAI


def chat(model: str = BASE, **fields: Any) -> ChatOpenAI:
    return ChatOpenAI(model=model, base_url=V1, api_key=KEY, temperature=0, max_retries=0, **fields)


with feature("invoke"):
    equal(chat(ADAPTER).invoke(QUESTION).content, ANSWER)

with feature("stream with usage"):
    chunks = list(chat(ADAPTER, stream_usage=True).stream(QUESTION))
    equal("".join(chunk.text for chunk in chunks), ANSWER)
    equal(any(chunk.usage_metadata for chunk in chunks), True)

with feature("async batch"):
    answers = asyncio.run(chat(ADAPTER).abatch([QUESTION] * 3))
    equal([answer.content for answer in answers], [ANSWER] * 3)

with feature("OpenAI().generate of 20 prompts"):
    made = OpenAI(model=BASE, base_url=V1, api_key=KEY, max_tokens=4).generate(["The shop"] * 20)
    equal(len(made.generations), 20)

for method in ("json_schema", "json_mode"):
    with feature(f"with_structured_output {method}"):
        structured = chat().with_structured_output(Card, method=method)
        equal(is_scarf(structured.invoke(CARD_QUESTION)), True)

with feature("with_structured_output function_calling"):
    picked = chat().with_structured_output(Pick, method="function_calling").invoke(CARD_QUESTION)
    equal(type(picked), Pick)

with feature("bind_tools"):
    calls = (
        chat()
        .bind_tools([where_is, price_of], tool_choice="required")
        .invoke(AGENT_QUESTION)
        .tool_calls
    )
    equal(calls[0]["args"], {"item": "rug"})

with feature("bind_tools streamed"):
    pieces = list(
        chat().bind_tools([where_is, price_of], tool_choice="required").stream(AGENT_QUESTION)
    )
    whole = pieces[0]
    for piece in pieces[1:]:
        whole += piece
    equal(whole.tool_calls[0]["args"], {"item": "rug"})

for name, responses in (("create_agent", False), ("create_agent over Responses", True)):
    with feature(name):
        agent = create_agent(chat(use_responses_api=responses), [where_is, price_of])
        done = agent.invoke({"messages": [{"role": "user", "content": AGENT_QUESTION}]})
        equal(has_both(done["messages"][-1].text), True)

with feature("Responses"):
    equal(chat(ADAPTER, use_responses_api=True).invoke(QUESTION).text, ANSWER)
