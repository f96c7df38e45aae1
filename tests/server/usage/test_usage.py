from __future__ import annotations

import asyncio
import csv
import io
import json
import time
from collections import Counter
from collections.abc import AsyncGenerator
from typing import Any

import httpx
import pytest

from api_adapters import upload
from api_server import BASE, Api
from fake_engine import demo_tokenizer
from manylora.engine.request import GenerationRequest, RequestOutput
from manylora.errors import CapacityError
from manylora.server.usage.schemas import OrganizationUsagePage, UsageList

pytestmark = pytest.mark.anyio


async def test_usage_adds_up_by_tenant_adapter_version_and_key_and_a_tenant_sees_only_its_own(
    api: Api,
) -> None:
    await upload(await api.tenant("acme"), "pirate")
    seen = [
        await api.ask("acme"),
        await api.ask("acme", model="pirate", n=2),
        await api.ask("rival", prompt="xyz"),
    ]
    for group in ("", "tenant", "adapter", "tenant,adapter,version,key"):
        body = (await api.admin.get("/v1/usage", params={"group_by": group, "bucket": "1h"})).json()
        usage = UsageList.model_validate(body)
        for name in ("prompt_tokens", "completion_tokens"):
            expected = sum(one[name] for one in seen)
            assert getattr(usage.totals, name) == expected
            assert sum(getattr(row, name) for row in usage.data) == expected
        assert usage.totals.requests == 3
        assert all(("tenant" in row) == ("tenant" in group) for row in body["data"])
    rows = {(row["tenant"], row["adapter"], row["version"]) for row in body["data"]}
    assert rows == {("acme", None, None), ("acme", "pirate", 1), ("rival", None, None)}
    own = (await (await api.tenant("rival")).get("/v1/usage", params={"group_by": "tenant"})).json()
    assert [row["tenant"] for row in own["data"]] == ["rival"]
    assert (own["totals"]["requests"], own["totals"]["completion_tokens"]) == (
        1,
        seen[2]["completion_tokens"],
    )
    assert (await api.admin.get("/v1/usage?tenant=rival")).json()["totals"] == own["totals"]


async def test_the_largest_adapters_have_rows_and_the_others_one(api: Api) -> None:
    client = await api.tenant("acme")
    for name, times in (("pirate", 3), ("poet", 2), ("judge", 1)):
        await upload(client, name)
        for _ in range(times):
            await api.ask("acme", model=name)
    await api.ask("rival")
    params: dict[str, Any] = {"group_by": "adapter", "bucket": "1d", "tz": "Asia/Kolkata"}
    params |= {"top": 2, "rank_by": "requests"}
    body = (await api.admin.get("/v1/usage", params=params)).json()
    shown: Counter[tuple[str | None, bool]] = (
        Counter()
    )  # of two days, where midnight came meanwhile
    for row in body["data"]:
        shown[row["adapter"], row["other"]] += row["requests"]
    assert shown == {("acme/pirate", False): 3, ("acme/poet", False): 2, (None, True): 2}
    assert (body["groups"], body["next"], body["totals"]["requests"]) == (4, None, 7)
    assert {row["start"][10:] for row in body["data"]} == {"T18:30:00.000Z"}
    own = (await client.get("/v1/usage", params=params)).json()
    assert (own["groups"], own["totals"]["requests"]) == (3, 6)
    text = (await api.admin.get("/v1/usage", params={**params, "format": "csv"})).text
    table = csv.DictReader(io.StringIO(text))
    rows = {(row["adapter"], row["other"]) for row in table}
    assert rows == {("acme/pirate", "false"), ("acme/poet", "false"), ("", "true")}
    plain = (await api.admin.get("/v1/usage", params={"group_by": "adapter"})).json()
    assert plain["groups"] == 4
    assert all("other" not in row for row in plain["data"])
    assert "groups" not in (await api.admin.get("/v1/usage")).json()


@pytest.mark.parametrize("path", ["/v1/usage", "/v1/usage/latency"])
async def test_the_adapter_of_a_row_is_the_filter_for_what_the_row_sums_up(
    api: Api, path: str
) -> None:
    acme, rival, zeta = [await api.tenant(name) for name in ("acme", "rival", "zeta")]
    for owner in (acme, rival, zeta):
        await upload(owner, "qv")
    rival_id = (await rival.get("/v1/me")).json()["tenant"]["id"]
    for owner, name in ((acme, "acme"), (zeta, "zeta")):
        await owner.post("/v1/adapters/qv/grants", json={"tenant": rival_id})
        await api.ask("rival", model=f"{name}/qv")
        for _ in range(2):
            await api.ask(name, model="qv")
    await api.ask("rival", model="qv")

    async def requests(client: httpx.AsyncClient, **params: str) -> dict[str, int]:
        rows = (await client.get(path, params={"group_by": "adapter", **params})).json()["data"]
        return {row["adapter"]: row["requests"] for row in rows}

    by_admin = await requests(api.admin)
    assert by_admin == {"acme/qv": 3, "rival/qv": 1, "zeta/qv": 3}
    for client in (api.admin, acme, rival):
        for label, number in (await requests(client)).items():
            assert await requests(client, adapter=label) == {label: number}
    assert await requests(rival) == {"acme/qv": 1, "qv": 1, "zeta/qv": 1}
    assert await requests(acme, adapter="acme/qv") == {"qv": 2}
    assert await requests(acme, adapter="rival/qv") == {}


async def test_times_without_an_offset_are_of_the_zone_that_was_named(api: Api) -> None:
    async def start(text: str, tz: str | None = None) -> str:
        params = {"start": text, "end": "2031-01-01", **({"tz": tz} if tz else {})}
        (row,) = (await api.admin.get("/v1/usage", params=params)).json()["data"]
        return str(row["start"])

    await api.ask("acme")
    assert await start("2026-03-01") == "2026-03-01T00:00:00.000Z"
    assert await start("2026-03-01", "America/New_York") == "2026-03-01T05:00:00.000Z"
    assert await start("2026-04-01T12:00", "America/New_York") == "2026-04-01T16:00:00.000Z"
    assert await start("2026-04-01T12:00+02:00", "America/New_York") == "2026-04-01T10:00:00.000Z"


@pytest.mark.parametrize(
    ("params", "told"),
    [
        ("tz=Mars/Olympus", "IANA name"),
        ("top=0&group_by=adapter", "top"),
        ("top=51&group_by=adapter", "top"),
        ("top=3&group_by=adapter&rank_by=colour", "rank_by"),
    ],
)
async def test_a_view_that_cannot_be_is_refused(api: Api, params: str, told: str) -> None:
    answer = await api.admin.get(f"/v1/usage?{params}")
    assert answer.status_code == 400, answer.text
    assert told in answer.json()["error"]["message"] + str(answer.json()["error"]["param"])


async def test_usage_in_openais_shape(api: Api) -> None:
    await upload(await api.tenant("acme"), "pirate")
    used = await api.ask("acme", model="pirate")
    now = int(time.time())
    params: dict[str, Any] = {
        "start_time": now - 7200,
        "bucket_width": "1h",
        "group_by[]": ["model", "project_id"],
    }

    async def ask(**more: Any) -> dict[str, Any]:
        answer = await api.admin.get(
            "/v1/organization/usage/completions", params={**params, **more}
        )
        return dict(answer.json())

    page = OrganizationUsagePage.model_validate(await ask())
    (result,) = [result for bucket in page.data for result in bucket.results]
    assert (result.model, result.project_id, result.num_model_requests) == ("pirate", "acme", 1)
    assert (result.input_tokens, result.output_tokens) == (
        used["prompt_tokens"],
        used["completion_tokens"],
    )
    assert not page.has_more
    short = await ask(limit=1)
    assert short["has_more"]
    assert len(short["data"]) + len((await ask(page=short["next_page"]))["data"]) == len(page.data)


async def test_a_failed_upload_of_usage_is_no_good_end(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def full(_: object) -> None:
        raise CapacityError("The journal's disk is full.", code="storage.full")

    client = await api.tenant("acme")
    monkeypatch.setattr(api.services.registry.usage, "record", full)
    body = {"model": BASE, "prompt": "x"}
    assert (await client.post("/v1/completions", json=body)).status_code == 507
    streamed = await client.post("/v1/completions", json={**body, "stream": True})
    assert "[DONE]" not in streamed.text
    assert "storage.full" in streamed.text


async def test_cached_tokens_are_a_part_of_the_prompt_everywhere(api: Api) -> None:
    await upload(await api.tenant("acme"), "pirate")
    api.engine.cached = lambda request: len(request.prompt_token_ids) // 2
    client = await api.tenant("acme")
    prompts = ["one prompt", "another longer prompt"]
    cached = sum(len(demo_tokenizer().encode(prompt)) // 2 for prompt in prompts)
    completed = (
        await client.post("/v1/completions", json={"model": "pirate", "prompt": prompts})
    ).json()["usage"]
    assert completed["prompt_tokens"] == sum(
        len(demo_tokenizer().encode(prompt)) for prompt in prompts
    )
    assert completed["prompt_tokens_details"] == {"cached_tokens": cached}
    chat = {"model": "pirate", "messages": [{"role": "user", "content": "When are you open?"}]}
    answered = (await client.post("/v1/chat/completions", json=chat)).json()["usage"]
    assert answered["prompt_tokens_details"]["cached_tokens"] == answered["prompt_tokens"] // 2 > 0

    total = cached + answered["prompt_tokens_details"]["cached_tokens"]
    for grouped in ("", "adapter", "tenant,adapter,version,key"):
        body = (await client.get("/v1/usage", params={"group_by": grouped, "bucket": "1h"})).json()
        assert (
            body["totals"]["cached_tokens"]
            == sum(row["cached_tokens"] for row in body["data"])
            == total
        )
    assert (await client.get("/v1/adapters/pirate")).json()["usage"]["cached_tokens"] == total
    params = {"start_time": int(time.time()) - 60}
    page = (await api.admin.get("/v1/organization/usage/completions", params=params)).json()
    assert (
        sum(
            result["input_cached_tokens"] for bucket in page["data"] for result in bucket["results"]
        )
        == total
    )
    text = (await api.admin.get("/metrics")).text
    assert (
        f'manylora_tokens_total{{adapter="acme/pirate",kind="cached",tenant="acme"}} {total}.0'
        in text
    )


async def test_streams_tell_cached_tokens_from_the_first_chunk_on(api: Api) -> None:
    api.engine.cached = lambda _: 2
    client = await api.tenant("acme")
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"model": BASE, "prompt": "a few tokens", "stream": True, "stream_options": options}
    text = (await client.post("/v1/completions", json=body)).text
    chunks = [
        json.loads(line.removeprefix("data: "))
        for line in text.split("\n\n")
        if line.startswith("data: {")
    ]
    assert {chunk["usage"]["prompt_tokens_details"]["cached_tokens"] for chunk in chunks} == {2}
    assert (await api.admin.get("/v1/usage")).json()["totals"]["cached_tokens"] == 2


@pytest.mark.parametrize("stream", [False, True])
async def test_cached_tokens_of_many_choices_are_those_of_the_first_also_when_it_comes_last(
    api: Api, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    others_began = asyncio.Event()
    generate = api.engine.generate

    async def first_choice_last(request: GenerationRequest) -> AsyncGenerator[RequestOutput, None]:
        if request.choice_index == 0:
            await others_began.wait()
        async for output in generate(request):
            yield output
            others_began.set()

    monkeypatch.setattr(api.engine, "generate", first_choice_last)
    prompt = demo_tokenizer().encode("the same prompt for all")
    api.engine.cached = lambda request: (
        1 if request.choice_index == 0 else len(request.prompt_token_ids) - 1
    )
    client = await api.tenant("acme")
    body = {"model": BASE, "prompt": [prompt, prompt], "n": 3, "max_tokens": 5, "stream": stream}
    assert (await client.post("/v1/completions", json=body)).status_code == 200
    totals = (await api.admin.get("/v1/usage")).json()["totals"]
    assert (totals["prompt_tokens"], totals["cached_tokens"]) == (2 * len(prompt), 2)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("logprobs", [None, 1])
@pytest.mark.parametrize("max_tokens", [0, 5])
async def test_an_echoed_prompt_is_billed_once_for_all_choices(
    api: Api, stream: bool, logprobs: int | None, max_tokens: int
) -> None:
    """Also where each choice computes the prompt itself, as for the log-probabilities of its tokens."""
    prompts = [
        demo_tokenizer().encode(text) for text in ("a prompt that comes back", "and another")
    ]
    body = {
        "model": BASE,
        "prompt": prompts,
        "echo": True,
        "n": 3,
        "max_tokens": max_tokens,
        "stream": stream,
    }
    client = await api.tenant("acme")
    answer = await client.post(
        "/v1/completions", json={**body, "logprobs": logprobs, "ignore_eos": True}
    )
    assert answer.status_code == 200, answer.text
    (event,) = (await client.get("/v1/usage/events")).json()["data"]
    expected = (sum(map(len, prompts)), 6 * max_tokens)
    assert (event["prompt_tokens"], event["completion_tokens"]) == expected
    if not stream:
        own = [choice["text"].startswith("a prompt") for choice in answer.json()["choices"]]
        assert own == [True, True, True, False, False, False]
        usage = answer.json()["usage"]
        assert (usage["prompt_tokens"], usage["completion_tokens"]) == expected


async def test_cached_tokens_never_exceed_the_prompt(api: Api) -> None:
    api.engine.cached = lambda request: 1000 * len(request.prompt_token_ids)
    used = await api.ask("acme", prompt="some words")
    assert used["prompt_tokens_details"] == {"cached_tokens": used["prompt_tokens"]}
