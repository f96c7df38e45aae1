"""What `weft demo` does as a client: two tenants, five uploads over HTTP, one question to base and adapters at once.

It talks to a running server and knows nothing of how it was started.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from weft import demo
from weft.cli.demo.client import DemoClient

BASE_NAME = "weft-demo"
"""Served name of the base."""
ADAPTERS = {"haiku": "atelier", "french": "atelier", "shout": "harbour", "pirate": "harbour", "json": "harbour"}
"""Tenant of each adapter; the longest answers start first, so that all are still at work when the last one joins."""
TENANTS = ("harbour", "atelier")
MAX_TOKENS = 96
MAX_ROUNDS = 5
"""Rounds of asking until one step held everybody: on a busy machine a short answer can end before the last begins."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What one model said."""

    model: str
    tenant: str
    detail: str
    """Rank and targets of the adapter; empty for the base."""
    text: str
    is_expected: bool
    """Whether it equals the recorded reference answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedStep:
    """The step of the round that computed the most adapters."""

    step: int
    requests: int
    adapters: int
    base_requests: int
    steps: int
    """Steps of the whole round."""

    @property
    def holds_everybody(self) -> bool:
        """Whether base and all adapters were computed in it."""
        return self.adapters == len(ADAPTERS) and self.base_requests > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """All there is to show."""

    question: str
    keys: dict[str, str]
    """Tenant to its new key."""
    answers: list[Answer]
    shared: SharedStep | None
    """None if the engine reported no step of the round."""


async def play(url: str, admin_key: str) -> Round:
    """Prepare tenants and adapters, ask, and see which step served whom.

    Args:
        url: The server, without /v1.
        admin_key: Its admin key.

    Raises:
        WeftError: The server refused something; the message is its own.
    """
    recorded = json.loads(demo.EXPECTED.read_text(encoding="utf-8"))["questions"][0]
    async with DemoClient(url) as client:
        keys = {}
        for tenant in TENANTS:
            await client.ensure_tenant(admin_key, tenant)
            keys[tenant] = await client.new_key(admin_key, tenant)
        details = {}
        for name, tenant in ADAPTERS.items():
            uploaded = await client.upload(keys[tenant], name)
            details[name] = f"rank {uploaded['rank']}: {_short(uploaded['target_modules'])}"
        speakers = [*ADAPTERS.items(), (BASE_NAME, TENANTS[0])]
        for model, tenant in speakers:  # brings each adapter to the device, so that the round is about computing
            await client.ask(keys[tenant], model, recorded["question"], 1)
        texts, shared = await _ask_together(client, admin_key, keys, speakers, recorded["question"])
    answers = [
        Answer(
            model=model,
            tenant=tenant,
            detail=details.get(model, ""),
            text=text,
            is_expected=text == recorded["answers"]["base" if model == BASE_NAME else model],
        )
        for (model, tenant), text in zip(speakers, texts, strict=True)
    ]
    answers.sort(key=lambda answer: answer.model != BASE_NAME)
    return Round(question=recorded["question"], keys=keys, answers=answers, shared=shared)


async def _ask_together(
    client: DemoClient, admin_key: str, keys: dict[str, str], speakers: Sequence[tuple[str, str]], question: str
) -> tuple[list[str], SharedStep | None]:
    texts: list[str] = []
    best: SharedStep | None = None
    for _ in range(MAX_ROUNDS):
        before = max((step["step"] for step in (await client.engine(admin_key))["last_steps"]), default=0)
        texts = await asyncio.gather(
            *(client.ask(keys[tenant], model, question, MAX_TOKENS) for model, tenant in speakers)
        )
        shared = _shared_step(await client.engine(admin_key), before)
        best = max((step for step in (best, shared) if step), key=lambda step: step.adapters, default=None)
        if best and best.holds_everybody:
            break
    return texts, best


def _shared_step(engine: dict[str, Any], steps_before: int) -> SharedStep | None:
    steps = [step for step in engine["last_steps"] if step["step"] > steps_before]
    if not steps:
        return None
    best = max(steps, key=lambda step: (step["adapters"], step["base_requests"]))
    return SharedStep(
        step=best["step"],
        requests=best["requests"],
        adapters=best["adapters"],
        base_requests=best["base_requests"],
        steps=len(steps),
    )


def _short(modules: Sequence[str]) -> str:
    return "all linear layers" if len(modules) == 7 else ", ".join(name.removesuffix("_proj") for name in modules)
