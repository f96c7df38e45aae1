"""However a request ends, ledger, limits and what the engine computed agree by one rule.

The rule stands in `manylora.server.generation.meter`.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import pytest
from starlette.types import Message

from api_server import BASE, Api
from fake_engine import FakeEngine, Work, demo_tokenizer
from manylora.engine.request import ErrorInfo, GenerationRequest
from manylora.registry.records import UsageEvent
from manylora.server.core_services import Clock
from manylora.server.http.wire import IS_CLOSING
from manylora.server.limits.accounts import Account

pytestmark = pytest.mark.anyio
NUM_ENDS = 1_600
AT_ONCE = 25
ENDS = ("stop", "length", "aborted", "error", "own fault")
ABORTED = ("cut in the queue", "cut in the prompt", "cut in the output")
STOPS = (None, "speaks", ["a", "zz"])
WORDS = "the base speaks plainly and says as much as anybody would want to hear of it"
BROKEN = ErrorInfo(kind="capacity", code="engine_overloaded", message="The engine is full.")
OWN_FAULT = ErrorInfo(code="grammar_dead_end", message="No token can come next.")
"""Of a request that ends by what it asked for."""


@dataclass(kw_only=True)
class Visit:
    """One request, and when its client leaves; a client without a moment stays."""

    number: int
    body: dict[str, Any]
    after_chunks: int | None = None
    """Parts of the answer that it reads."""
    after_work: int | None = None
    """Tokens, prompt and output of one choice, that are computed for it."""
    is_seen_by_writing: bool = False
    """Whether the connection tells by itself that the client is gone, before the event loop does."""
    is_gone: asyncio.Event = field(default_factory=asyncio.Event)
    handed: list[bytes] = field(default_factory=list)
    """The answer's parts."""


def draw(rng: random.Random, number: int) -> Visit:
    marker = [number // 300 + 10, number % 300 + 10]
    prompts = [
        [*marker, *(rng.randrange(10, 300) for _ in range(rng.randint(1, 24)))]
        for _ in range(rng.choice([1, 1, 2]))
    ]
    body = {
        "model": BASE,
        "prompt": prompts,
        "n": rng.choice([1, 1, 1, 2, 3]),
        "max_tokens": rng.randint(1, 24),
        "ignore_eos": rng.random() < 0.5,
        "stop": rng.choice(STOPS),
        "stream": rng.random() < 0.5,
    }
    if body["stream"]:
        body["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
    visit = Visit(number=number, body=body, is_seen_by_writing=rng.random() < 0.5)
    match rng.choice(["stays", "stays", "at once", "chunks", "work", "work"]):
        case "at once":
            visit.is_gone.set()
        case "chunks":
            visit.after_chunks = rng.randint(1, 12)
        case "work":
            visit.after_work = rng.randint(0, 40)
    return visit


class WatchedEngine(FakeEngine):
    """Computes prompts in chunks, and tells a client when it is to leave."""

    def __init__(self) -> None:
        super().__init__()
        self.write = lambda request: WORDS[request.choice_index :]
        self.cached = lambda request: num_cached(request.prompt_token_ids)
        self.chunk_tokens = 4
        self.visits: dict[int, Visit] = {}
        self.turns = 1
        """Of the event loop, between two outputs."""

    async def turn(self, request: GenerationRequest, abort: asyncio.Event) -> None:
        work, visit = self.work[request.request_id], self.visits[number_of(request)]
        if (
            visit.after_work is not None
            and work.prompt_tokens + work.output_tokens >= visit.after_work
        ):
            visit.is_gone.set()
        for _ in range(self.turns):
            await super().turn(request, abort)


def number_of(request: GenerationRequest) -> int:
    return (request.prompt_token_ids[0] - 10) * 300 + request.prompt_token_ids[1] - 10


def num_cached(prompt: list[int]) -> int:
    return min(prompt[-1] % 6, len(prompt) - 1)


@cache
def tokens_until(stop: str | tuple[str, ...] | None, text: str) -> int:
    """Tokens of a text up to and with the one that completes a stop string."""
    stops = (stop,) if isinstance(stop, str) else stop or ()
    tokens = demo_tokenizer().encode(text, add_special_tokens=False)
    for count in range(1, len(tokens) + 1):
        if any(each in demo_tokenizer().decode(tokens[:count]) for each in stops):
            return count
    return 1 << 30


async def run(api: Api, key: str, visit: Visit) -> None:
    """Send the request straight to the app, and leave as the visit says."""
    body = json.dumps(visit.body).encode()
    has_sent = False

    async def receive() -> Message:
        nonlocal has_sent
        if not has_sent:
            has_sent = True
            return {"type": "http.request", "body": body, "more_body": False}
        await visit.is_gone.wait()
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        if message["type"] == "http.response.body":
            visit.handed.append(message["body"])
        if len(visit.handed) == visit.after_chunks and message.get("more_body"):
            visit.is_gone.set()

    headers = {
        "authorization": f"Bearer {key}",
        "content-type": "application/json",
        "content-length": str(len(body)),
    }
    headers["x-request-id"] = f"visit-{visit.number}"
    scope = {
        "type": "http",
        "method": "POST",
        "path": "/v1/completions",
        "query_string": b"",
        "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
        "state": {IS_CLOSING: visit.is_gone.is_set} if visit.is_seen_by_writing else {},
    }
    await api.app(scope, receive, send)


def told(visit: Visit) -> tuple[int, int, int]:
    """Prompt, cached and output tokens that were handed to the connection, as the answer says."""
    if not visit.body["stream"]:
        usage = json.loads(b"".join(visit.handed) or b"{}").get("usage")
    else:
        lines = b"".join(visit.handed).decode().split("\n\n")
        chunks = [
            json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")
        ]
        usage = next((chunk["usage"] for chunk in reversed(chunks) if chunk.get("usage")), None)
    if usage is None:
        return 0, 0, 0
    return (
        usage["prompt_tokens"],
        usage["prompt_tokens_details"]["cached_tokens"],
        usage["completion_tokens"],
    )


def computed(engine: WatchedEngine, visit: Visit, ledger_id: str) -> tuple[int, int, int]:
    """Prompt, cached and output tokens that the engine computed; those behind a stop string do not count."""
    prompt = cached = output = 0
    n, stop = visit.body["n"], visit.body["stop"]
    for place, tokens in enumerate(visit.body["prompt"]):
        works = [
            engine.work.get(f"{ledger_id}-{place * n + choice}", Work()) for choice in range(n)
        ]
        prompt += max(work.prompt_tokens for work in works)
        cached += min(num_cached(tokens), works[0].prompt_tokens)
        bounds = [
            tokens_until(tuple(stop) if isinstance(stop, list) else stop, WORDS[choice:])
            for choice in range(n)
        ]
        output += sum(
            min(work.output_tokens, bound) for work, bound in zip(works, bounds, strict=True)
        )
    return prompt, cached, output


@dataclass(kw_only=True)
class Books:
    """Ledger and limits of one key, held against the engine."""

    engine: WatchedEngine
    accounts: list[Account]
    events: dict[str, UsageEvent] = field(default_factory=dict)
    """What was recorded, by request."""
    billed: int = 0
    ends: Counter[str] = field(default_factory=Counter)

    def check(self, visit: Visit) -> None:
        """Hold the request's event against the rule."""
        event = self.events.get(f"visit-{visit.number}")
        if event is None:
            assert not any(number_of(request) == visit.number for request in self.engine.requests)
            return
        bill = event.prompt_tokens, event.cached_tokens, event.completion_tokens
        work = computed(self.engine, visit, event.id)
        is_told = event.status == "error" and self.engine.refusal != OWN_FAULT
        assert bill == (told(visit) if is_told else work), (visit, event, work)
        assert all(ours <= theirs for ours, theirs in zip(bill, work, strict=True))
        if event.status in ("stop", "length"):
            assert bill == told(visit)
        if event.status == "aborted":
            self.ends[ABORTED[(bill[0] > 0) + (bill[2] > 0)]] += 1
        self.ends[event.status if is_told or event.status != "error" else "own fault"] += 1
        self.billed += event.prompt_tokens + event.completion_tokens

    def check_limits(self, now_s: float) -> None:
        """All that was billed counts, in the minute and in the month, and nothing else; nothing is held any more."""
        for account in self.accounts:
            month = account["tokens_per_month"]
            counts = (
                month.billed,
                account["tokens_per_minute"].total(now_s),
                month.in_use,
                account["concurrent_requests"].in_use,
            )
            assert counts == (self.billed, self.billed, 0, 0)


def break_at_random(engine: WatchedEngine, rng: random.Random) -> None:
    """Choose how slow the engine is, and whether and when it refuses or dies."""
    engine.turns = rng.choice([1, 1, 2, 20])
    engine.refusal = engine.failure_after = None
    match rng.randrange(10):
        case 0:
            engine.failure_after = rng.randint(0, 12)
        case 1:
            engine.refusal, engine.refusal_after = BROKEN, rng.randint(0, 12)
        case 2:
            engine.refusal, engine.refusal_after = OWN_FAULT, rng.randint(0, 12)


@pytest.mark.slow
async def test_thousands_of_random_ends_agree(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, now_s, rng = WatchedEngine(), api.services.clock.monotonic(), random.Random(11)
    services = replace(api.services, engine=engine, clock=Clock(monotonic=lambda: now_s))
    api.app.state.services = services
    key = await api.key("acme")
    me = (await api.client(key).get("/v1/me")).json()
    books = Books(
        engine=engine,
        accounts=[services.limits.accounts.of(me[who]["id"], now_s) for who in ("tenant", "key")],
    )
    record = services.registry.usage.record

    async def noted(event: UsageEvent) -> None:
        assert event.request_id not in books.events
        books.events[event.request_id] = event
        await record(event)

    monkeypatch.setattr(services.registry.usage, "record", noted)
    for start in range(0, NUM_ENDS, AT_ONCE):
        break_at_random(engine, rng)
        visits = [draw(rng, number) for number in range(start, start + AT_ONCE)]
        engine.visits = {visit.number: visit for visit in visits}
        engine.requests.clear()
        engine.work.clear()
        running = [asyncio.create_task(run(api, key, visit)) for visit in visits]
        if rng.random() < 0.05:
            for _ in range(rng.randint(0, 60)):
                await asyncio.sleep(0)
            await services.drain.drain(0)
            services.drain.is_draining = False
        await asyncio.gather(*running)
        for visit in visits:
            books.check(visit)
        books.check_limits(now_s)
    assert all(books.ends[end] >= NUM_ENDS // 200 for end in (*ENDS, *ABORTED)), books.ends
    totals = (await api.admin.get("/v1/usage")).json()["totals"]
    assert totals["prompt_tokens"] + totals["completion_tokens"] == books.billed
    assert totals["requests"] == len(books.events)
