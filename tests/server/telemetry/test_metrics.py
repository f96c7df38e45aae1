from __future__ import annotations

import random
import re
from dataclasses import replace

import pytest
from prometheus_client.parser import text_string_to_metric_families

from api_adapters import upload
from api_server import Api
from manylora.engine.status import EngineStatus, ResidentAdapter
from manylora.server.core_services import Clock
from manylora.server.telemetry.metrics import Metrics

pytestmark = pytest.mark.anyio


async def test_metrics_show_requests_and_the_engine(api: Api) -> None:
    client = await api.tenant("acme")
    digest = (await upload(client, "pirate")).json()["digest"]
    await api.ask("acme", model="pirate", max_tokens=90)
    await api.ask("acme")
    api.engine.residents = [ResidentAdapter(digest=digest, tier="device", pages=2, running=1)]
    text = (await api.admin.get("/metrics")).text
    for line in (
        'manylora_requests_total{adapter="acme/pirate",status="stop",tenant="acme"} 1.0',
        'manylora_requests_total{adapter="_base",status="stop",tenant="acme"} 1.0',
        'manylora_adapter_resident{adapter="acme/pirate",tier="device"} 1.0',
        'manylora_adapter_loads_total{from="stored",result="ok",to="device"} 3.0',
        'manylora_pages{kind="free"} 10.0',
        "manylora_step_seconds_count 1.0",
        "manylora_ttft_seconds_count 2.0",
    ):
        assert line in text, text
    again = (await api.admin.get("/metrics")).text
    assert "manylora_step_seconds_count 1.0" in again
    assert "manylora_engine_up 1.0" in again
    api.engine.ready = None
    away = await api.admin.get("/metrics")
    assert away.status_code == 200
    assert "manylora_engine_up 0.0" in away.text
    assert "manylora_pages" not in away.text


async def test_the_wait_to_be_let_in_counts_for_the_first_token(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = 1000.0

    async def turn(_: str) -> None:
        nonlocal now_s
        now_s += 0.25

    monkeypatch.setattr(api.services.limits.arrivals, "turn", turn)
    clock = Clock(monotonic=lambda: now_s)
    api.services = api.app.state.services = replace(api.services, clock=clock)
    await api.ask("acme")
    assert "manylora_ttft_seconds_sum 0.25\n" in (await api.admin.get("/metrics")).text


async def test_every_answer_is_counted_by_its_class(api: Api) -> None:
    async def counted() -> dict[str, float]:
        text = (await api.admin.get("/metrics")).text
        return {
            status: float(count)
            for status, count in re.findall(r'manylora_responses_total{status="(.*)"} (.*)', text)
        }

    before = await counted()
    assert set(before) == {"2xx", "3xx", "4xx", "5xx"}
    await api.client().get("/v1/models")  # 401
    await (await api.tenant("acme")).get("/nowhere")  # 404
    api.engine.ready = None
    assert (await api.client().get("/ready")).status_code == 503
    after = await counted()
    assert after == {
        **before,
        "2xx": before["2xx"] + 1,
        "4xx": before["4xx"] + 2,
        "5xx": before["5xx"] + 1,
    }


METRICS: dict[str, set[str]] = {
    "manylora_requests_total": {"tenant", "adapter", "status"},
    "manylora_tokens_total": {"tenant", "adapter", "kind"},
    "manylora_ttft_seconds_count": set(),
    "manylora_itl_seconds_count": set(),
    "manylora_queue_seconds_count": set(),
    "manylora_step_seconds_count": set(),
    "manylora_batch_adapters_count": set(),
    "manylora_running_requests": set(),
    "manylora_waiting_requests": set(),
    "manylora_pages": {"kind"},
    "manylora_host_pages": {"kind"},
    "manylora_adapter_resident": {"adapter", "tier"},
    "manylora_adapter_loads_total": {"from", "to", "result"},
    "manylora_adapter_load_seconds_sum": set(),
    "manylora_evictions_total": {"kind"},
    "manylora_preemptions_total": {"how"},
    "manylora_prefix_cache_queries_total": set(),
    "manylora_prefix_cache_hits_total": set(),
    "manylora_kernel_compiles_total": set(),
    "manylora_responses_total": {"status"},
    "manylora_limited_total": {"limit"},
    "manylora_refused_total": {"code", "tenant"},
    "manylora_engine_up": set(),
    "manylora_usage_outbox_lag_seconds": set(),
    "manylora_build_info": {"version"},
    "manylora_request_seconds_count": set(),
    "manylora_engine_paused": set(),
}


def test_what_has_not_happened_yet_is_a_figure_too() -> None:
    text = Metrics().render(EngineStatus(boot_id="b", running=0, waiting=0), 0.0).decode()
    loads = [(origin, result) for origin in ("host", "stored") for result in ("failed", "ok")]
    for series in (
        *(
            f'manylora_adapter_loads_total{{from="{origin}",result="{result}",to="device"}}'
            for origin, result in loads
        ),
        'manylora_responses_total{status="5xx"}',
        'manylora_limited_total{limit="tokens_per_month"}',
        'manylora_evictions_total{kind="adapter"}',
        'manylora_evictions_total{kind="prefix"}',
    ):
        assert f"{series} 0.0" in text


async def test_every_promised_metric_is_there_with_its_labels(api: Api) -> None:
    digest = (await upload(await api.tenant("acme"), "pirate")).json()["digest"]
    await api.ask("acme", model="pirate")
    api.engine.residents = [ResidentAdapter(digest=digest, tier="device", pages=2, running=1)]
    api.services.metrics.refused("limit.queue", "acme")
    text = (await api.admin.get("/metrics")).text
    samples = [
        sample for family in text_string_to_metric_families(text) for sample in family.samples
    ]
    labels = {sample.name: set(sample.labels) for sample in samples}
    assert {name: labels.get(name) for name in METRICS} == METRICS
    values = {(sample.name, *sample.labels.values()): sample.value for sample in samples}
    kinds = {sample.labels["kind"] for sample in samples if sample.name == "manylora_tokens_total"}
    assert kinds == {"prompt", "cached", "completion"}
    for name, label, value in (
        ("manylora_preemptions_total", "recompute", 4),
        ("manylora_preemptions_total", "swap", 1),
        ("manylora_evictions_total", "adapter", 2),
        ("manylora_evictions_total", "prefix", 7),
        ("manylora_host_pages", "free", 1),
        ("manylora_pages", "quarantine", 0),
    ):
        assert values[name, label] == value
    assert values["manylora_prefix_cache_queries_total",] == 100
    assert values["manylora_prefix_cache_hits_total",] == 25
    assert values["manylora_kernel_compiles_total",] == 2
    assert values["manylora_adapter_load_seconds_sum",] == 0.5


@pytest.mark.parametrize("length", [1, 63])
def test_labels_are_capped(length: int) -> None:
    """Also where every tenant uses every other's adapters, and all names are as long as may be."""
    metrics = Metrics()
    names = [f"{index:04d}".ljust(length, "x") for index in range(5000)]
    for index, name in enumerate(names):
        metrics.learn_adapter(f"sha256:{index}", "acme", name, 8)
        for adapter in (None, f"{name}/{name}", f"{names[index % 97]}/{names[index % 97]}"):
            for end in ("stop", "length", "aborted", "error"):
                metrics.request_ended(
                    name, adapter, end, {"prompt": 1, "cached": 1, "completion": 1}
                )
    residents = [
        ResidentAdapter(digest=f"sha256:{index}", tier=tier, pages=1, running=1)
        for index in range(5000)
        for tier in ("host", "device")
    ]
    engine = EngineStatus(boot_id="b", running=0, waiting=0, residents=residents)
    text = metrics.render(engine, 0.0).decode()
    assert 'tenant="_other"' in text
    assert f'tenant="{names[0]}"' in text
    assert 'manylora_adapter_resident{adapter="_other",tier="host"} 4900.0' in text
    assert len(text) < 200_000
    counted = re.findall(r"^manylora_requests_total{.*} (\S+)$", text, re.MULTILINE)
    assert sum(map(float, counted)) == 5000 * 3 * 4


async def test_unknown_names_make_no_series(api: Api) -> None:
    async def series() -> set[str]:
        text = (await api.admin.get("/metrics")).text
        return set(re.findall(r"^(\w\S*) ", text, re.MULTILINE))

    client, words = await api.tenant("acme"), random.Random(1)
    await api.ask("acme")
    before = await series()
    for _ in range(30):
        word = words.randbytes(12).hex()
        body = {"model": word, "prompt": "x"}
        statuses = [
            (await client.post("/v1/completions", json=body)).status_code,
            (await client.get(f"/v1/adapters/{word}")).status_code,
            (await client.get(f"/{word}")).status_code,
            (await api.client(f"manylora_{word}").get("/v1/models")).status_code,
        ]
        assert statuses == [404, 404, 404, 401]
    assert await series() == before
