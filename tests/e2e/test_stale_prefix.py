"""New weights under an old name, and one name of several tenants: cached prefixes are never those of somebody else.

The same prompts go to a server with the prefix cache and to one without.
"""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from idleness import wait_until
from manylora_server import DEMO_ADAPTERS, DEMO_MODEL, ManyloraServer, manylora_server, upload_bytes

BASE = DEMO_MODEL.name
NUM_PROMPTS = 4
NUM_TOKENS = 6
NUM_CLIENTS = 4
MIN_LEAD = 0.01
"""In log-probability. Prompts after which two tokens are closer say nothing about equality, and are passed over: rows
behind a cached prefix are computed in other products."""
SETTINGS = ("--dtype", "float32", "--memory-gib", "0.1")


def demo_files(name: str, **changes: Any) -> tuple[bytes, bytes]:
    """Config and weights of a version's upload."""
    folder = DEMO_ADAPTERS / name
    config = {**json.loads((folder / "adapter_config.json").read_text()), **changes}
    return json.dumps(config).encode(), (folder / "adapter_model.safetensors").read_bytes()


OLD, NEW = demo_files("pirate"), demo_files("shout")
RESCALED = demo_files("pirate", lora_alpha=3)
"""The old weights with another scaling: another version, whose KV is another."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What a server said to a prompt."""

    text: str
    cached_tokens: int
    adapter: str | None
    """As the header names it: tenant/name@version."""
    lead: float
    """The least distance in log-probability between the two likeliest tokens."""


def ask(client: httpx.Client, model: str, prompt: list[int]) -> Answer:
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": NUM_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
    }
    answer = client.post("/v1/completions", json={**body, "logprobs": 2})
    assert answer.status_code == 200, answer.text
    (choice,) = answer.json()["choices"]
    leads = [max(top.values()) - min(top.values()) for top in choice["logprobs"]["top_logprobs"]]
    return Answer(
        text=choice["text"],
        cached_tokens=answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"],
        adapter=answer.headers.get("x-manylora-adapter"),
        lead=min(leads),
    )


def texts(client: httpx.Client, model: str, prompts: list[list[int]]) -> list[str]:
    return [ask(client, model, prompt).text for prompt in prompts]


def cached(client: httpx.Client, model: str, prompts: list[list[int]]) -> list[int]:
    return [ask(client, model, prompt).cached_tokens for prompt in prompts]


def publish(client: httpx.Client, files: tuple[bytes, bytes]) -> None:
    """A version of the adapter `a`."""
    answer = upload_bytes(client, "a", *files)
    assert answer.status_code == 201, answer.text


@dataclass(frozen=True, slots=True)
class Expected:
    """What a server without a prefix cache says, by version of `a` and for the base."""

    prompts: list[list[int]]
    base: list[str]
    old: list[str]
    new: list[str]
    rescaled: list[str]


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Expected:
    settings: dict[str, Any] = {"MANYLORA_MEMORY__PREFIX_CACHE": "false"}
    with manylora_server(tmp_path_factory.mktemp("uncached"), *SETTINGS, **settings) as server:
        client = server.tenant("acme")
        for files in (OLD, NEW, RESCALED):
            publish(client, files)
        models = (BASE, "a@1", "a@2", "a@3")
        rng = random.Random(2)
        prompts: list[list[int]] = []
        answers: list[list[Answer]] = []
        while len(prompts) < NUM_PROMPTS:
            prompt = [
                rng.randrange(6, 600) for _ in range(rng.randint(50, 75))
            ]  # with a part of a page at the end
            said = [ask(client, model, prompt) for model in models]
            if min(answer.lead for answer in said) > MIN_LEAD and len(
                {answer.text for answer in said}
            ) == len(said):
                prompts.append(prompt)
                answers.append(said)
        assert {answer.cached_tokens for said in answers for answer in said} == {0}
        assert cached(client, "a@1", prompts) == [0] * NUM_PROMPTS
        return Expected(
            prompts, *([said[place].text for said in answers] for place in range(len(models)))
        )


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ManyloraServer]:
    with manylora_server(tmp_path_factory.mktemp("cached"), *SETTINGS) as running:
        yield running


def test_a_new_version_never_meets_the_prefixes_of_the_old_one(
    server: ManyloraServer, expected: Expected
) -> None:
    acme, prompts = server.tenant("acme"), expected.prompts
    page_tokens = server.engine()["ready"]["geometry"]["page_tokens"]
    publish(acme, OLD)
    assert cached(acme, "a", prompts) == [0] * NUM_PROMPTS
    assert texts(acme, "a", prompts) == expected.old
    assert cached(acme, "a", prompts) == [
        (len(prompt) - 1) // page_tokens * page_tokens for prompt in prompts
    ]

    publish(acme, NEW)
    first = [ask(acme, "a", prompt) for prompt in prompts]
    assert {answer.adapter for answer in first} == {"acme/a@2"}
    assert [answer.cached_tokens for answer in first] == [0] * NUM_PROMPTS
    assert [answer.text for answer in first] == texts(acme, "a", prompts) == expected.new
    assert min(cached(acme, "a", prompts)) > 0

    assert min(cached(acme, "a@1", prompts)) > 0
    assert texts(acme, "a@1", prompts) == expected.old

    publish(acme, RESCALED)
    rescaled = [ask(acme, "a", prompt) for prompt in prompts]
    assert [answer.cached_tokens for answer in rescaled] == [0] * NUM_PROMPTS
    assert [answer.text for answer in rescaled] == texts(acme, "a", prompts) == expected.rescaled

    assert acme.patch("/v1/adapters/a", json={"aliases": {"default": 1}}).status_code == 200
    assert texts(acme, "a", prompts) == expected.old
    assert cached(acme, BASE, prompts) == [0] * NUM_PROMPTS
    assert texts(acme, BASE, prompts) == expected.base


def test_no_tenant_meets_the_prefixes_of_another(
    server: ManyloraServer, expected: Expected
) -> None:
    prompts = expected.prompts
    globex, initech, hooli = (server.tenant(name) for name in ("globex", "initech", "hooli"))
    for client, files in ((globex, OLD), (initech, OLD), (hooli, NEW)):
        publish(client, files)
    for client, said in ((globex, expected.old), (initech, expected.old), (hooli, expected.new)):
        for model, answers in (("a", said), (BASE, expected.base)):
            first = [ask(client, model, prompt) for prompt in prompts]
            assert [answer.cached_tokens for answer in first] == [0] * NUM_PROMPTS
            second = [ask(client, model, prompt) for prompt in prompts]
            assert min(answer.cached_tokens for answer in second) > 0
            assert (
                [answer.text for answer in first] == [answer.text for answer in second] == answers
            )


def test_while_weights_are_replaced_each_answer_is_that_of_the_version_it_names(
    server: ManyloraServer, expected: Expected
) -> None:
    umbrella, prompts = server.tenant("umbrella"), expected.prompts
    said = {
        "umbrella/a@1": expected.old,
        "umbrella/a@2": expected.new,
        "umbrella/a@3": expected.rescaled,
    }
    publish(umbrella, OLD)
    versions: list[str | None] = []
    is_over = threading.Event()

    def keep_asking(seed: int) -> None:
        rng = random.Random(seed)
        with server.client(server.tenants["umbrella"]) as client:
            while not is_over.is_set():
                number = rng.randrange(NUM_PROMPTS)
                answer = ask(client, "a", prompts[number])
                assert answer.text == said[answer.adapter or ""][number]
                versions.append(answer.adapter)

    with ThreadPoolExecutor(NUM_CLIENTS) as pool:
        asking = [pool.submit(keep_asking, seed) for seed in range(NUM_CLIENTS)]
        try:
            for files in (NEW, RESCALED):
                wait_until_asked(versions, asking)
                publish(umbrella, files)
            wait_until_asked(versions, asking)
        finally:
            is_over.set()
        for job in asking:
            job.result()
    assert set(versions) == set(said)


def wait_until_asked(versions: list[str | None], asking: Sequence[Future[None]]) -> None:
    """Return once more answers have come than can have been under way, or a client has failed."""
    wanted = len(versions) + 3 * NUM_CLIENTS
    wait_until(lambda: len(versions) >= wanted or any(job.done() for job in asking))
