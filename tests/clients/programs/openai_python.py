"""openai-python: chat, completions, structured output, tools, responses, files and batches."""

from __future__ import annotations

import asyncio
import io
import json
import time
from typing import Any

import openai
from feature import (
    ADAPTER,
    AGENT_QUESTION,
    ANSWER,
    BASE,
    CARD_QUESTION,
    KEY,
    QUESTION,
    TOOLS,
    V1,
    Card,
    equal,
    feature,
    has_both,
    is_scarf,
    run_tool,
)

client = openai.OpenAI(base_url=V1, api_key=KEY, max_retries=0)
asked: Any = {
    "model": ADAPTER,
    "messages": [{"role": "user", "content": QUESTION}],
    "temperature": 0,
}
card: Any = {
    "model": BASE,
    "messages": [{"role": "user", "content": CARD_QUESTION}],
    "temperature": 0,
}
agent: Any = {
    "model": BASE,
    "messages": [{"role": "user", "content": AGENT_QUESTION}],
    "temperature": 0,
    "tools": TOOLS,
}
flat_tools: Any = [{"type": "function", **tool["function"], "strict": False} for tool in TOOLS]

with feature("chat"):
    whole = client.chat.completions.create(**asked)
    equal(whole.choices[0].message.content, ANSWER)

with feature("stream with usage"):
    text, usage = "", None
    for chunk in client.chat.completions.create(
        **asked, stream=True, stream_options={"include_usage": True}
    ):
        text += (chunk.choices[0].delta.content or "") if chunk.choices else ""
        usage = chunk.usage or usage
    equal(text, ANSWER)
    equal(usage and usage.completion_tokens, whole.usage and whole.usage.completion_tokens)

with feature("stream helper"), client.chat.completions.stream(**asked) as stream:
    equal(stream.get_final_completion().choices[0].message.content, ANSWER)

with feature("async"):

    async def ask() -> str | None:
        async with openai.AsyncOpenAI(base_url=V1, api_key=KEY) as asking:
            return (await asking.chat.completions.create(**asked)).choices[0].message.content

    equal(asyncio.run(ask()), ANSWER)

with feature("completions"):
    given = client.completions.create(
        model=BASE, prompt=["The shop"] * 20, max_tokens=4, n=2, seed=1
    )
    equal([choice.index for choice in given.choices], list(range(40)))

with feature("logprobs"):
    shown = (
        client.chat.completions.create(**asked, logprobs=True, top_logprobs=2).choices[0].logprobs
    )
    equal(
        "".join(token.token for token in shown.content if token.logprob <= 0)[: len(ANSWER)], ANSWER
    )

with feature("echo"):
    scored = client.completions.create(
        model=BASE, prompt="The shop", max_tokens=0, echo=True, logprobs=1
    )
    equal(scored.choices[0].text.endswith("The shop"), True)

with feature("n, stop, seed"):
    cut = client.chat.completions.create(
        **{**asked, "temperature": 1}, n=3, stop=[" "], seed=7, max_tokens=20
    )
    equal([" " in (choice.message.content or "") for choice in cut.choices], [False] * 3)

with feature("models"):
    equal({BASE, ADAPTER} <= {model.id for model in client.models.list()}, True)
    equal(client.models.retrieve(ADAPTER).id, ADAPTER)

with feature("errors"):
    try:
        client.chat.completions.create(**{**asked, "model": "no-such-model"})
        raise AssertionError("no error")
    except openai.NotFoundError as error:
        equal(error.code, "model_not_found")

with feature("`parse`"):
    parsed = client.chat.completions.parse(**card, response_format=Card)
    equal(is_scarf(parsed.choices[0].message.parsed), True)

with (
    feature("`parse` streamed"),
    client.chat.completions.stream(**card, response_format=Card) as stream,
):
    equal(is_scarf(stream.get_final_completion().choices[0].message.parsed), True)

with feature("json_object"):
    free = client.chat.completions.create(**card, response_format={"type": "json_object"})
    equal(type(json.loads(free.choices[0].message.content or "")), dict)

with feature("tools"):
    messages = [*agent["messages"]]
    for _ in range(4):
        said = client.chat.completions.create(**{**agent, "messages": messages}).choices[0]
        messages.append(said.message)
        if not said.message.tool_calls:
            break
        equal(said.finish_reason, "tool_calls")
        for call in said.message.tool_calls:
            result = run_tool(call.function.name, call.function.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    equal(has_both(said.message.content), True)

with feature("tools streamed"), client.chat.completions.stream(**agent) as stream:
    calls = stream.get_final_completion().choices[0].message.tool_calls or []
    equal(run_tool(calls[0].function.name, calls[0].function.arguments) != "", True)

with feature("tool_choice required"):
    forced = client.chat.completions.create(
        **{**asked, "model": BASE}, tools=TOOLS, tool_choice="required"
    ).choices[0]
    equal(forced.message.tool_calls[0].function.name in ("where_is", "price_of"), True)

with feature("tool_choice by name"):
    named: Any = {"type": "function", "function": {"name": "price_of"}}
    called = (
        client.chat.completions.create(**agent, tool_choice=named).choices[0].message.tool_calls
    )
    equal([call.function.name for call in called], ["price_of"])

with feature("strict tools and `parse`"):
    tool = openai.pydantic_function_tool(Card, name="show")
    shown_card = (
        client.chat.completions.parse(**card, tools=[tool], tool_choice="required")
        .choices[0]
        .message
    )
    equal(isinstance(shown_card.tool_calls[0].function.parsed_arguments, Card), True)

with feature("responses"):
    equal(client.responses.create(model=ADAPTER, input=QUESTION, temperature=0).output_text, ANSWER)

with feature("responses streamed"):
    with client.responses.stream(model=ADAPTER, input=QUESTION, temperature=0) as events:
        text = "".join(
            event.delta for event in events if event.type == "response.output_text.delta"
        )
        equal(events.get_final_response().output_text, ANSWER)
    equal(text, ANSWER)

with feature("responses `parse`"):
    answer = client.responses.parse(
        model=BASE, input=CARD_QUESTION, text_format=Card, temperature=0
    )
    equal(is_scarf(answer.output_parsed), True)

with feature("responses tools"):
    items: list[Any] = [{"role": "user", "content": AGENT_QUESTION}]
    for _ in range(4):
        got = client.responses.create(model=BASE, input=items, tools=flat_tools, temperature=0)
        items += got.output
        made = [item for item in got.output if item.type == "function_call"]
        if not made:
            break
        for item in made:
            result = run_tool(item.name, item.arguments)
            items.append(
                {"type": "function_call_output", "call_id": item.call_id, "output": result}
            )
    equal(has_both(got.output_text), True)

with feature("files and batches"):
    line = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": asked}
    file = client.files.create(
        file=("in.jsonl", io.BytesIO(json.dumps(line).encode())), purpose="batch"
    )
    batch = client.batches.create(
        input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
    )
    for _ in range(300):
        batch = client.batches.retrieve(batch.id)
        if batch.status not in ("validating", "in_progress", "finalizing"):
            break
        time.sleep(0.1)
    out = json.loads(client.files.content(batch.output_file_id or "").text)
    equal(out["response"]["body"]["choices"][0]["message"]["content"], ANSWER)
