"""LiteLLM as a library, with both prefixes that fit: openai/ and hosted_vllm/."""

from __future__ import annotations

import asyncio
from typing import Any

import litellm
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

litellm.telemetry = False
litellm.suppress_debug_info = True
server: Any = {"api_base": V1, "api_key": KEY, "temperature": 0, "num_retries": 0}


def user(text: str) -> list[Any]:
    return [{"role": "user", "content": text}]


for prefix in ("openai", "hosted_vllm"):
    adapter, base = f"{prefix}/{ADAPTER}", f"{prefix}/{BASE}"

    with feature(f"{prefix}/ completion"):
        equal(
            litellm.completion(adapter, user(QUESTION), **server).choices[0].message.content, ANSWER
        )

    with feature(f"{prefix}/ stream"):
        chunks = litellm.completion(
            adapter, user(QUESTION), stream=True, stream_options={"include_usage": True}, **server
        )
        equal("".join(chunk.choices[0].delta.content or "" for chunk in chunks), ANSWER)

    with feature(f"{prefix}/ text_completion"):
        made = litellm.text_completion(prompt="The shop", model=base, max_tokens=4, **server)
        equal(len(made.choices), 1)

    with feature(f"{prefix}/ response_format"):
        filled = litellm.completion(base, user(CARD_QUESTION), response_format=Card, **server)
        equal(is_scarf(filled.choices[0].message.content), True)

    with feature(f"{prefix}/ tools"):
        messages = user(AGENT_QUESTION)
        for _ in range(4):
            said = litellm.completion(base, messages, tools=TOOLS, **server).choices[0].message
            messages.append(said)
            if not said.tool_calls:
                break
            for call in said.tool_calls:
                result = run_tool(call.function.name, call.function.arguments)
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
        equal(has_both(said.content), True)

    with feature(f"{prefix}/ tools streamed"):
        forced = litellm.completion(
            base, user(AGENT_QUESTION), tools=TOOLS, tool_choice="required", stream=True, **server
        )
        whole = litellm.stream_chunk_builder(list(forced))
        call = whole.choices[0].message.tool_calls[0]
        equal(bool(run_tool(call.function.name, call.function.arguments)), True)

    with feature(f"{prefix}/ responses"):
        answer = litellm.responses(QUESTION, adapter, api_base=V1, api_key=KEY, temperature=0)
        equal(answer.output[-1].content[0].text, ANSWER)

    with feature(f"{prefix}/ Anthropic messages"):
        asked: Any = {
            "model": adapter,
            "messages": user(QUESTION),
            "max_tokens": 64,
            "temperature": 0,
        }
        message = asyncio.run(litellm.anthropic.messages.acreate(**asked, api_base=V1, api_key=KEY))
        equal(message["content"][0]["text"], ANSWER)

    with feature(f"{prefix}/ ContextWindowExceededError"):
        try:
            litellm.completion(base, user("open " * 5000), **server)
            raise AssertionError("no error")
        except litellm.ContextWindowExceededError:
            pass
