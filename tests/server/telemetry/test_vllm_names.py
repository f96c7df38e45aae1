"""Manylora's figures under vLLM's names: names, types, labels and sums, as routers and load generators read them."""

from __future__ import annotations

from pathlib import Path

import anyio
import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from api_adapters import upload
from api_server import BASE, Api, api
from manylora.engine.status import EngineStatus, ResidentAdapter
from manylora.server.telemetry.vllm_names import VllmNames
from system_tools import require

pytestmark = pytest.mark.anyio
LABELS = {"model_name"}
# The names and types of vLLM 0.32 and of the LoRA series that llm-d's router reads.
PROMISED: dict[str, tuple[str, set[str]]] = {
    "vllm:num_requests_running": ("gauge", LABELS),
    "vllm:num_requests_waiting": ("gauge", LABELS),
    "vllm:kv_cache_usage_perc": ("gauge", LABELS),
    "vllm:num_preemptions": ("counter", LABELS),
    "vllm:prefix_cache_queries": ("counter", LABELS),
    "vllm:prefix_cache_hits": ("counter", LABELS),
    "vllm:prompt_tokens": ("counter", LABELS),
    "vllm:generation_tokens": ("counter", LABELS),
    "vllm:request_success": ("counter", LABELS | {"finished_reason"}),
    "vllm:time_to_first_token_seconds": ("histogram", LABELS | {"le"}),
    "vllm:inter_token_latency_seconds": ("histogram", LABELS | {"le"}),
    "vllm:request_queue_time_seconds": ("histogram", LABELS | {"le"}),
    "vllm:e2e_request_latency_seconds": ("histogram", LABELS | {"le"}),
    "vllm:max_gpu_lora_adapters": ("gauge", LABELS),
    "vllm:num_gpu_loaded_lora_adapters": ("gauge", LABELS),
    "vllm:lora_requests_info": (
        "gauge",
        LABELS | {"max_lora", "running_lora_adapters", "waiting_lora_adapters"},
    ),
    "vllm:lora_adapter_loaded": ("gauge", LABELS | {"adapter_name", "level", "pinned", "rank"}),
}


async def page_of(opened: Api) -> str:
    """After two good requests, one of them for an adapter that is on the device, and a failed one."""
    client = await opened.tenant("acme")
    digest = (await upload(client, "pirate")).json()["digest"]
    for model in (BASE, "pirate"):
        answer = await client.post(
            "/v1/completions", json={"model": model, "prompt": "x", "max_tokens": 90}
        )
        assert answer.status_code == 200
    opened.engine.failure_after = 3
    await client.post("/v1/completions", json={"model": BASE, "prompt": "x"})
    opened.engine.residents = [
        ResidentAdapter(digest=digest, tier="device", pages=2, running=1, pinned=True),
        ResidentAdapter(digest="sha256:unknown", tier="device", pages=2, running=3),
    ]
    return (await opened.admin.get("/metrics")).text


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
async def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    async with api(tmp_path_factory.mktemp("page"), metrics_aliases="vllm") as opened:
        return await page_of(opened)


async def test_names_types_and_labels_are_vllms(page: str) -> None:
    found = {}
    for family in text_string_to_metric_families(page):
        if family.name.startswith("vllm:"):
            assert family.name not in found
            found[family.name] = (
                family.type,
                {label for sample in family.samples for label in sample.labels},
            )
            assert {sample.labels["model_name"] for sample in family.samples} == {BASE}
    assert found == PROMISED


async def test_figures_are_manyloras_own_summed_over_tenants_and_adapters(page: str) -> None:
    values: dict[str, float] = {}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            own = {
                name: value
                for name, value in sample.labels.items()
                if name in ("finished_reason", "kind", "le")
            }
            key = sample.name + "".join(f" {value}" for value in own.values())
            values[key] = values.get(key, 0.0) + sample.value
    assert values["vllm:prompt_tokens_total"] == values["manylora_tokens_total prompt"] > 0
    assert values["vllm:generation_tokens_total"] == values["manylora_tokens_total completion"] > 0
    assert values["vllm:request_success_total stop"] == 2
    assert values["vllm:request_success_total error"] == 1
    assert values["vllm:num_preemptions_total"] == 5
    assert values["vllm:prefix_cache_queries_total"] == 100
    assert values["vllm:prefix_cache_hits_total"] == 25
    for name, of_manylora in (
        ("vllm:time_to_first_token_seconds", "manylora_ttft_seconds"),
        ("vllm:inter_token_latency_seconds", "manylora_itl_seconds"),
        ("vllm:e2e_request_latency_seconds", "manylora_request_seconds"),
        ("vllm:request_queue_time_seconds", "manylora_queue_seconds"),
    ):
        for suffix in ("_count", "_sum", "_bucket 0.5", "_bucket +Inf"):
            assert values[name + suffix] == values[of_manylora + suffix], name
        assert values[f"{name}_count"] > 0
    assert values["vllm:kv_cache_usage_perc"] == 0.0
    assert values["vllm:num_gpu_loaded_lora_adapters"] == 2
    assert values["vllm:max_gpu_lora_adapters"] == 256
    loaded = '{adapter_name="acme/pirate",level="gpu",model_name="demo",pinned="true",rank="8"} 1.0'
    assert f"vllm:lora_adapter_loaded{loaded}" in page


async def test_prometheus_finds_nothing_wrong_with_the_page(page: str) -> None:
    program = require("promtool", package="prometheus")
    checked = await anyio.run_process(
        [program, "check", "metrics"], input=page.encode(), check=False
    )
    complaints = (checked.stdout + checked.stderr).decode().splitlines()
    # vLLM's names have colons, which are for recording rules.
    assert [
        line for line in complaints if "should not contain ':'" not in line and "vllm:" in line
    ] == []
    assert b"error while linting" not in checked.stderr


async def test_without_the_setting_there_are_no_such_names(tmp_path: Path) -> None:
    async with api(tmp_path) as opened:
        assert "vllm:" not in await page_of(opened)


async def test_while_the_engine_is_away_its_figures_are_too(tmp_path: Path) -> None:
    async with api(tmp_path, metrics_aliases="vllm") as opened:
        opened.engine.ready = None
        page = (await opened.admin.get("/metrics")).text
    names = {family.name for family in text_string_to_metric_families(page)}
    assert "vllm:prompt_tokens" in names
    assert not names & {
        "vllm:num_requests_running",
        "vllm:lora_requests_info",
        "vllm:kv_cache_usage_perc",
    }


class Scraped:
    """The names alone, with a clock and an engine of the test's own."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        self.names = VllmNames(BASE, 8, lambda: self.now_s)
        self.known = {"old": ("t/a", 8), "new": ("t/a", 16), "b": ("t/b", 4), "c": ("t/c", 4)}

    def scrape(self, *residents: ResidentAdapter, free: int = 0) -> dict[str, dict[str, float]]:
        """Values by labels, by name."""
        pages = {"free": 10, "kv": 30, "prefix": 40, "adapter": 20}
        status = EngineStatus(
            boot_id="b",
            running=0,
            waiting=0,
            residents=list(residents),
            pages=pages,
            available_pages=free,
        )
        page = self.names.render(CollectorRegistry(), status, self.known).decode()
        found: dict[str, dict[str, float]] = {}
        for family in text_string_to_metric_families(page):
            for sample in family.samples:
                key = " ".join(
                    value for name, value in sorted(sample.labels.items()) if name != "model_name"
                )
                found.setdefault(sample.name, {})[key] = sample.value
        return found


def resident(
    digest: str, tier: str = "device", running: int = 0, holds: int = 0
) -> ResidentAdapter:
    return ResidentAdapter(digest=digest, tier=tier, pages=1, running=running, holds=holds)  # type: ignore[arg-type]


def test_the_value_of_lora_requests_is_the_time_of_their_last_change() -> None:
    scraped = Scraped()
    busy = (
        resident("old", running=1),
        resident("new", running=2),
        resident("c", "loading", holds=3),
        resident("b"),
    )
    for expected_s, now_s, residents in (
        (1000.0, 1005.0, ()),
        (1010.0, 1010.0, busy),
        (1010.0, 1020.0, busy),
        (1030.0, 1030.0, busy[:2]),
        (1040.0, 1040.0, ()),
        (1040.0, 1050.0, ()),
    ):
        scraped.now_s = now_s
        labels = {(): "8  ", busy: "8 t/a t/c", busy[:2]: "8 t/a "}[residents]
        assert scraped.scrape(*residents)["vllm:lora_requests_info"] == {labels: expected_s}


def test_an_adapter_is_loaded_where_the_version_is_that_was_asked_for_last() -> None:
    scraped = Scraped()
    assert "vllm:lora_adapter_loaded" not in scraped.scrape(
        resident("old"), resident("b", "loading")
    )
    found = scraped.scrape(resident("old"), resident("new", "host"), resident("b"))
    assert found["vllm:lora_adapter_loaded"] == {"t/a cpu false 16": 1.0, "t/b gpu false 4": 1.0}
    assert found["vllm:num_gpu_loaded_lora_adapters"] == {"": 2.0}


def test_pages_that_can_be_had_do_not_count_as_used() -> None:
    assert Scraped().scrape(free=75)["vllm:kv_cache_usage_perc"] == {"": 0.25}
