"""The client side of `manylora demo`: two tenants, five uploads over HTTP, one question to base and adapters at once.

It talks to a running server and knows nothing of how it was started.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from manylora import demo
from manylora.client import Client
from manylora.errors import ClientError

BASE_NAME = "manylora-demo"
"""Served name of the base."""
ADAPTERS = {
    "haiku": "atelier",
    "french": "atelier",
    "shout": "harbour",
    "pirate": "harbour",
    "json": "harbour",
}
"""Tenant of each adapter. The longest answers start first: all must still be running when the last one starts."""
TENANTS = ("harbour", "atelier")
SPEAKERS = {**ADAPTERS, BASE_NAME: TENANTS[0]}
"""Tenant that asks each model."""
MAX_TOKENS = 96
MAX_ROUNDS = 20
"""Most rounds until one step computes all models: on a busy machine a short answer can end before the last starts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The answer of one model."""

    model: str
    tenant: str
    detail: str
    """Rank and targets of the adapter; empty for the base."""
    text: str
    is_expected: bool
    """True if it equals the recorded reference answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """The answers that `manylora demo` shows."""

    question: str
    keys: dict[str, str]
    """Tenant to its new key."""
    answers: list[Answer]
    shared: dict[str, Any] | None
    """The step that computed the most adapters, as the engine reports it; None if the engine reported none."""


def play(url: str, admin_key: str) -> Round:
    """Prepare tenants and adapters, ask all models at once, and find the step that computed the most of them.

    Args:
        url: The server, without /v1.
        admin_key: Its admin key.

    Raises:
        ManyloraError: The server refused something; the message is its own.
    """
    recorded = json.loads(demo.EXPECTED.read_text(encoding="utf-8"))["questions"][0]
    with Client(url, admin_key) as admin:
        keys = {tenant: _new_key(admin, tenant) for tenant in TENANTS}
        clients = {tenant: Client(url, key) for tenant, key in keys.items()}
        details = {}
        for name, tenant in ADAPTERS.items():
            uploaded = clients[tenant].push(demo.ADAPTERS / name)
            details[name] = f"rank {uploaded['rank']}: {_short(uploaded['target_modules'])}"
        texts, shared = _ask_together(admin, clients, recorded["question"])
    expected = {**recorded["answers"], BASE_NAME: recorded["answers"]["base"]}
    answers = [
        Answer(
            model=model,
            tenant=SPEAKERS[model],
            detail=details.get(model, ""),
            text=texts[model],
            is_expected=texts[model] == expected[model],
        )
        for model in (BASE_NAME, *ADAPTERS)
    ]
    return Round(question=recorded["question"], keys=keys, answers=answers, shared=shared)


def _new_key(admin: Client, tenant: str) -> str:
    """The secret of a new key of a tenant, which is created on first use."""
    try:
        admin.create_tenant(tenant)
    except ClientError as error:
        if error.code != "conflict":
            raise
    return str(admin.create_key(tenant, name="demo")["key"])


def ask(client: Client, model: str, question: str, max_tokens: int) -> str:
    """Ask a model a question; returns its greedy answer."""
    messages = [{"role": "user", "content": question}]
    body = {"model": model, "messages": messages, "max_tokens": max_tokens, "temperature": 0}
    answer = client.request("POST", "/v1/chat/completions", json=body)
    return str(answer["choices"][0]["message"]["content"])


def _ask_together(
    admin: Client, clients: Mapping[str, Client], question: str
) -> tuple[dict[str, str], dict[str, Any] | None]:
    """Ask all models at once until one step computed all of them; the first round brings the adapters to the device."""
    texts: dict[str, str] = {}
    best: dict[str, Any] | None = None
    with ThreadPoolExecutor(len(SPEAKERS)) as threads:
        for _ in range(MAX_ROUNDS):
            asked = {
                model: threads.submit(ask, clients[tenant], model, question, MAX_TOKENS)
                for model, tenant in SPEAKERS.items()
            }
            texts = {model: answer.result() for model, answer in asked.items()}
            best = max(
                admin.engine()["last_steps"],
                key=lambda step: (step["adapters"], step["base_requests"]),
                default=None,
            )
            if best and holds_everybody(best):
                break
    return texts, best


def holds_everybody(step: Mapping[str, Any]) -> bool:
    """Say if the step computed the base and all adapters."""
    return bool(step["adapters"] == len(ADAPTERS) and step["base_requests"])


def _short(modules: Sequence[str]) -> str:
    return (
        "all linear layers"
        if len(modules) == 7
        else ", ".join(name.removesuffix("_proj") for name in modules)
    )
