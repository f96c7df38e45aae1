from __future__ import annotations

import asyncio
import csv
import io
import json
import random
import re
import time
from collections import Counter
from collections.abc import AsyncGenerator
from typing import Any

import httpx
import orjson
import pytest
from prometheus_client.parser import text_string_to_metric_families
from starlette.types import Message

from api_adapters import upload
from api_server import BASE, Api
from fake_engine import demo_tokenizer
from weft.engine.request import GenerationRequest, RequestOutput
from weft.engine.status import EngineStatus, ResidentAdapter
from weft.server.status.metrics import Metrics
from weft.server.usage.schemas import OrganizationUsagePage, UsageList

pytestmark = pytest.mark.anyio


async def ask(api: Api, tenant: str, **fields: Any) -> dict[str, Any]:
    client = await api.tenant(tenant)
    answer = await client.post("/v1/completions", json={"model": BASE, "prompt": "x", **fields})
    assert answer.status_code == 200, answer.text
    return dict(answer.json()["usage"])


async def test_usage_adds_up_by_tenant_adapter_version_and_key(api: Api) -> None:
    await upload(await api.tenant("acme"), "pirate")
    seen = [await ask(api, "acme"), await ask(api, "acme", model="pirate", n=2), await ask(api, "rival", prompt="xyz")]
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


async def test_a_tenant_sees_only_its_own_usage(api: Api) -> None:
    await ask(api, "acme")
    rival = await ask(api, "rival")
    body = (await (await api.tenant("rival")).get("/v1/usage", params={"group_by": "tenant"})).json()
    assert [row["tenant"] for row in body["data"]] == ["rival"]
    assert body["totals"]["completion_tokens"] == rival["completion_tokens"]
    one = (await api.admin.get("/v1/usage?tenant=acme")).json()
    assert one["totals"]["requests"] == 1


async def test_usage_comes_as_csv_too(api: Api) -> None:
    used = await ask(api, "acme")
    answer = await api.admin.get("/v1/usage?format=csv&group_by=tenant")
    assert answer.headers["content-type"].startswith("text/csv")
    (row,) = csv.DictReader(io.StringIO(answer.text))
    assert (row["tenant"], row["completion_tokens"]) == ("acme", str(used["completion_tokens"]))


async def test_the_largest_adapters_have_rows_and_the_others_one(api: Api) -> None:
    client = await api.tenant("acme")
    for name, times in (("pirate", 3), ("poet", 2), ("judge", 1)):
        await upload(client, name)
        for _ in range(times):
            await ask(api, "acme", model=name)
    await ask(api, "rival")
    params: dict[str, Any] = {
        "group_by": "adapter",
        "bucket": "1d",
        "tz": "Asia/Kolkata",
        "top": 2,
        "rank_by": "requests",
    }
    body = (await api.admin.get("/v1/usage", params=params)).json()
    shown: Counter[tuple[str | None, bool]] = Counter()  # of two days, where midnight came meanwhile
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
async def test_the_adapter_of_a_row_is_the_filter_for_what_the_row_sums_up(api: Api, path: str) -> None:
    acme, rival, zeta = [await api.tenant(name) for name in ("acme", "rival", "zeta")]
    for owner in (acme, rival, zeta):
        await upload(owner, "qv")
    rival_id = (await rival.get("/v1/me")).json()["tenant"]["id"]
    for owner, name in ((acme, "acme"), (zeta, "zeta")):
        await owner.post("/v1/adapters/qv/grants", json={"tenant": rival_id})
        await ask(api, "rival", model=f"{name}/qv")
        for _ in range(2):
            await ask(api, name, model="qv")
    await ask(api, "rival", model="qv")

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

    await ask(api, "acme")
    assert await start("2026-03-01") == "2026-03-01T00:00:00.000Z"
    assert await start("2026-03-01", "America/New_York") == "2026-03-01T05:00:00.000Z"
    assert await start("2026-04-01T12:00", "America/New_York") == "2026-04-01T16:00:00.000Z"
    assert await start("2026-04-01T12:00+02:00", "America/New_York") == "2026-04-01T10:00:00.000Z"


@pytest.mark.parametrize(
    ("params", "told"),
    [
        ("tz=Mars/Olympus", "IANA name"),
        ("tz=..%2Fetc", "IANA name"),
        ("top=3", "group_by"),
        ("top=0&group_by=adapter", "top"),
        ("top=51&group_by=adapter", "top"),
        ("top=3&group_by=adapter&after=x", "leave out after"),
        ("top=3&group_by=adapter&rank_by=cost", "no prices"),
        ("top=3&group_by=adapter&rank_by=colour", "rank_by"),
    ],
)
async def test_a_view_that_cannot_be_is_refused(api: Api, params: str, told: str) -> None:
    answer = await api.admin.get(f"/v1/usage?{params}")
    assert answer.status_code == 400, answer.text
    assert told in answer.json()["error"]["message"] + str(answer.json()["error"]["param"])


async def test_usage_in_openais_shape(api: Api) -> None:
    await upload(await api.tenant("acme"), "pirate")
    used = await ask(api, "acme", model="pirate")
    now = int(time.time())
    params: dict[str, Any] = {"start_time": now - 7200, "bucket_width": "1h", "group_by[]": ["model", "project_id"]}
    answer = await api.admin.get("/v1/organization/usage/completions", params=params)
    page = OrganizationUsagePage.model_validate(answer.json())
    (result,) = [result for bucket in page.data for result in bucket.results]
    assert (result.model, result.project_id, result.num_model_requests) == ("pirate", "acme", 1)
    assert (result.input_tokens, result.output_tokens) == (used["prompt_tokens"], used["completion_tokens"])
    assert not page.has_more
    short = await api.admin.get("/v1/organization/usage/completions", params={**params, "limit": 1})
    rest = await api.admin.get(
        "/v1/organization/usage/completions", params={**params, "page": short.json()["next_page"]}
    )
    assert short.json()["has_more"]
    assert len(short.json()["data"]) + len(rest.json()["data"]) == len(page.data)


async def test_a_failed_upload_of_usage_is_no_good_end(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    from weft.errors import CapacityError

    async def full(_: object) -> None:
        raise CapacityError("The journal's disk is full.", code="storage.full")

    client = await api.tenant("acme")
    monkeypatch.setattr(api.services.registry.usage, "record", full)
    body = {"model": BASE, "prompt": "x"}
    assert (await client.post("/v1/completions", json=body)).status_code == 507
    streamed = await client.post("/v1/completions", json={**body, "stream": True})
    assert "[DONE]" not in streamed.text
    assert "storage.full" in streamed.text


async def test_metrics_show_requests_and_the_engine(api: Api) -> None:
    client = await api.tenant("acme")
    digest = (await upload(client, "pirate")).json()["digest"]
    await ask(api, "acme", model="pirate", max_tokens=90)
    await ask(api, "acme")
    api.engine.residents = [ResidentAdapter(digest=digest, tier="device", pages=2, running=1)]
    text = (await api.admin.get("/metrics")).text
    for line in (
        'weft_requests_total{adapter="acme/pirate",status="stop",tenant="acme"} 1.0',
        'weft_requests_total{adapter="_base",status="stop",tenant="acme"} 1.0',
        'weft_adapter_resident{adapter="acme/pirate",tier="device"} 1.0',
        'weft_adapter_loads_total{from="stored",result="ok",to="device"} 3.0',
        'weft_pages{kind="free"} 10.0',
        "weft_step_seconds_count 1.0",
        "weft_ttft_seconds_count 2.0",
    ):
        assert line in text, text
    assert 'vllm:lora_requests_info{max_lora="256",running_lora_adapters="acme/pirate"' in text
    again = (await api.admin.get("/metrics")).text
    assert "weft_step_seconds_count 1.0" in again
    assert "weft_engine_up 1.0" in again
    api.engine.ready = None
    away = await api.admin.get("/metrics")
    assert away.status_code == 200
    assert "weft_engine_up 0.0" in away.text
    assert "weft_pages" not in away.text


async def test_the_wait_to_be_let_in_counts_for_the_first_token(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    wait_s = 0.3

    async def turn(_: str) -> None:
        await asyncio.sleep(wait_s)

    monkeypatch.setattr(api.services.arrivals, "turn", turn)
    await api.tenant("acme")
    await ask(api, "acme")
    text = (await api.admin.get("/metrics")).text
    found = re.search(r"weft_ttft_seconds_sum (.*)", text)
    assert found, text
    assert float(found[1]) >= wait_s


async def test_every_answer_is_counted_by_its_class(api: Api) -> None:
    async def counted() -> dict[str, float]:
        text = (await api.admin.get("/metrics")).text
        return {status: float(count) for status, count in re.findall(r'weft_responses_total{status="(.*)"} (.*)', text)}

    before = await counted()
    assert set(before) == {"2xx", "3xx", "4xx", "5xx"}
    await api.client().get("/v1/models")  # 401
    await (await api.tenant("acme")).get("/nowhere")  # 404
    api.engine.ready = None
    assert (await api.client().get("/ready")).status_code == 503
    after = await counted()
    assert after == {**before, "2xx": before["2xx"] + 1, "4xx": before["4xx"] + 2, "5xx": before["5xx"] + 1}


async def test_cached_tokens_are_a_part_of_the_prompt_everywhere(api: Api) -> None:
    await upload(await api.tenant("acme"), "pirate")
    api.engine.cached = lambda request: len(request.prompt_token_ids) // 2
    client = await api.tenant("acme")
    prompts = ["one prompt", "another longer prompt"]
    cached = sum(len(demo_tokenizer().encode(prompt)) // 2 for prompt in prompts)
    completed = (await client.post("/v1/completions", json={"model": "pirate", "prompt": prompts})).json()["usage"]
    assert completed["prompt_tokens"] == sum(len(demo_tokenizer().encode(prompt)) for prompt in prompts)
    assert completed["prompt_tokens_details"] == {"cached_tokens": cached}
    chat = {"model": "pirate", "messages": [{"role": "user", "content": "When are you open?"}]}
    answered = (await client.post("/v1/chat/completions", json=chat)).json()["usage"]
    assert answered["prompt_tokens_details"]["cached_tokens"] == answered["prompt_tokens"] // 2 > 0

    total = cached + answered["prompt_tokens_details"]["cached_tokens"]
    for grouped in ("", "adapter", "tenant,adapter,version,key"):
        body = (await client.get("/v1/usage", params={"group_by": grouped, "bucket": "1h"})).json()
        assert body["totals"]["cached_tokens"] == sum(row["cached_tokens"] for row in body["data"]) == total
    assert (await client.get("/v1/adapters/pirate")).json()["usage"]["cached_tokens"] == total
    params = {"start_time": int(time.time()) - 60}
    page = (await api.admin.get("/v1/organization/usage/completions", params=params)).json()
    assert sum(result["input_cached_tokens"] for bucket in page["data"] for result in bucket["results"]) == total
    text = (await api.admin.get("/metrics")).text
    assert f'weft_tokens_total{{adapter="acme/pirate",kind="cached",tenant="acme"}} {total}.0' in text


async def test_streams_tell_cached_tokens_from_the_first_chunk_on(api: Api) -> None:
    api.engine.cached = lambda _: 2
    client = await api.tenant("acme")
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"model": BASE, "prompt": "a few tokens", "stream": True, "stream_options": options}
    text = (await client.post("/v1/completions", json=body)).text
    chunks = [json.loads(line.removeprefix("data: ")) for line in text.split("\n\n") if line.startswith("data: {")]
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
    api.engine.cached = lambda request: 1 if request.choice_index == 0 else len(request.prompt_token_ids) - 1
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
    prompts = [demo_tokenizer().encode(text) for text in ("a prompt that comes back", "and another")]
    body = {"model": BASE, "prompt": prompts, "echo": True, "n": 3, "max_tokens": max_tokens, "stream": stream}
    client = await api.tenant("acme")
    answer = await client.post("/v1/completions", json={**body, "logprobs": logprobs, "ignore_eos": True})
    assert answer.status_code == 200, answer.text
    (event,) = (await client.get("/v1/usage/events")).json()["data"]
    expected = (sum(map(len, prompts)), 6 * max_tokens)
    assert (event["prompt_tokens"], event["completion_tokens"]) == expected
    if not stream:
        assert [choice["text"].startswith("a prompt") for choice in answer.json()["choices"]] == [True] * 3 + [
            False
        ] * 3
        usage = answer.json()["usage"]
        assert (usage["prompt_tokens"], usage["completion_tokens"]) == expected


async def test_cached_tokens_never_exceed_the_prompt(api: Api) -> None:
    api.engine.cached = lambda request: 1000 * len(request.prompt_token_ids)
    used = await ask(api, "acme", prompt="some words")
    assert used["prompt_tokens_details"] == {"cached_tokens": used["prompt_tokens"]}


METRICS: dict[str, set[str]] = {
    "weft_requests_total": {"tenant", "adapter", "status"},
    "weft_tokens_total": {"tenant", "adapter", "kind"},
    "weft_ttft_seconds_count": set(),
    "weft_itl_seconds_count": set(),
    "weft_queue_seconds_count": set(),
    "weft_step_seconds_count": set(),
    "weft_batch_adapters_count": set(),
    "weft_running_requests": set(),
    "weft_waiting_requests": set(),
    "weft_pages": {"kind"},
    "weft_host_pages": {"kind"},
    "weft_adapter_resident": {"adapter", "tier"},
    "weft_adapter_loads_total": {"from", "to", "result"},
    "weft_adapter_load_seconds_sum": set(),
    "weft_evictions_total": {"kind"},
    "weft_preemptions_total": {"how"},
    "weft_prefix_cache_queries_total": set(),
    "weft_prefix_cache_hits_total": set(),
    "weft_responses_total": {"status"},
    "weft_limited_total": {"limit"},
    "weft_refused_total": {"code", "tenant"},
    "weft_engine_up": set(),
    "weft_usage_outbox_lag_seconds": set(),
    "weft_build_info": {"version"},
    "vllm:lora_requests_info": {"max_lora", "running_lora_adapters", "waiting_lora_adapters"},
}


def test_what_has_not_happened_yet_is_a_figure_too() -> None:
    text = Metrics(max_adapters=8).render(EngineStatus(boot_id="b", seq=1, running=0, waiting=0), 0.0).decode()
    for origin in ("host", "stored"):
        for result in ("failed", "ok"):
            line = f'weft_adapter_loads_total{{from="{origin}",result="{result}",to="device"}} 0.0'
            assert line in text
    assert 'weft_responses_total{status="5xx"} 0.0' in text
    assert 'weft_limited_total{limit="tokens_per_month"} 0.0' in text
    assert 'weft_evictions_total{kind="adapter"} 0.0' in text
    assert 'weft_evictions_total{kind="prefix"} 0.0' in text


async def test_every_promised_metric_is_there_with_its_labels(api: Api) -> None:
    digest = (await upload(await api.tenant("acme"), "pirate")).json()["digest"]
    await ask(api, "acme", model="pirate")
    api.engine.residents = [ResidentAdapter(digest=digest, tier="device", pages=2, running=1)]
    api.services.metrics.refused("limit.queue", "acme")
    text = (await api.admin.get("/metrics")).text
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    labels = {sample.name: set(sample.labels) for sample in samples}
    assert {name: labels.get(name) for name in METRICS} == METRICS
    values = {(sample.name, *sample.labels.values()): sample.value for sample in samples}
    kinds = {sample.labels["kind"] for sample in samples if sample.name == "weft_tokens_total"}
    assert kinds == {"prompt", "cached", "completion"}
    for name, label, value in (
        ("weft_preemptions_total", "recompute", 4),
        ("weft_preemptions_total", "swap", 1),
        ("weft_evictions_total", "adapter", 2),
        ("weft_evictions_total", "prefix", 7),
        ("weft_host_pages", "free", 1),
        ("weft_pages", "quarantine", 0),
    ):
        assert values[name, label] == value
    assert values["weft_prefix_cache_queries_total",] == 100
    assert values["weft_prefix_cache_hits_total",] == 25
    assert values["weft_adapter_load_seconds_sum",] == 0.5


@pytest.mark.parametrize("length", [1, 63])
def test_labels_are_capped(length: int) -> None:
    """Also where every tenant uses every other's adapters, and all names are as long as may be."""
    metrics = Metrics(max_adapters=8)
    names = [f"{index:04d}".ljust(length, "x") for index in range(5000)]
    for index, name in enumerate(names):
        metrics.learn_adapter(f"sha256:{index}", "acme", name)
        for adapter in (None, f"{name}/{name}", f"{names[index % 97]}/{names[index % 97]}"):
            for end in ("stop", "length", "aborted", "error"):
                metrics.request_ended(name, adapter, end, {"prompt": 1, "cached": 1, "completion": 1})
    residents = [
        ResidentAdapter(digest=f"sha256:{index}", tier=tier, pages=1, running=1)
        for index in range(5000)
        for tier in ("host", "device")
    ]
    engine = EngineStatus(boot_id="b", seq=1, running=0, waiting=0, residents=residents)
    text = metrics.render(engine, 0.0).decode()
    assert 'tenant="_other"' in text
    assert f'tenant="{names[0]}"' in text
    assert 'weft_adapter_resident{adapter="_other",tier="host"} 4900.0' in text
    assert len(text) < 200_000
    counted = re.findall(r"^weft_requests_total{.*} (\S+)$", text, re.MULTILINE)
    assert sum(map(float, counted)) == 5000 * 3 * 4


@pytest.mark.slow
async def test_what_nobody_knows_makes_no_series(api: Api) -> None:
    async def series() -> tuple[set[str], int]:
        text = (await api.admin.get("/metrics")).text
        return set(re.findall(r"^(\w\S*) ", text, re.MULTILINE)), len(text)

    key, words = await api.key("acme"), random.Random(1)
    body = {"prompt": "x", "max_tokens": 1}
    assert (await api.client(key).post("/v1/completions", json={"model": BASE, **body})).status_code == 200
    before = await series()
    for _ in range(2500):
        word = words.randbytes(12).hex()
        statuses = [
            await bare_status(api, "POST", "/v1/completions", key, orjson.dumps({"model": word, **body})),
            await bare_status(api, "GET", f"/v1/adapters/{word}", key),
            await bare_status(api, "GET", f"/{word}", key),
            await bare_status(api, "GET", "/v1/models", f"weft_{word}"),
        ]
        assert statuses == [404, 404, 404, 401]
    after = await series()
    assert after[0] == before[0]
    assert after[1] < 200_000


async def bare_status(api: Api, method: str, path: str, key: str, body: bytes = b"") -> int:
    """A request's status, at a small part of what a client library takes."""
    scope = {"type": "http", "method": method, "path": path, "raw_path": path.encode(), "query_string": b""}
    headers = [(b"authorization", f"Bearer {key}".encode()), (b"content-type", b"application/json")]
    statuses: list[int] = []

    async def receive() -> Message:
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: Message) -> None:
        if message["type"] == "http.response.start":
            statuses.append(message["status"])

    await api.app({**scope, "headers": headers, "http_version": "1.1", "scheme": "http"}, receive, send)
    return statuses[0]
