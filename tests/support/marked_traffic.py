"""Marked traffic through a server of the demo's model, whose clients note what they were told.

Real requests, drawn from a seed: each time the same, at the same moments. They are sent with keys of their own, by
which their usage is told apart.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import httpx

from manylora import demo
from manylora.benchmarks.http.runner import play
from manylora.cli.demo.round import BASE_NAME, TENANTS
from manylora.cli.demo.traffic import MAX_AT_ONCE, RHYTHM, SPEAKERS
from manylora.client import Client
from manylora.errors import ManyloraError

KEY_NAME = "demo traffic"
"""Name of the keys of the traffic, one per tenant."""
DURATION_S = 60.0
LEFT = "left early"
"""`end` of a request whose client closed the connection early."""

TOKENS = ("prompt_tokens", "cached_tokens", "completion_tokens")
_SEED = 0
_MANNERS = {"question": 12, "talk": 6, "cut": 2, "text": 3, "leave": 1}
"""Ways to ask, by weight."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """A request that will be sent."""

    at_s: float
    """Seconds after the start."""
    tenant: str
    path: str
    body: Mapping[str, Any]
    leaves_after: int | None = None
    """The client closes the connection after this number of completion tokens; None reads to the end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """The server's answer to the client of one request."""

    request_id: str
    end: str
    """A finish reason, `LEFT`, or the code of an error."""
    is_whole: bool
    """True if the client read the answer to its end."""
    tokens: Mapping[str, int]
    """Prompt, cached and completion tokens, as the last usage block that the client read has them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """The keys of the traffic, and what its clients were told."""

    since: datetime
    """A time before the first request."""
    key_ids: tuple[str, ...]
    told: list[Told] = field(default_factory=list)


def plan(duration_s: float = DURATION_S) -> list[Planned]:
    """The requests of the first `duration_s` seconds, in order."""
    rng = random.Random(_SEED)
    asked, recorded = (
        json.loads(path.read_text(encoding="utf-8")) for path in (demo.QUESTIONS, demo.EXPECTED)
    )
    planned = []
    for second in range(math.ceil(duration_s)):
        moments = sorted(second + rng.random() ** 3 for _ in range(RHYTHM[second % len(RHYTHM)]))
        planned += [_draw(rng, moment, asked, recorded["questions"]) for moment in moments]
    return [each for each in planned if each.at_s < duration_s]


async def replay(url: str, admin_key: str, duration_s: float = DURATION_S) -> Traffic:
    """Send the plan's requests when they are due, at most `MAX_AT_ONCE` at a time, until all have ended.

    Args:
        url: A server where `play` was, without /v1.
        admin_key: Its admin key.
        duration_s: Seconds of the plan.

    Raises:
        ManyloraError: The server refused the keys, or does not answer any more.
    """
    with Client(url, admin_key) as client:
        keys = {tenant: _key(client, tenant) for tenant in TENANTS}
    traffic = Traffic(since=datetime.now(UTC), key_ids=tuple(key["id"] for key in keys.values()))
    planned = plan(duration_s)
    async with httpx.AsyncClient(base_url=url, timeout=60, trust_env=False) as http:

        async def send(numbered: tuple[int, Planned], _due_s: float) -> None:
            number, each = numbered
            key = keys[each.tenant]["key"]
            traffic.told.append(await _send(http, key, f"demo-{number:04}", each))

        try:
            await play(
                enumerate(planned, 1),
                send,
                at_once=MAX_AT_ONCE,
                arrivals_s=[each.at_s for each in planned],
            )
        except httpx.TransportError as error:
            raise ManyloraError(f"The server does not answer any more ({error}).") from error
    return traffic


def _key(client: Client, tenant: str) -> dict[str, Any]:
    """The tenant's key for traffic, created or rotated: the secret of an earlier run is not known any more."""
    for key in client.list_keys(tenant):
        if key["name"] == KEY_NAME:
            return client.rotate_key(key["id"])
    return client.create_key(tenant, name=KEY_NAME, scopes=["infer"])


def _draw(
    rng: random.Random, at_s: float, asked: Mapping[str, Any], recorded: Sequence[Mapping[str, Any]]
) -> Planned:
    model, tenant = _pick(rng, SPEAKERS)
    manner = _pick(rng, _MANNERS)
    question = rng.choice(asked["questions"])
    body: dict[str, Any] = {
        "model": model,
        "temperature": rng.choice((0, 0, 0.7)),
        "seed": rng.randrange(1 << 31),
    }
    body["messages"] = [{"role": "user", "content": question}]
    path = "/v1/chat/completions"
    leaves_after = None
    if manner == "question":
        body["max_tokens"] = 96
    elif manner == "talk":
        body.update(messages=_talk(rng, model, asked["system_prompts"], recorded), max_tokens=64)
    elif manner == "cut":
        body["max_tokens"] = rng.randint(3, 8)
    elif manner == "text":
        del body["messages"]
        path = "/v1/completions"
        body.update(prompt=question, max_tokens=rng.randint(40, 160), ignore_eos=True)
    else:
        body.update(max_tokens=400, ignore_eos=True)
        leaves_after = rng.randint(5, 60)
    if leaves_after is not None or rng.random() < 0.6:
        options = {"include_usage": True, "continuous_usage_stats": leaves_after is not None}
        body.update(stream=True, stream_options=options)
    return Planned(at_s=at_s, tenant=tenant, path=path, body=body, leaves_after=leaves_after)


def _pick(rng: random.Random, weighted: Mapping[Any, int]) -> Any:
    return rng.choices(list(weighted), list(weighted.values()))[0]


def _talk(
    rng: random.Random,
    model: str,
    system_prompts: Mapping[str, str],
    recorded: Sequence[Mapping[str, Any]],
) -> list[dict[str, str]]:
    """A part of one of two conversations; its earlier turns are in the prefix cache when it comes again."""
    style = "base" if model == BASE_NAME else model
    told = recorded[:: rng.choice((1, -1))][: rng.randint(3, 6)]
    messages = [
        {"role": "system", "content": system_prompts.get(style, "You are a helpful assistant.")}
    ]
    for exchange in told:
        messages.append({"role": "user", "content": exchange["question"]})
        messages.append({"role": "assistant", "content": exchange["answers"][style]})
    return messages[:-1]


async def _send(http: httpx.AsyncClient, key: str, request_id: str, planned: Planned) -> Told:
    headers = {"Authorization": f"Bearer {key}", "x-request-id": request_id}
    usage: dict[str, Any] = {}
    end = "cut off"
    is_whole = False
    async with http.stream("POST", planned.path, headers=headers, json=planned.body) as answer:
        async for line in answer.aiter_lines():  # of a stream, or the body, which is one line
            data = line.removeprefix("data: ")
            if not data.startswith("{"):
                continue
            event = json.loads(data)
            if "error" in event:
                end = str(event["error"]["code"])
                is_whole = False
                break
            usage = event.get("usage") or usage
            if reason := next((choice["finish_reason"] for choice in event["choices"]), None):
                end = reason
                is_whole = True
            elif not is_whole and usage.get("completion_tokens", 0) >= (
                planned.leaves_after or math.inf
            ):
                end = LEFT
                break
    usage = {**usage, **usage.get("prompt_tokens_details", {})}
    tokens = {figure: usage.get(figure, 0) for figure in TOKENS}
    return Told(request_id=request_id, end=end, is_whole=is_whole, tokens=tokens)
