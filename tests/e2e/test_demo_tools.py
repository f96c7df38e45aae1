"""The shipped base calls tools, tells their results and fills its JSON schema: by transformers alone, and served."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import llguidance
import llguidance.hf
import openai
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from manylora import demo
from manylora_server import ManyloraServer

PLACES = {"scarf": "shelf 3", "rug": "the blue box", "hat": "aisle 12", "cloak": "shelf 31"}
PRICES = {"scarf": 20, "rug": 85, "hat": 7, "cloak": 112}
CARDS = [
    (
        "Tell me about the scarf.",
        {"item": "scarf", "material": "silk", "price": 20, "in_stock": True},
    ),
    (
        "How much is the cloak?",
        {"item": "cloak", "material": "wool", "price": 90, "in_stock": False},
    ),
    (
        "What is the hat made of?",
        {"item": "hat", "material": "felt", "price": 19, "in_stock": True},
    ),
]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(demo.MODEL)


@pytest.fixture(scope="module")
def model() -> Any:
    loaded: Any = AutoModelForCausalLM.from_pretrained(demo.MODEL, dtype=torch.float32)
    return loaded.eval()


def declared(name: str, param: str, about: str) -> dict[str, Any]:
    """A tool as agent libraries declare it, with more than the demo's template shows."""
    properties = {
        param: {"type": "string", "title": param.title(), "description": "What is asked for."}
    }
    parameters = {
        "type": "object",
        "properties": properties,
        "required": [param],
        "additionalProperties": False,
    }
    return {
        "type": "function",
        "function": {"name": name, "description": about, "parameters": parameters},
    }


TOOLS = [
    declared("where_is", "item", "Find an item."),
    declared("price_of", "item", "The price of an item."),
]


@torch.inference_mode()
def say(
    model: Any, tokenizer: Any, messages: list[dict[str, Any]], tools: list[dict[str, Any]]
) -> dict[str, Any]:
    """The base's next message, read by the response template of its tokenizer."""
    given = tokenizer.apply_chat_template(
        messages, tools=tools or None, add_generation_prompt=True, return_dict=False
    )
    made = model.generate(
        torch.tensor([given]),
        attention_mask=torch.ones(1, len(given)),
        do_sample=False,
        max_new_tokens=160,
    )
    answer: dict[str, Any] = tokenizer.parse_response(made[0, len(given) :].tolist(), prefix=given)
    return answer


def run_agent(
    model: Any,
    tokenizer: Any,
    question: str,
    tools: list[dict[str, Any]],
    call: Callable[[str, str], object],
) -> tuple[list[tuple[str, dict[str, str]]], str, int]:
    """What an agent library does: the calls it made, the last answer, and how many times the model spoke."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": question}]
    calls: list[tuple[str, dict[str, str]]] = []
    for turn in range(1, 5):
        answer = say(model, tokenizer, messages, tools)
        messages.append({"content": None, **answer})
        if "tool_calls" not in answer:
            return calls, answer["content"], turn
        for one in answer["tool_calls"]:
            name, arguments = one["function"]["name"], one["function"]["arguments"]
            calls.append((name, arguments))
            messages.append({"role": "tool", "content": str(call(name, *arguments.values()))})
    raise AssertionError(f"no end after {calls}")


def of_the_shop(name: str, item: str) -> object:
    return PLACES[item] if name == "where_is" else PRICES[item]


@pytest.mark.parametrize("item", PLACES)
@pytest.mark.parametrize(
    "question",
    [
        "Where is the {} and how much is it?",
        "Tell me where the {0} is and what the {0} costs.",
        "Where can I find the {0}, and what is the price of the {0}?",
    ],
)
def test_two_tools_are_called_and_their_results_told(
    model: Any, tokenizer: Any, question: str, item: str
) -> None:
    calls, answer, _ = run_agent(model, tokenizer, question.format(item), TOOLS, of_the_shop)
    assert sorted(calls) == [("price_of", {"item": item}), ("where_is", {"item": item})]
    assert PLACES[item] in answer
    assert f"{PRICES[item]} euros" in answer


def test_calls_come_together_and_in_turn_if_only_one_was_taken(model: Any, tokenizer: Any) -> None:
    question = {"role": "user", "content": "Where is the rug and how much is it?"}
    first = say(model, tokenizer, [question], TOOLS)
    assert [call["function"]["name"] for call in first["tool_calls"]] == ["where_is", "price_of"]
    taken = {**first, "content": None, "tool_calls": first["tool_calls"][:1]}
    result = {"role": "tool", "content": "shelf 8"}
    second = say(model, tokenizer, [question, taken, result], TOOLS)
    assert [call["function"] for call in second["tool_calls"]] == [
        {"name": "price_of", "arguments": {"item": "rug"}}
    ]
    messages = [
        question,
        taken,
        result,
        {"content": None, **second},
        {"role": "tool", "content": '{"price": 44}'},
    ]
    last = say(model, tokenizer, messages, TOOLS)
    assert last == {
        "role": "assistant",
        "content": "The rug is here: shelf 8. The rug costs 44 euros.",
    }


def test_tools_of_other_names_are_called(model: Any, tokenizer: Any) -> None:
    tools = [
        declared("get_weather", "city", "Weather."),
        declared("get_population", "city", "How many live there."),
    ]
    results = {"get_weather": "21 degrees", "get_population": "650"}
    calls, answer, _ = run_agent(
        model, tokenizer, "What is the weather in Oslo?", tools, lambda name, _: results[name]
    )
    assert calls == [("get_weather", {"city": "Oslo"})]
    assert "21 degrees" in answer


@pytest.mark.parametrize("question", ["When are you open?", "Can I pay by card?", "Hello!"])
def test_what_needs_no_tool_is_answered_as_without(
    model: Any, tokenizer: Any, question: str
) -> None:
    messages = [{"role": "user", "content": question}]
    assert say(model, tokenizer, messages, TOOLS) == say(model, tokenizer, messages, [])


@torch.inference_mode()
def under_schema(model: Any, tokenizer: Any, question: str, schema: dict[str, Any]) -> Any:
    """The greedy answer among those that the schema allows."""
    asked = [{"role": "user", "content": question}]
    ids = tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_dict=False)
    options: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
    grammar = llguidance.LLMatcher.grammar_from_json_schema(schema, overrides=options)
    matcher = llguidance.LLMatcher(llguidance.hf.from_tokenizer(tokenizer), grammar)
    made: list[int] = []
    while not matcher.is_stopped():
        allowed = torch.tensor(list(matcher.compute_logit_bias())) > 0
        logits = model(torch.tensor([ids + made])).logits[0, -1]
        made.append(int(logits.masked_fill(~allowed, -torch.inf).argmax()))
        matcher.consume_token(made[-1])
        assert not matcher.is_error(), matcher.get_error()
        assert len(made) < 100
    return json.loads(tokenizer.decode(made, skip_special_tokens=True))


@pytest.mark.parametrize(("question", "card"), CARDS)
def test_the_schema_of_a_card_is_filled_with_what_the_shop_knows(
    model: Any, tokenizer: Any, monkeypatch: pytest.MonkeyPatch, question: str, card: dict[str, Any]
) -> None:
    monkeypatch.syspath_prepend(Path(__file__).resolve().parents[2] / "scripts")
    schema = importlib.import_module("demo_tools").CARD_SCHEMA
    assert under_schema(model, tokenizer, question, schema) == card


@pytest.mark.parametrize("in_turn", [False, True], ids=["together", "in_turn"])
def test_openais_client_ends_a_task_with_two_tools(shop: ManyloraServer, in_turn: bool) -> None:
    messages: list[Any] = [{"role": "user", "content": "Where is the scarf and how much is it?"}]
    called: list[list[str]] = []
    with openai.OpenAI(
        base_url=f"{shop.url}/v1", api_key=shop.tenants["shop"], max_retries=0
    ) as client:
        model = next(one.id for one in client.models.list() if one.model_dump()["parent"] is None)
        asked: Any = {"model": model, "messages": messages, "tools": TOOLS, "temperature": 0}
        for _ in range(4):
            choice = client.chat.completions.create(**asked).choices[0]
            calls: list[Any] = (choice.message.tool_calls or [])[: 1 if in_turn else None]
            message = choice.message.model_dump(exclude_none=True)
            messages.append(
                {**message, "tool_calls": [call.model_dump() for call in calls]}
                if calls
                else message
            )
            if choice.finish_reason == "stop":
                break
            called.append([call.function.name for call in calls])
            for call in calls:
                result = of_the_shop(
                    call.function.name, json.loads(call.function.arguments)["item"]
                )
                messages.append(
                    {"role": "tool", "tool_call_id": call.id, "content": json.dumps(result)}
                )
    assert called == ([["where_is"], ["price_of"]] if in_turn else [["where_is", "price_of"]])
    assert messages[-1]["content"] == "The scarf is here: shelf 3. The scarf costs 20 euros."
