"""Limits over HTTP: what is refused with which words, what is given back, and what a month remembers."""

from __future__ import annotations

import asyncio
import random
import re
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import anyio
import httpx
import openai
import pytest
from starlette.types import Message, Receive, Scope, Send

from api_adapters import sound, upload
from api_server import BASE, Api, eventually, new_client
from api_server import api as open_api
from manylora.engine.request import ErrorInfo
from manylora.errors import CapacityError
from manylora.registry.limits import KEY_LIMITS, TENANT_LIMITS, LimitKind
from manylora.server.core_services import Clock
from manylora.server.generation import run as generation_run
from manylora.server.limits.accounts import Accounts

pytestmark = pytest.mark.anyio
PROMPT = [5, 6, 7, 8]
SHORT = {"model": BASE, "prompt": PROMPT, "max_tokens": 2, "ignore_eos": True}
CHAT = {"model": BASE, "messages": [{"role": "user", "content": "hi"}]}
MAY = datetime(2026, 5, 31, 23, 50, tzinfo=UTC)


class Clocks:
    """The server's clocks, which move when told to."""

    def __init__(self, api: Api, now: datetime = MAY) -> None:
        self.seconds = 5000.0
        self.now = now
        clock = Clock(monotonic=lambda: self.seconds, now=lambda: self.now)
        self.services = replace(api.services, clock=clock)
        api.services = api.app.state.services = self.services


@pytest.fixture
def clocks(api: Api) -> Clocks:
    return Clocks(api)


async def limited(api: Api, key: dict[str, int] | None = None, **limits: int) -> httpx.AsyncClient:
    """A client of tenant `acme`, whose limits become these; `key` are those of a key of its own."""
    async with api.admin as admin:
        await api.key("acme")
        answer = await admin.patch("/v1/tenants/acme", json={"limits": limits})
        assert answer.status_code == 200, answer.text
        if key is None:
            return await api.tenant("acme")
        made = await admin.post("/v1/tenants/acme/keys", json={"limits": key})
        return api.client(made.json()["key"])


async def complete(client: httpx.AsyncClient, **fields: Any) -> httpx.Response:
    return await client.post("/v1/completions", json={**SHORT, **fields})


async def used(client: httpx.AsyncClient, holder: str = "tenant") -> dict[str, int]:
    me = (await client.get("/v1/me")).json()
    return dict(me["used"][holder])


def refusal(answer: httpx.Response) -> tuple[int, str, str]:
    error = answer.json()["error"]
    return answer.status_code, error["type"], error["code"]


RATE = (429, "rate_limit_error", "rate_limit_exceeded")
QUOTA = (429, "insufficient_quota", "insufficient_quota")


async def test_requests_beyond_the_limit_wait_a_minute(api: Api, clocks: Clocks) -> None:
    client = await limited(api, requests_per_minute=2)
    for remaining in (1, 0):
        answer = await complete(client)
        assert answer.status_code == 200
        assert answer.headers["x-ratelimit-limit-requests"] == "2"
        assert answer.headers["x-ratelimit-remaining-requests"] == str(remaining)
        assert answer.headers["x-ratelimit-reset-requests"] == "1m1s"
        assert "x-ratelimit-limit-tokens" not in answer.headers
    clocks.seconds += 58.5
    refused = await complete(client)
    assert refusal(refused) == RATE
    assert (refused.headers["retry-after"], refused.headers["retry-after-ms"]) == ("3", "2500")
    assert refused.headers["x-ratelimit-remaining-requests"] == "0"
    assert refused.headers["x-ratelimit-reset-requests"] == "3s"
    assert "x-should-retry" not in refused.headers
    assert len(api.engine.requests) == 2
    clocks.seconds += 2.5
    assert (await complete(client)).status_code == 200


async def test_openais_client_waits_as_long_as_it_is_told(
    api: Api, clocks: Clocks, monkeypatch: pytest.MonkeyPatch
) -> None:
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)
        clocks.seconds += seconds

    await complete(await limited(api, requests_per_minute=1))
    clocks.seconds += 58.5
    monkeypatch.setattr(anyio, "sleep", sleep)
    key = await api.key("acme")
    async with (
        api.listening() as url,
        openai.DefaultAsyncHttpxClient(trust_env=False) as http,
        openai.AsyncOpenAI(
            base_url=f"{url}/v1", api_key=key, http_client=http, max_retries=1
        ) as client,
    ):
        await client.completions.create(model=BASE, prompt=PROMPT, max_tokens=2)
    assert slept == [2.5]


async def test_every_route_that_generates_or_tokenizes_counts_and_no_other(
    api: Api, clocks: Clocks
) -> None:
    client = await limited(api, requests_per_minute=100)
    for path in ("/v1/models", "/v1/adapters", "/v1/usage", "/v1/me"):
        answer = await client.get(path)
        assert not [name for name in answer.headers if name.startswith("x-ratelimit")]
    assert (await used(client))["requests_per_minute"] == 0
    for method, path, body in (
        ("POST", "/v1/completions", SHORT),
        ("POST", "/v1/chat/completions", CHAT),
        ("POST", "/v1/responses", {"model": BASE, "input": "x"}),
        ("POST", "/v1/messages", {**CHAT, "max_tokens": 9}),
        ("POST", "/v1/messages/count_tokens", CHAT),
        ("POST", "/tokenize", {"prompt": "x"}),
        ("POST", "/detokenize", {"tokens": [5]}),
        ("GET", "/tokenizer_info", None),
    ):
        answer = await client.request(method, path, json=body)
        assert answer.status_code == 200
        assert "x-ratelimit-remaining-requests" in answer.headers
    assert (await used(client))["requests_per_minute"] == 8


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {"prompt": "a b " * 100}),
        ("/tokenize", {"messages": [{"role": "user", "content": "a b " * 100}]}),
        ("/detokenize", {"tokens": [5] * 200}),
        (
            "/v1/messages/count_tokens",
            {"model": BASE, "messages": [{"role": "user", "content": "a b " * 100}]},
        ),
    ],
)
async def test_tokens_that_are_not_billed_count_in_the_minute_and_not_in_the_month(
    api: Api, clocks: Clocks, path: str, body: dict[str, Any]
) -> None:
    client = await limited(api, tokens_per_minute=150, tokens_per_month=100)
    assert (await client.post(path, json=body)).status_code == 200
    counted = await used(client)
    assert counted["tokens_per_minute"] >= 200
    assert counted["tokens_per_month"] == 0
    refused = await client.post(path, json=body)
    assert (refused.status_code, refused.headers["retry-after"]) == (429, "61")
    assert refusal(await complete(client)) == RATE
    clocks.seconds += 61
    assert (await client.post(path, json=body)).status_code == 200


async def test_tokens_are_reserved_first_and_become_what_was_used(api: Api, clocks: Clocks) -> None:
    client = await limited(api, tokens_per_minute=100)
    answer = await complete(client, prompt=[PROMPT, PROMPT], n=2, max_tokens=3)
    tokens = answer.json()["usage"]["total_tokens"]
    assert tokens == 2 * 4 + 4 * 3
    assert answer.headers["x-ratelimit-remaining-tokens"] == str(100 - tokens)
    early = await complete(client, max_tokens=76, ignore_eos=False)
    spoken = early.json()["usage"]["total_tokens"]
    assert spoken < 20
    assert (await used(client))["tokens_per_minute"] == tokens + spoken
    refused = await complete(client, max_tokens=90)
    assert refusal(refused) == RATE
    assert refused.headers["retry-after"] == "61"
    never = await complete(client, max_tokens=97)
    assert (refusal(never), never.headers["x-should-retry"]) == (RATE, "false")
    assert "retry-after" not in never.headers
    several = await complete(client, n=4, max_tokens=25)
    assert (refusal(several), several.headers["x-should-retry"]) == (RATE, "false")
    assert len(api.engine.requests) == 5
    assert (await used(client))["requests_per_minute"] == 2


async def test_a_chat_without_a_bound_takes_part_of_the_limit_and_is_not_refused(
    api: Api, clocks: Clocks
) -> None:
    client = await limited(api, tokens_per_minute=60)
    answer = await client.post("/v1/chat/completions", json=CHAT)
    assert answer.status_code == 200
    assert (await used(client))["tokens_per_minute"] == answer.json()["usage"]["total_tokens"]


@pytest.mark.parametrize("limit", ["tokens_per_minute", "tokens_per_month"])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_chat_without_a_bound_ends_where_the_limit_does(
    api: Api, clocks: Clocks, limit: str, stream: bool
) -> None:
    """Each token beyond its reservation is taken as it comes, so requests beside it are refused."""
    api.engine.token_s = 0.001
    client = await limited(api, None, **{limit: 150})
    account = api.services.limits.accounts.of(
        (await client.get("/v1/me")).json()["tenant"]["id"], 0.0
    )
    body = {**CHAT, "ignore_eos": True, "stream": stream, "n": 2}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(generation_run, "OPEN_TOKENS", 10)
        running = asyncio.create_task(client.post("/v1/chat/completions", json=body))
        await eventually(lambda: account["tokens_per_month"].in_use > 140)
        refused = await complete(client, max_tokens=16)
        answer = await running
    assert refused.status_code == 429
    prompt, *rest = [len(request.prompt_token_ids) for request in api.engine.requests]
    assert rest == [prompt]
    reasons = re.findall(r'"finish_reason":"(\w+)"', answer.text)
    assert reasons == ["length", "length"]
    totals = (await client.get("/v1/usage")).json()["totals"]
    assert totals["prompt_tokens"] + totals["completion_tokens"] == 150
    assert (await used(client))[limit] == 150
    computed = sum(work.output_tokens for work in api.engine.work.values())
    assert (
        totals["completion_tokens"] <= computed <= totals["completion_tokens"] + 4
    )  # until the engine was told
    assert refusal(await complete(client, prompt=[5], max_tokens=1)) == (
        RATE if limit == "tokens_per_minute" else QUOTA
    )


async def test_a_chat_without_a_bound_is_free_to_grow_where_nothing_limits(api: Api) -> None:
    client = await limited(api)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(generation_run, "OPEN_TOKENS", 10)
        answer = await client.post("/v1/chat/completions", json={**CHAT, "ignore_eos": True})
    assert answer.json()["usage"]["total_tokens"] == api.services.ready.max_model_len
    assert (await used(client))["tokens_per_minute"] == api.services.ready.max_model_len


async def test_as_many_run_at_once_as_may(api: Api) -> None:
    api.engine.token_s = 0.005
    client = await limited(api, concurrent_requests=2)
    running = [asyncio.create_task(complete(client, max_tokens=100)) for _ in range(2)]
    await eventually(lambda: len(api.engine.running) == 2)
    refused = await complete(client)
    assert (refusal(refused), refused.headers["retry-after"]) == (RATE, "1")
    assert (await used(client))["concurrent_requests"] == 2
    assert [(await answer).status_code for answer in running] == [200, 200]


async def test_nothing_is_held_any_more_when_the_last_byte_goes_out(api: Api) -> None:
    """Whoever has seen the end may come again at once."""
    held = []
    client = await limited(api, concurrent_requests=1)
    tenant_id = (await client.get("/v1/me")).json()["tenant"]["id"]

    async def watched(scope: Scope, receive: Receive, send: Send) -> None:
        async def seen(message: Message) -> None:
            if message["type"] == "http.response.body" and not message.get("more_body", False):
                account = api.services.limits.accounts.of(tenant_id, 0.0)
                kinds: tuple[LimitKind, ...] = ("concurrent_requests", "tokens_per_month")
                held.append(tuple(account[kind].in_use for kind in kinds))
            await send(message)

        await api.front(scope, receive, seen)

    full = ErrorInfo(kind="capacity", code="engine_overloaded", message="full")
    broken = ErrorInfo(kind="internal", code="internal_error", message="broken")
    ends: list[tuple[dict[str, Any], ErrorInfo | None, int | None, int]] = [
        ({}, None, None, 200),
        ({"stream": True}, None, None, 200),
        ({"max_tokens": 4096}, None, None, 400),
        ({"temperature": -1}, None, None, 400),
        ({"model": "nobody"}, None, None, 404),
        ({}, full, None, 503),
        ({"stream": True}, broken, None, 500),
        ({"stream": True}, None, 1, 200),
    ]
    transport = httpx.ASGITransport(app=watched, raise_app_exceptions=False)
    async with new_client(await api.key("acme"), "http://test", transport) as client:
        for fields, error, failure_after, status in ends:
            api.engine.refusal, api.engine.failure_after = error, failure_after
            assert (await complete(client, **fields)).status_code == status
        api.engine.failure_after = None
        assert (
            await client.post("/v1/chat/completions", json={**CHAT, "stream": True})
        ).status_code == 200
    assert held == [(0, 0)] * (len(ends) + 1)


async def test_an_admin_who_acts_for_a_tenant_takes_of_its_limits(api: Api, clocks: Clocks) -> None:
    client = await limited(api, requests_per_minute=2)
    async with api.admin as admin:
        assert (await admin.post("/v1/completions?tenant=acme", json=SHORT)).status_code == 200
        assert (await complete(client)).status_code == 200
        assert refusal(await admin.post("/v1/completions?tenant=acme", json=SHORT)) == RATE
        for _ in range(4):
            assert (await admin.post("/v1/completions", json=SHORT)).status_code == 200
        me = (await admin.get("/v1/me?tenant=acme")).json()
    assert (me["role"], me["tenant"]["name"], me["key"]) == ("admin", "acme", None)
    assert (me["limits"], me["used"]["key"]) == (
        {"tenant": {"requests_per_minute": 2}, "key": {}},
        {},
    )
    assert me["used"]["tenant"]["requests_per_minute"] == 2


async def test_a_changed_limit_is_in_force_at_once(api: Api) -> None:
    client = await limited(api, {"requests_per_minute": 1}, requests_per_minute=1)
    me = (await client.get("/v1/me")).json()
    assert [(await complete(client)).status_code for _ in range(2)] == [200, 429]
    await limited(api, requests_per_minute=3)
    assert (await complete(client)).status_code == 429
    async with api.admin as admin:
        changed = await admin.patch(
            f"/v1/keys/{me['key']['id']}", json={"limits": {"requests_per_minute": 2}}
        )
        assert changed.json()["limits"] == {"requests_per_minute": 2}
        assert [(await complete(client)).status_code for _ in range(2)] == [200, 429]
        await admin.patch(f"/v1/keys/{me['key']['id']}", json={"limits": {}, "name": "open"})
    assert [(await complete(client)).status_code for _ in range(2)] == [200, 429]
    await limited(api)
    assert [(await complete(client)).status_code for _ in range(2)] == [200, 200]
    assert (await client.get("/v1/me")).json()["key"]["name"] == "open"


async def test_a_key_sees_its_state(api: Api, clocks: Clocks) -> None:
    client = await limited(api, {"tokens_per_month": 500}, requests_per_minute=9, adapters=3)
    await complete(client)
    me = (await client.get("/v1/me")).json()
    assert me["object"] == "me"
    assert (me["role"], me["tenant"]["name"]) == ("tenant", "acme")
    assert set(me["key"]) >= {"id", "name", "prefix", "scopes", "expires_at"}
    assert "key" not in me["key"]
    assert me["limits"] == {
        "tenant": {"requests_per_minute": 9, "adapters": 3},
        "key": {"tokens_per_month": 500},
    }
    counts = {
        "requests_per_minute": 1,
        "tokens_per_minute": 6,
        "concurrent_requests": 0,
        "tokens_per_month": 6,
    }
    nothing = {"adapters": 0, "stored_bytes": 0, "pinned_pages": 0}
    assert me["used"] == {"tenant": counts | nothing, "key": counts}
    made = (await upload(client, "support")).json()
    await client.patch("/v1/adapters/support", json={"pinned": True})
    held = {"adapters": 1, "stored_bytes": made["size_bytes"], "pinned_pages": made["pages"]}
    assert (await client.get("/v1/me")).json()["used"]["tenant"].items() >= held.items()
    async with api.admin as admin:
        me = (await admin.get("/v1/me")).json()
    assert (me["role"], me["tenant"], me["key"], me["used"]) == (
        "admin",
        None,
        None,
        {"tenant": {}, "key": {}},
    )


async def test_limits_that_do_not_exist_are_refused_by_name(api: Api) -> None:
    async with api.admin as admin:
        await api.key("acme")
        assert (
            await admin.post("/v1/tenants", json={"name": "new", "limits": []})
        ).status_code == 400
        assert (
            await admin.post("/v1/tenants", json={"name": "new", "limits": {"adapters": -1}})
        ).status_code == 400
        unknown = await admin.patch("/v1/tenants/acme", json={"limits": {"tokens_per_day": 1}})
        assert all(name in unknown.json()["error"]["message"] for name in TENANT_LIMITS)
        unknown = await admin.post("/v1/tenants/acme/keys", json={"limits": {"adapters": 1}})
        assert set(re.findall(r"\w+_\w+", unknown.json()["error"]["message"])) == set(KEY_LIMITS)
        nulls = await admin.patch(
            "/v1/tenants/acme", json={"limits": {"adapters": 3, "stored_bytes": None}}
        )
        assert nulls.json()["limits"] == {"adapters": 3}


async def test_refusals_are_counted_by_limit(api: Api, clocks: Clocks) -> None:
    client = await limited(api, requests_per_minute=1)
    for _ in range(3):
        await complete(client)
    client = await limited(api, tokens_per_minute=2)
    await complete(client)
    found = dict(re.findall(r'manylora_limited_total{limit="(\w+)"} (\S+)', await api.metrics()))
    assert found == {
        **dict.fromkeys(TENANT_LIMITS, "0.0"),
        "requests_per_minute": "2.0",
        "tokens_per_minute": "1.0",
    }


async def test_a_new_month_begins_with_nothing_and_clock_jumps_change_nothing(
    api: Api, clocks: Clocks
) -> None:
    client = await limited(api, tokens_per_month=10)
    assert [(await complete(client)).status_code for _ in range(2)] == [200, 429]
    clocks.now += timedelta(minutes=10)
    assert [(await complete(client)).status_code for _ in range(2)] == [200, 429]
    clocks.now -= timedelta(days=1)
    assert refusal(await complete(client)) == QUOTA
    assert (await used(client))["tokens_per_month"] == 6
    clocks.now += timedelta(days=2)
    assert refusal(await complete(client)) == QUOTA
    assert (await used(client))["tokens_per_month"] == 6
    clocks.now += timedelta(days=365)
    assert (await complete(client)).status_code == 200


async def test_what_ends_while_the_month_is_read_counts_once(api: Api, clocks: Clocks) -> None:
    """Requests without a quota run while the first that has one asks the ledger."""
    plain = await limited(api)
    for _ in range(5):
        burst = [asyncio.create_task(complete(plain)) for _ in range(20)]
        await asyncio.sleep(random.uniform(0, 0.02))
        read = await used(plain)
        assert {answer.status_code for answer in await asyncio.gather(*burst)} == {200}
        async with api.admin as admin:
            report = (
                await admin.get(
                    "/v1/usage?tenant=acme&start=2026-05-01T00:00:00Z&end=2026-06-01T00:00:00Z"
                )
            ).json()
        billed = report["totals"]["prompt_tokens"] + report["totals"]["completion_tokens"]
        assert read["tokens_per_month"] <= billed
        assert (await used(plain))["tokens_per_month"] == billed
        limits = replace(api.services.limits, accounts=Accounts())
        clocks.services = replace(clocks.services, limits=limits)
        api.services = api.app.state.services = clocks.services


async def test_a_quota_that_cannot_be_read_lets_nobody_pass(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = await limited(api, tokens_per_month=1000)

    async def down(*_: object) -> int:
        raise CapacityError("The database cannot answer now; try again.", code="db.unavailable")

    with monkeypatch.context() as patch:
        patch.setattr(api.services.registry.usage, "month_tokens", down)
        answer = await complete(client)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "db.unavailable")
    assert (await complete(client)).status_code == 200
    assert (await used(client))["tokens_per_month"] == 6


async def test_pins_stay_within_the_tenants_pages(api: Api) -> None:
    client = await limited(api, pinned_pages=10_000)
    pages = {}
    for index, name in enumerate(("one", "two")):
        pages[name] = (await upload(client, name, sound(alpha=8 + index))).json()["pages"]
    big = (await upload(client, "one", sound(rank=64), activate="false")).json()["pages"]
    assert big > pages["one"]
    client = await limited(api, pinned_pages=pages["one"] + pages["two"] - 1)
    assert (await client.patch("/v1/adapters/one", json={"pinned": True})).status_code == 200
    assert (await client.patch("/v1/adapters/one", json={"pinned": True})).status_code == 200
    refused = await client.patch("/v1/adapters/two", json={"pinned": True, "description": "d"})
    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "quota.pinned_pages")
    async with api.admin as admin:
        refused = await admin.patch("/v1/adapters/two?tenant=acme", json={"pinned": True})
        assert refused.status_code == 403
    assert 'manylora_limited_total{limit="pinned_pages"} 2.0' in await api.metrics()
    shown = (await client.get("/v1/adapters/two")).json()
    assert (shown["pinned"], shown["description"]) == (False, None)
    moved = await client.patch("/v1/adapters/one", json={"aliases": {"default": 2}})
    assert (moved.status_code, moved.json()["error"]["code"]) == (403, "quota.pinned_pages")
    split = await client.patch("/v1/adapters/one", json={"aliases": {"default": {"1": 9, "2": 1}}})
    assert (split.status_code, split.json()["error"]["code"]) == (403, "quota.pinned_pages")
    uploaded = await upload(client, "one", sound(alpha=32, rank=64))
    assert (uploaded.status_code, uploaded.json()["error"]["code"]) == (403, "quota.pinned_pages")
    assert (
        await upload(client, "one", sound(alpha=32, rank=64), activate="false")
    ).status_code == 201
    assert (
        await client.patch("/v1/adapters/one", json={"aliases": {"beta": 2}})
    ).status_code == 200
    free = {"aliases": {"default": 2}, "pinned": False}
    assert (await client.patch("/v1/adapters/one", json=free)).status_code == 200
    assert (await client.patch("/v1/adapters/two", json={"pinned": True})).status_code == 200


async def test_without_keys_the_default_tenants_limits_hold(tmp_path: Path) -> None:
    async with open_api(tmp_path, auth="off") as api, api.client() as client:
        assert (await complete(client)).status_code == 200
        await client.patch("/v1/tenants/default", json={"limits": {"requests_per_minute": 2}})
        assert [(await complete(client)).status_code for _ in range(2)] == [200, 429]
