"""LlamaIndex's OpenAILike: chat, completions, structured output, tools, and an agent."""

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
from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike

server: Any = {
    "api_base": V1,
    "api_key": KEY,
    "temperature": 0,
    "context_window": 1024,
    "max_retries": 0,
}
chats: Any = {**server, "is_chat_model": True, "is_function_calling_model": True, "strict": True}
adapter, base = OpenAILike(model=ADAPTER, **chats), OpenAILike(model=BASE, max_tokens=200, **chats)
question = [ChatMessage(role="user", content=QUESTION)]
tools = [FunctionTool.from_defaults(where_is), FunctionTool.from_defaults(price_of)]

with feature("chat"):
    equal(adapter.chat(question).message.content, ANSWER)

with feature("stream_chat"):
    equal("".join(piece.delta or "" for piece in adapter.stream_chat(question)), ANSWER)

with feature("achat"):
    equal(asyncio.run(OpenAILike(model=ADAPTER, **chats).achat(question)).message.content, ANSWER)

with feature("complete"):
    made = OpenAILike(model=BASE, max_tokens=4, **server).complete("The shop")
    equal(bool(made.text), True)

with feature("as_structured_llm"):
    equal(type(base.as_structured_llm(Pick).complete(CARD_QUESTION).raw), Pick)

with feature("as_structured_llm by JSON schema"):
    by_schema = OpenAILike(model=BASE, max_tokens=200, should_use_structured_outputs=True, **chats)
    equal(is_scarf(by_schema.as_structured_llm(Card).complete(CARD_QUESTION).raw), True)

with feature("chat_with_tools"):
    said = base.chat_with_tools(tools, user_msg=AGENT_QUESTION, tool_required=True)
    equal(base.get_tool_calls_from_response(said)[0].tool_kwargs, {"item": "rug"})


async def run_agent() -> str:
    return str(await FunctionAgent(tools=tools, llm=base, streaming=True).run(AGENT_QUESTION))


with feature("FunctionAgent"):
    equal(has_both(asyncio.run(run_agent())), True)
