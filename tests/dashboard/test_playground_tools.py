"""The playground with tools and a schema: what is sent, calls and results, reasoning, and whether an answer fits."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any
from urllib.parse import quote

import pytest
from playwright.sync_api import Locator, Page, Request, Route, expect

from browser import sign_in
from manylora_server import ManyloraServer

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {
                "type": "object",
                "properties": {"item": {"type": "string"}},
                "required": ["item"],
            },
        },
    }
    for name in ("where_is", "price_of")
]
SCHEMA = {
    "type": "object",
    "properties": {
        "item": {"type": "string"},
        "sizes": {"type": "array", "items": {"enum": [1, 2]}},
    },
    "required": ["item"],
    "additionalProperties": False,
}


def piece(index: int, arguments: str, **first: Any) -> dict[str, Any]:
    """A chunk's delta with a part of a call; `first` is what only the first part has."""
    name = {"name": first.pop("name")} if first else {}
    return {"tool_calls": [{"index": index, "function": {**name, "arguments": arguments}, **first}]}


CALLS = [
    {"role": "assistant", "reasoning_content": "Two things", "reasoning": "Two things"},
    {"reasoning_content": " are asked.", "reasoning": " are asked."},
    piece(0, "", id="call_a", type="function", name="where_is"),
    piece(0, '{"item": '),
    piece(0, '"scarf"}'),
    piece(1, '{"item": "scarf"}', id="call_b", type="function", name="price_of"),
]
ASKED: dict[str, Any] = {"role": "user", "content": "Where is the scarf and how much is it?"}
ANSWERED: list[dict[str, Any]] = [
    ASKED,
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {
                "id": call,
                "type": "function",
                "function": {"name": name, "arguments": '{"item": "scarf"}'},
            }
            for call, name in (("call_a", "where_is"), ("call_b", "price_of"))
        ],
    },
    {"role": "tool", "tool_call_id": "call_a", "content": "shelf 3"},
    {"role": "tool", "tool_call_id": "call_b", "content": "20"},
]


def streamed(deltas: list[dict[str, Any]]) -> str:
    """The body of a stream, as the API writes it."""
    finish = "tool_calls" if any("tool_calls" in delta for delta in deltas) else "stop"
    choices: list[list[dict[str, Any]]] = [
        [{"index": 0, "delta": delta, "finish_reason": None}] for delta in deltas
    ]
    choices.append([{"index": 0, "delta": {}, "finish_reason": finish}])
    usage = {"prompt_tokens": 9, "completion_tokens": 5, "total_tokens": 14}
    chunks = [
        {"object": "chat.completion.chunk", "choices": choice, "usage": usage} for choice in choices
    ]
    return "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"


def sent(request: Request) -> dict[str, Any]:
    return dict(request.post_data_json or {})


def answer_with(
    page: Page, answer: Callable[[list[dict[str, Any]]], list[dict[str, Any]]]
) -> list[dict[str, Any]]:
    """Answer each request of the page from its messages; returns the list into which the bodies go."""
    bodies: list[dict[str, Any]] = []

    def fulfil(route: Route) -> None:
        bodies.append(sent(route.request))
        route.fulfill(
            content_type="text/event-stream", body=streamed(answer(bodies[-1]["messages"]))
        )

    page.route("**/v1/chat/completions", fulfil)
    return bodies


def open_playground(page: Page, server: ManyloraServer, **fields: Any) -> None:
    """The page with one model; `fields` go into its address as JSON."""
    extras = "".join(f"&{name}={quote(json.dumps(value))}" for name, value in fields.items())
    sign_in(page, server.tenants["harbour"], f"/playground?model=manylora-demo{extras}")


def ask(page: Page, prompt: str) -> None:
    page.get_by_label("Prompt", exact=True).fill(prompt)
    page.keyboard.press("Control+Enter")


def exchange(page: Page, nth: int = 0) -> Locator:
    """The exchange, once it is over."""
    found = page.locator(".exchange").nth(nth)
    expect(found).to_have_attribute("data-state", "done")
    return found


def answer_calls(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{"content": "It is there."}] if messages[-1]["role"] == "tool" else CALLS


def test_calls_are_shown_and_their_results_go_back(page: Page, server: ManyloraServer) -> None:
    bodies = answer_with(page, answer_calls)
    open_playground(page, server, tools=TOOLS)
    ask(page, ASKED["content"])
    calls = exchange(page).locator("[data-call]")
    expect(calls).to_have_text(['where_is {"item": "scarf"}', 'price_of {"item": "scarf"}'])
    assert bodies[0]["tools"] == TOOLS
    button = page.get_by_role("button", name="Send the results")
    expect(button).to_be_disabled()
    page.get_by_label("Result of where_is").fill("shelf 3")
    expect(button).to_be_disabled()
    page.get_by_label("Result of price_of").fill("20")
    button.click()
    expect(exchange(page, 1).locator("[data-answer]")).to_have_text("It is there.")
    expect(exchange(page, 1).locator(".asked")).to_have_text(["result: shelf 3", "result: 20"])
    assert bodies[1]["messages"] == ANSWERED
    expect(button).to_have_count(0)
    ask(page, "And the rug?")
    exchange(page, 2)
    final = {"role": "assistant", "content": "It is there."}
    assert bodies[2]["messages"] == [*ANSWERED, final, {"role": "user", "content": "And the rug?"}]


def test_calls_that_nobody_answered_leave_the_conversation(
    page: Page, server: ManyloraServer
) -> None:
    bodies = answer_with(page, answer_calls)
    open_playground(page, server, tools=TOOLS)
    ask(page, ASKED["content"])
    exchange(page)
    ask(page, "Never mind.")
    exchange(page, 1)
    assert bodies[1]["messages"] == [{"role": "user", "content": "Never mind."}]


def test_reasoning_is_folded(page: Page, server: ManyloraServer) -> None:
    answer_with(page, answer_calls)
    open_playground(page, server)
    ask(page, ASKED["content"])
    reasoning = exchange(page).locator("[data-reasoning]")
    expect(reasoning).to_be_hidden()
    page.get_by_text("Reasoning", exact=True).click()
    expect(reasoning).to_have_text("Two things are asked.")


@pytest.mark.parametrize(
    ("label", "text", "error"),
    [
        ("Tools", "[{", "Not valid JSON"),
        ("Tools", '{"name": "where_is"}', "Tools are a JSON array"),
        ("Tools", '[{"name": "where_is"}]', "Tools are a JSON array"),
        ("Schema of the answer", '{"type": }', "Not valid JSON"),
        ("Schema of the answer", "[]", "A JSON schema is an object."),
    ],
)
def test_what_is_wrong_is_said_before_it_is_sent(
    page: Page, server: ManyloraServer, label: str, text: str, error: str
) -> None:
    bodies = answer_with(page, lambda _: [{"content": "ok"}])
    open_playground(page, server)
    page.get_by_text("Tools and schema").click()
    page.get_by_label(label).fill(text)
    expect(page.locator(".field-error")).to_contain_text(error)
    ask(page, "Hello")
    expect(page.get_by_role("button", name="Send to all")).to_be_disabled()
    assert not bodies
    page.get_by_label(label).fill("")
    expect(page.locator(".field-error")).to_have_count(0)
    ask(page, "Hello")
    exchange(page)
    assert {"tools", "response_format"}.isdisjoint(bodies[0])


@pytest.mark.parametrize(
    ("answer", "fault"),
    [
        ('{"item": "scarf", "sizes": [1, 2]}', None),
        ('{"item": "scarf"', "Not valid JSON"),
        ('{"sizes": []}', 'The answer lacks "item".'),
        ('{"item": "scarf", "colour": "red"}', 'The answer has an unknown "colour".'),
        ('{"item": 3}', "The answer.item is not of type string."),
        (
            '{"item": "scarf", "sizes": [1, 3]}',
            "The answer.sizes[1] has a value that the schema does not list.",
        ),
    ],
)
def test_an_answer_says_whether_it_fits_the_schema(
    page: Page, server: ManyloraServer, answer: str, fault: str | None
) -> None:
    bodies = answer_with(page, lambda _: [{"content": answer[:9]}, {"content": answer[9:]}])
    open_playground(page, server, schema=SCHEMA)
    ask(page, "Tell me about the scarf.")
    fit = exchange(page).locator('[data-figure="fit"]')
    expect(fit).to_have_text("does not fit the schema" if fault else "fits the schema")
    assert (fit.get_attribute("title") or "").startswith(fault or "Checked in this page")
    assert bodies[0]["response_format"] == {
        "type": "json_schema",
        "json_schema": {"name": "answer", "schema": SCHEMA, "strict": True},
    }


def test_the_shown_python_has_pythons_words(page: Page, server: ManyloraServer) -> None:
    open_playground(page, server, schema=SCHEMA, tools=TOOLS)
    page.get_by_role("button", name="Call manylora-demo from code").click()
    page.get_by_role("button", name="Python (openai)").click()
    text = page.get_by_role("dialog").locator("pre").inner_text()
    compile(text, "snippet", "exec")
    assert '"additionalProperties": False' in text
    assert '"strict": True' in text
