from __future__ import annotations

import json
import threading
from typing import Any

import httpx
import openai
import pytest
from llguidance import LLMatcher

from api_server import BASE, Api, Client
from fake_engine import demo_tokenizer
from manylora.engine.request import RequestOutput
from manylora.engine.sampling_params import SamplingParams
from manylora.engine.text.text_stream import TextStream
from manylora.server.generation.chat_schemas import ChatView
from manylora.server.tools.reading import AnswerPlan, plan_answer
from tool_models import family_llguidance, tokenizer_with, use_tokenizer

pytestmark = pytest.mark.anyio
MESSAGES = [{"role": "user", "content": "Where is the lamp?"}]
WHERE_IS = {
    "type": "function",
    "function": {
        "name": "where_is",
        "description": "Finds an item",
        "parameters": {
            "type": "object",
            "properties": {"item": {"type": "string"}},
            "required": ["item"],
        },
    },
}
CALL = '<tool_call>\n{"name": "where_is", "arguments": {"item": "lamp"}}\n</tool_call>'


@pytest.fixture
def hermes(api: Api) -> Api:
    use_tokenizer(api, tokenizer_with())
    return api


async def chat(client: Client, **fields: Any) -> httpx.Response:
    body = {"model": BASE, "messages": MESSAGES, "tools": [WHERE_IS], **fields}
    return await client.post("/v1/chat/completions", json=body)


async def test_a_call_is_told_apart_from_text(hermes: Api, acme: Client) -> None:
    hermes.engine.write = lambda _: f"Let me look.\n{CALL}"
    body = ChatView.model_validate_json((await chat(acme)).content)
    message = body.choices[0].message
    assert (message.content, body.choices[0].finish_reason) == ("Let me look.", "tool_calls")
    assert message.tool_calls is not None
    assert [(call.function.name, call.function.arguments) for call in message.tool_calls] == [
        ("where_is", '{"item": "lamp"}')
    ]
    assert message.tool_calls[0].id.startswith("call_")
    assert len(message.tool_calls[0].id) == 29


@pytest.mark.parametrize("depth", [120, 128, 129, 600, 5000])
async def test_nesting_is_served_or_refused_by_its_depth(
    hermes: Api, acme: Client, depth: int
) -> None:
    nested = '{"a":' * depth + "1" + "}" * depth
    call = {
        "id": "call_1",
        "type": "function",
        "function": {"name": "where_is", "arguments": nested},
    }
    sent: list[dict[str, Any]] = [
        {"messages": [*MESSAGES, {"role": "assistant", "content": None, "tool_calls": [call]}]}
    ]
    if depth in (120, 600):
        value = json.loads(nested)
        sent += [
            {
                "tools": [
                    {
                        "type": "function",
                        "function": {"name": "f", "parameters": {"default": value}},
                    }
                ]
            }
        ]
        sent += [{"chat_template_kwargs": {"x": value}}]
    for fields in sent:
        answer = await chat(acme, **fields)
        if depth <= 128:
            assert answer.status_code == 200, answer.text
        else:
            assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_json")
            assert "nested more than 128 levels deep" in answer.text


async def test_tools_and_history_are_rendered_by_the_models_template(
    hermes: Api, acme: Client
) -> None:
    call = {
        "id": "call_1",
        "type": "function",
        "function": {"name": "where_is", "arguments": '{"item": "lamp"}'},
    }
    history = [
        *MESSAGES,
        {"role": "assistant", "content": None, "reasoning": "Hm.", "tool_calls": [call]},
        {
            "role": "tool",
            "tool_call_id": "call_1",
            "content": [{"type": "text", "text": "aisle 3"}],
        },
    ]
    answer = await chat(acme, messages=history, chat_template_kwargs={"enable_thinking": True})
    assert answer.status_code == 200, answer.text
    tokens = (await acme.post("/tokenize", json={"messages": history, "tools": [WHERE_IS]})).json()[
        "tokens"
    ]
    shown = hermes.services.tokenizer.decode(tokens, skip_special_tokens=False)
    assert shown == (
        f"<|start|><|system|>{json.dumps(WHERE_IS)}\nAnswer as "
        '<tool_call>{"name": ..., "arguments": ...}</tool_call><|end|>'
        f"<|user|>Where is the lamp?<|end|><|assistant|><think>Hm.</think>{CALL}<|end|>"
        "<|user|>call_1=aisle 3<|end|><|assistant|>"
    )
    thinking = hermes.services.tokenizer.encode("<think>\n", add_special_tokens=False)
    assert hermes.engine.requests[0].prompt_token_ids == [*tokens, *thinking]


async def test_reasoning_goes_into_fields_of_its_own_and_is_counted(
    hermes: Api, acme: Client
) -> None:
    hermes.engine.write = lambda _: "The lamp?\n</think>\n\nIn aisle 3."
    answer = await chat(acme, reasoning_effort="high", tool_choice="none")
    body = ChatView.model_validate_json(answer.content)
    message = body.choices[0].message
    assert (message.reasoning, message.reasoning_content) == ("The lamp?", "The lamp?")
    assert (message.content, body.choices[0].finish_reason) == ("In aisle 3.", "stop")
    thought = hermes.services.tokenizer.encode("The lamp?\n</think>", add_special_tokens=False)
    assert body.usage.completion_tokens_details.reasoning_tokens == len(thought)
    hidden = (
        await chat(acme, reasoning_effort="high", tool_choice="none", include_reasoning=False)
    ).json()
    assert "reasoning" not in hidden["choices"][0]["message"]
    assert hidden["usage"] == answer.json()["usage"]


async def test_a_model_whose_calls_are_unknown_is_sent_no_tools(api: Api, acme: Client) -> None:
    use_tokenizer(
        api, tokenizer_with("{% for message in messages %}{{ message.content }}{% endfor %}")
    )
    answer = await chat(acme)
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "tools_not_supported_by_model"


async def test_a_stream_says_id_and_name_once_and_then_the_arguments(
    hermes: Api, acme: Client
) -> None:
    hermes.engine.write = lambda _: f"Wait. {CALL}\n{CALL}"
    answer = await chat(acme, stream=True, stream_options={"include_usage": True})
    chunks = [
        json.loads(line[6:]) for line in answer.text.split("\n\n") if line.startswith("data: {")
    ]
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert chunks[-1]["choices"] == []
    assert chunks[-2]["choices"][0]["finish_reason"] == "tool_calls"
    deltas = [
        call for chunk in chunks[:-1] for call in chunk["choices"][0]["delta"].get("tool_calls", [])
    ]
    for index in (0, 1):
        first, *rest = (call for call in deltas if call["index"] == index)
        assert (first["type"], first["function"]["name"]) == ("function", "where_is")
        assert len(rest) > 2
        assert all(
            set(call) == {"index", "function"} and set(call["function"]) == {"arguments"}
            for call in rest
        )
        whole = first["function"]["arguments"] + "".join(
            call["function"]["arguments"] for call in rest
        )
        assert whole == '{"item": "lamp"}'
    assert (
        "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks[:-1]) == "Wait."
    )


CUT = len(demo_tokenizer().encode(CALL[: CALL.index("amp")], add_special_tokens=False))


@pytest.mark.parametrize("name", ["use_beam_search", "ignore_eos"])
async def test_what_no_grammar_holds_is_refused_with_tools(
    hermes: Api, acme: Client, name: str
) -> None:
    fields = {name: True, "n": 2, "temperature": 0, "max_tokens": 5}
    error = (await chat(acme, **fields)).json()["error"]
    assert error["param"] == name
    assert error["message"].startswith(f"{name} cannot be used with tools.")
    assert (await chat(acme, **fields, tool_choice="none")).status_code == 200


STOP_TOKEN = demo_tokenizer().encode(CALL, add_special_tokens=False)[CUT]


@pytest.mark.parametrize(
    "fields", [{"max_tokens": CUT}, {"stop": ["lam"]}, {"stop_token_ids": [STOP_TOKEN]}, {}]
)
async def test_a_call_that_is_cut_ends_with_length(
    hermes: Api, acme: Client, fields: dict[str, Any]
) -> None:
    hermes.engine.write = lambda _: CALL if fields else CALL[:60]
    choice = (await chat(acme, **fields)).json()["choices"][0]
    assert choice["finish_reason"] == "length"
    (call,) = choice["message"]["tool_calls"]
    assert call["function"]["name"] == "where_is"
    assert '{"item": "lamp"}'.startswith(call["function"]["arguments"])
    assert call["function"]["arguments"] != '{"item": "lamp"}'


async def test_each_choice_has_calls_of_its_own_and_logprobs_have_all_tokens(
    hermes: Api, acme: Client
) -> None:
    hermes.engine.write = lambda request: CALL if request.choice_index else "No."
    body = (await chat(acme, n=2, logprobs=True)).json()
    plain, called = body["choices"]
    assert (plain["message"]["content"], plain["finish_reason"]) == ("No.", "stop")
    assert "tool_calls" not in plain["message"]
    assert (called["message"]["content"], called["finish_reason"]) == (None, "tool_calls")
    tokens = sum(len(choice["logprobs"]["content"]) for choice in body["choices"])
    assert tokens == body["usage"]["completion_tokens"]


async def test_the_engine_is_told_what_the_answer_is_held_to(hermes: Api, acme: Client) -> None:
    strict = {**WHERE_IS, "function": {**WHERE_IS["function"], "strict": True}}  # type: ignore[dict-item]
    named = {"type": "function", "function": {"name": "where_is"}}
    for tools, choice, free, schema in (
        ([WHERE_IS], "auto", True, False),
        ([strict], "auto", True, True),
        ([WHERE_IS], "required", False, True),
        ([WHERE_IS], named, False, True),
        (
            [WHERE_IS, {"type": "function", "function": {"name": "ping"}}],
            {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [named]}},
            False,
            True,
        ),
    ):
        answer = await chat(acme, tools=tools, tool_choice=choice)
        assert answer.status_code == 200, answer.text
        grammar = hermes.engine.requests[-1].grammar
        assert grammar is not None
        assert ("FREE" in grammar.text, '"required":["item"]' in grammar.text) == (free, schema)
        assert "ping" not in grammar.text
    assert (await chat(acme, tool_choice="none")).status_code == 200
    assert hermes.engine.requests[-1].grammar is None


SCHEMA = {"type": "object", "properties": {"aisle": {"type": "integer"}}, "required": ["aisle"]}


@pytest.mark.parametrize(
    "fields",
    [
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "answer", "schema": SCHEMA},
            }
        },
        {"structured_outputs": {"choice": ['{"aisle": 3}', "none"]}},
        {"structured_outputs": {"regex": r"\{.aisle.: 3\}"}},
    ],
    ids=["response_format", "choice", "regex"],
)
async def test_with_tools_an_answer_is_a_call_or_text_that_is_held(
    hermes: Api, acme: Client, fields: dict[str, Any]
) -> None:
    hermes.engine.write = lambda _: '{"aisle": 3}'
    for choice in ("auto", "required", "none"):
        answer = await chat(acme, tool_choice=choice, **fields)
        assert answer.status_code == 200, answer.text
        assert answer.json()["choices"][0]["message"]["content"] == '{"aisle": 3}'
        grammar = hermes.engine.requests[-1].grammar
        assert grammar is not None
        texts = (
            CALL,
            '{"aisle": 3}',
            '<think>Hm, {</think>{"aisle": 3}',
            f"Well. {CALL}",
            '{"aisle": "x"}',
        )
        held = [choice != "none", choice != "required", choice != "required", False, False]
        assert [takes(hermes, grammar.text, text) for text in texts] == held


def takes(api: Api, grammar: str, text: str) -> bool:
    matcher = LLMatcher(family_llguidance("hermes"), grammar)
    tokens = api.services.tokenizer.encode(text, add_special_tokens=False)
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


async def test_what_cannot_be_held_to_is_refused_by_its_place(hermes: Api, acme: Client) -> None:
    parameters = {"type": "object", "properties": {"a": {"type": "string", "propertyNames": {}}}}
    odd = {"type": "function", "function": {"name": "odd", "parameters": parameters}}
    refused = (await chat(acme, tools=[odd], tool_choice="required")).json()["error"]
    assert refused["code"] == "invalid_json_schema"
    assert refused["param"] == "tools.0.function.parameters.properties.a"
    assert (await chat(acme, tools=[odd])).status_code == 200
    other = await chat(acme, tool_choice={"type": "function", "function": {"name": "other"}})
    assert other.json()["error"]["param"] == "tool_choice"


async def test_openais_own_client_reads_calls_whole_and_streamed(hermes: Api, url: str) -> None:
    hermes.engine.write = lambda _: CALL
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=await hermes.key("acme")) as client:
        asked: dict[str, Any] = {"model": BASE, "messages": MESSAGES, "tools": [WHERE_IS]}
        whole = await client.chat.completions.create(**asked)
        calls = whole.choices[0].message.tool_calls
        assert calls is not None
        assert calls[0].type == "function"
        assert json.loads(calls[0].function.arguments) == {"item": "lamp"}
        history = [
            *MESSAGES,
            whole.choices[0].message,
            {"role": "tool", "tool_call_id": calls[0].id, "content": "3"},
        ]
        again = await client.chat.completions.create(**{**asked, "messages": history})
        assert again.choices[0].finish_reason == "tool_calls"
        async with client.chat.completions.stream(**asked) as stream:
            final = (await stream.get_final_completion()).choices[0]
        assert final.finish_reason == "tool_calls"
        assert final.message.tool_calls is not None
        assert json.loads(final.message.tool_calls[0].function.arguments) == {"item": "lamp"}


async def test_special_tokens_of_the_format_reach_the_reader(api: Api, acme: Client) -> None:
    use_tokenizer(
        api,
        tokenizer_with(
            "{{ messages[0].content }}{# [TOOL_CALLS] [ARGS] #}", ("[TOOL_CALLS]", "[ARGS]")
        ),
    )
    tokens = api.services.tokenizer.special_tokens
    reader = TextStream(
        api.services.tokenizer,
        SamplingParams(),
        [],
        {tokens["[TOOL_CALLS]"]: "[TOOL_CALLS]", tokens["[ARGS]"]: "[ARGS]"},
    )
    ids = api.services.tokenizer.encode(
        "Hi [TOOL_CALLS]where_is[ARGS]{}<|end|>", add_special_tokens=False
    )
    delta = reader.push(RequestOutput(request_id="r", token_ids=ids, finish_reason="length"))
    assert delta.text == "Hi [TOOL_CALLS]where_is[ARGS]{}"
    answer = await chat(acme)
    assert answer.status_code == 200, answer.text


async def test_special_tokens_show_only_where_they_are_read(
    api: Api, acme: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    special = ("[TOOL_CALLS]", "[ARGS]", "[THINK]", "[/THINK]", "[INST]", "[/INST]")
    tokenizer = tokenizer_with(f"{{{{ messages[0].content }}}}{{# {' '.join(special)} #}}", special)
    use_tokenizer(api, tokenizer)
    monkeypatch.setattr("fake_engine.demo_tokenizer", lambda: tokenizer)
    api.engine.write = lambda _: (
        '[THINK]Hm.[/THINK]I [/INST]say [TOOL_CALLS]where_is[ARGS]{"item": "lamp"}'
    )
    plain: list[dict[str, Any]] = [{"tools": []}, {"tool_choice": "none"}]
    for fields in plain:
        message = (await chat(acme, **fields)).json()["choices"][0]["message"]
        assert (message["content"], message["reasoning"]) == (
            'I say where_is{"item": "lamp"}',
            "Hm.",
        )
    message = (await chat(acme)).json()["choices"][0]["message"]
    assert (message["content"], message["tool_calls"][0]["function"]["name"]) == (
        "I say",
        "where_is",
    )


async def test_chats_with_tools_are_prepared_off_the_event_loop(
    hermes: Api, acme: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[threading.Thread] = []

    def planned(*args: Any, **fields: Any) -> AnswerPlan:
        threads.append(threading.current_thread())
        return plan_answer(*args, **fields)

    monkeypatch.setattr("manylora.server.generation.prompts.plan_answer", planned)
    odd = {"type": "object", "properties": {"item": {"anyOf": 5}, "shelf": {"$ref": "#/$defs/x"}}}
    odd["$defs"] = {"x": {"anyOf": [{"$ref": "#/$defs/x"}]}}
    answer = await chat(
        acme, tools=[{"type": "function", "function": {"name": "f", "parameters": odd}}]
    )
    assert answer.status_code == 200, answer.text
    assert threads
    assert threading.main_thread() not in threads
