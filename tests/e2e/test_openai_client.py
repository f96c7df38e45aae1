"""openai-python as its users use it, against the real server."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Literal

import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam
from pydantic import BaseModel

from manylora_server import ManyloraServer, expected_answers

ANSWERS = expected_answers()


@pytest.fixture(scope="module")
def client(shop: ManyloraServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=f"{shop.url}/v1", api_key=shop.tenants["shop"], max_retries=0
    ) as client:
        yield client


@pytest.fixture(scope="module")
def base(client: openai.OpenAI) -> str:
    return next(model.id for model in client.models.list() if model.model_dump()["parent"] is None)


def chat(question: str) -> list[ChatCompletionMessageParam]:
    return [{"role": "user", "content": question}]


def test_chat_gives_the_reference_answer_for_base_and_each_adapter(
    client: openai.OpenAI, base: str
) -> None:
    for question in ANSWERS["questions"]:
        for name, answer in question["answers"].items():
            model = base if name == "base" else name
            messages = chat(question["question"])
            got = client.chat.completions.create(
                model=model, messages=messages, temperature=0, max_tokens=64
            )
            assert got.choices[0].message.content == answer
            assert got.choices[0].finish_reason == "stop"
            assert got.usage is not None
            assert got.usage.total_tokens == got.usage.prompt_tokens + got.usage.completion_tokens


def test_responses_and_messages_give_the_reference_answers_too(
    client: openai.OpenAI, shop: ManyloraServer
) -> None:
    import anthropic  # takes a second to import

    question = ANSWERS["questions"][0]
    asked: Any = {"model": "pirate", "temperature": 0}
    whole = client.responses.create(**asked, input=question["question"], max_output_tokens=64)
    with client.responses.stream(
        **asked, input=question["question"], max_output_tokens=64
    ) as stream:
        streamed = stream.get_final_response()
    assert whole.output_text == streamed.output_text == question["answers"]["pirate"]
    assert whole.usage is not None
    assert streamed.usage is not None
    assert whole.usage.output_tokens == streamed.usage.output_tokens
    with anthropic.Anthropic(
        base_url=shop.url, api_key=shop.tenants["shop"], max_retries=0
    ) as other:
        messages: Any = chat(question["question"])
        said = other.messages.create(
            model="pirate", messages=messages, max_tokens=64, extra_body={"temperature": 0}
        )
        counted = other.messages.count_tokens(model="pirate", messages=messages)
    assert said.content[0].to_dict()["text"] == question["answers"]["pirate"]
    assert said.usage.output_tokens == whole.usage.output_tokens
    assert counted.input_tokens == whole.usage.input_tokens


def test_streaming_gives_the_same_text_and_a_usage_chunk(client: openai.OpenAI) -> None:
    question = ANSWERS["questions"][0]
    asked: Any = {
        "model": "pirate",
        "messages": chat(question["question"]),
        "temperature": 0,
        "max_tokens": 64,
    }
    whole = client.chat.completions.create(**asked)
    text, usage = "", None
    for chunk in client.chat.completions.create(
        **asked, stream=True, stream_options={"include_usage": True}
    ):
        if chunk.choices:
            text += chunk.choices[0].delta.content or ""
        else:
            usage = chunk.usage
    assert text == question["answers"]["pirate"]
    assert whole.usage is not None
    assert usage is not None
    assert usage.completion_tokens == whole.usage.completion_tokens
    assert usage.prompt_tokens == whole.usage.prompt_tokens


def test_errors_are_the_clients_own_exception_types(
    client: openai.OpenAI, base: str, shop: ManyloraServer
) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="no-such-adapter", messages=chat("hi"))
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("no-such-adapter")
    with pytest.raises(openai.BadRequestError):
        client.completions.create(model=base, prompt="hi", temperature=-1)
    stranger = openai.OpenAI(base_url=f"{shop.url}/v1", api_key="wrong", max_retries=0)
    with stranger, pytest.raises(openai.AuthenticationError):
        stranger.models.list()


def test_clients_recognise_an_overflow(
    client: openai.OpenAI, base: str, shop: ManyloraServer
) -> None:
    """openai by the code, LiteLLM by the words, LangChain by the code within the words."""
    with pytest.raises(openai.BadRequestError) as long:
        client.completions.create(model=base, prompt=[5] * 100_000, max_tokens=1)
    assert long.value.code == "context_length_exceeded"
    assert "This model's maximum context length is" in str(long.value)
    assert "context_length_exceeded" in str(long.value)
    server: dict[str, object] = {
        "base_url": f"{shop.url}/v1",
        "api_key": shop.tenants["shop"],
        "max_retries": 0,
    }
    if find_spec("litellm"):
        litellm = import_module("litellm")
        with pytest.raises(litellm.ContextWindowExceededError):
            litellm.completion(model=f"openai/{base}", messages=chat("open " * 5000), **server)
    if find_spec("langchain_openai"):
        model = import_module("langchain_openai").ChatOpenAI(model=base, **server)
        with pytest.raises(import_module("langchain_core.exceptions").ContextOverflowError):
            model.invoke("open " * 5000)


def test_a_month_used_up_is_asked_once(shop: ManyloraServer, base: str) -> None:
    shop.tenant("frugal")
    key, seen = shop.new_key("frugal", limits={"tokens_per_month": 5}), list[int]()
    http = openai.DefaultHttpxClient(
        event_hooks={"response": [lambda answer: seen.append(answer.status_code)]}
    )
    with openai.OpenAI(
        base_url=f"{shop.url}/v1", api_key=key, max_retries=3, http_client=http
    ) as client:
        client.completions.create(model=base, prompt=[5, 6, 7], max_tokens=2)
        with pytest.raises(openai.RateLimitError) as refused:
            client.completions.create(model=base, prompt=[5, 6, 7], max_tokens=2)
    assert (refused.value.code, refused.value.type) == ("insufficient_quota", "insufficient_quota")
    assert seen == [200, 429]


def test_beam_search_and_best_of_return_the_best_and_bill_all(
    client: openai.OpenAI, base: str
) -> None:
    def ask(model: str, n: int, **fields: object) -> tuple[list[str], int]:
        got = client.completions.create(
            model=model, prompt="The shop", max_tokens=12, n=n, extra_body=fields
        )
        assert got.usage is not None
        return [choice.text for choice in got.choices], got.usage.completion_tokens

    for model in (base, "pirate"):
        beams, billed = ask(model, 4, use_beam_search=True)
        assert len(set(beams)) == 4
        assert ask(model, 2, use_beam_search=True, best_of=4) == (beams[:2], billed)
        greedy = client.completions.create(
            model=model, prompt="The shop", max_tokens=12, temperature=0
        )
        assert ask(model, 1, use_beam_search=True, best_of=1)[0] == [greedy.choices[0].text]
        texts, tokens = ask(model, 2, best_of=5, seed=3)
        assert len(texts) == 2
        assert tokens > 24 or len(set(ask(model, 5, seed=3)[0])) < 5
    with pytest.raises(openai.BadRequestError, match="cannot be streamed"):
        client.completions.create(
            model=base, prompt="x", n=2, stream=True, extra_body={"use_beam_search": True}
        )


def test_parse_gives_an_object_of_the_model_asked_for(client: openai.OpenAI, base: str) -> None:
    class Intent(BaseModel):
        intent: Literal["hours", "place", "price"]
        sure: bool

    for model in ("json", "pirate", base):
        answer = client.chat.completions.parse(
            model=model,
            messages=chat("When are you open?"),
            response_format=Intent,
            temperature=0,
            max_tokens=40,
        )
        assert answer.choices[0].finish_reason == "stop"
        assert isinstance(answer.choices[0].message.parsed, Intent)
    text = ""
    messages = chat("When are you open?")
    with client.chat.completions.stream(
        model="json", messages=messages, response_format=Intent, max_tokens=40
    ) as stream:
        for event in stream:
            if event.type == "content.delta":
                text += event.delta
    assert Intent.model_validate_json(text)
    with pytest.raises(openai.BadRequestError, match="uniqueItems"):
        client.chat.completions.create(
            model=base,
            messages=messages,
            extra_body={"structured_outputs": {"json": {"uniqueItems": True}}},
        )
