"""anthropic's SDK: messages, streams, tools, and the count of tokens."""

from __future__ import annotations

from typing import Any

import anthropic
from feature import (
    ADAPTER,
    AGENT_QUESTION,
    ANSWER,
    BASE,
    KEY,
    QUESTION,
    URL,
    equal,
    feature,
    has_both,
    parameters,
    run_tool,
)

client = anthropic.Anthropic(base_url=URL, api_key=KEY, max_retries=0)
greedy: Any = {"max_tokens": 128, "extra_body": {"temperature": 0}}
asked: Any = {"model": ADAPTER, "messages": [{"role": "user", "content": QUESTION}], **greedy}
tools: Any = [
    {"name": name, "description": "Asks the shop.", "input_schema": parameters()}
    for name in ("where_is", "price_of")
]

with feature("messages"):
    equal(client.messages.create(**asked).content[0].text, ANSWER)

with feature("stream"), client.messages.stream(**asked) as stream:
    equal("".join(stream.text_stream), ANSWER)

with feature("tools"):
    messages: list[Any] = [{"role": "user", "content": AGENT_QUESTION}]
    for _ in range(4):
        answer = client.messages.create(model=BASE, messages=messages, tools=tools, **greedy)
        messages.append({"role": "assistant", "content": answer.content})
        uses = [block for block in answer.content if block.type == "tool_use"]
        if not uses:
            break
        results = [(use.id, run_tool(use.name, dict(use.input))) for use in uses]
        blocks = [
            {"type": "tool_result", "tool_use_id": id_, "content": result}
            for id_, result in results
        ]
        messages.append({"role": "user", "content": blocks})
    equal(has_both(answer.content[0].text), True)

with feature("tool_choice any"):
    forced = client.messages.create(
        **{**asked, "model": BASE}, tools=tools, tool_choice={"type": "any"}
    )
    equal([forced.stop_reason, forced.content[-1].type], ["tool_use", "tool_use"])

with feature("count_tokens"):
    counted = client.messages.count_tokens(model=ADAPTER, messages=asked["messages"])
    equal(counted.input_tokens, client.messages.create(**asked).usage.input_tokens)
