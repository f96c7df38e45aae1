"""vLLM's routes for trainers: what they answer, who may call them, and what a pause means for requests that come."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import Any

import pytest
from structlog.testing import capture_logs

from api_server import BASE, Api, Client, eventually
from fake_engine import demo_ready
from manylora.server.process.drain import Drain

pytestmark = pytest.mark.anyio


async def test_a_pause_and_its_end_are_visible(api: Api) -> None:
    async def shown() -> tuple[Any, ...]:
        paused = (await api.admin.get("/is_paused")).json()["is_paused"]
        metrics = (await api.admin.get("/metrics")).text
        engine = (await api.admin.get("/v1/engine")).json()
        ready = await api.client().get("/ready")
        assert ready.status_code == 200
        (gauge,) = [
            line for line in metrics.splitlines() if line.startswith("manylora_engine_paused ")
        ]
        return paused, ready.json()["status"], engine["pause"], gauge.split()[1]

    assert await shown() == (False, "ready", None, "0.0")
    with capture_logs() as logs:
        for _ in range(2):
            answer = await api.admin.post("/pause?mode=keep")
            assert (answer.status_code, answer.json()) == (200, {"status": "paused"})
            assert await shown() == (True, "paused", "keep", "1.0")
        for _ in range(2):
            answer = await api.admin.post("/resume")
            assert (answer.status_code, answer.json()) == (200, {"status": "resumed"})
    assert await shown() == (False, "ready", None, "0.0")
    told = [(entry["event"], entry.get("mode"), entry["by"]) for entry in logs]
    assert (
        told == [("engine_paused", "keep", "admin")] * 2 + [("engine_resumed", None, "admin")] * 2
    )


async def test_without_a_mode_running_requests_end(api: Api, acme: Client) -> None:
    api.engine.token_s = 30
    asking = asyncio.create_task(acme.post("/v1/completions", json={"model": BASE, "prompt": "x"}))
    await eventually(lambda: api.engine.running)
    assert (await api.admin.post("/pause")).status_code == 200
    assert (await asking).status_code == 503
    assert api.engine.is_paused


async def test_waiting_for_running_requests_takes_as_long_as_they_do(api: Api) -> None:
    waiting = asyncio.create_task(api.admin.post("/pause?mode=wait"))
    await eventually(lambda: api.engine.num_asked > 2)
    assert not waiting.done()
    api.engine.paused = "keep"  # as the engine says once all has ended
    assert (await waiting).json() == {"status": "paused"}


async def test_a_resume_ends_the_wait_for_a_pause_with_a_conflict(api: Api) -> None:
    waiting = asyncio.create_task(api.admin.post("/pause?mode=wait"))
    await eventually(lambda: api.engine.num_asked)
    await api.admin.post("/resume")
    answer = await waiting
    assert (answer.status_code, answer.json()["error"]["code"]) == (409, "resumed")


async def test_a_shutdown_ends_the_wait_for_a_pause(api: Api) -> None:
    drain: Drain = api.services.drain
    waiting = asyncio.create_task(api.admin.post("/pause?mode=wait"))
    await eventually(lambda: drain.num_running)
    assert await drain.drain(0.01) == 1
    assert (await waiting).json()["error"]["code"] == "server.draining"


async def test_an_engine_that_is_away_is_not_paused_and_can_be_resumed(api: Api) -> None:
    api.engine.ready = None
    for route in ("/pause?mode=keep", "/reset_prefix_cache"):
        answer = await api.admin.post(route)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_restarted")
    assert (await api.admin.get("/is_paused")).json() == {"is_paused": False}
    assert (await api.admin.post("/resume")).status_code == 200


async def test_a_mode_that_does_not_exist_is_refused(api: Api) -> None:
    answer = await api.admin.post("/pause?mode=soft")
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "mode")
    assert not api.engine.is_paused


async def test_the_cache_is_reset_unless_something_uses_it(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    api.engine.cached_pages = 5
    assert (await api.admin.post("/reset_prefix_cache")).json() == {"success": True}
    monkeypatch.setattr(api.engine, "reset_prefix_cache", lambda: None)
    api.engine.cached_pages = 2
    answer = await api.admin.post("/reset_prefix_cache")
    assert (answer.status_code, answer.json()) == (200, {"success": False})


async def test_facts_have_vllms_names(api: Api) -> None:
    assert (await api.admin.get("/get_world_size?include_dp=false")).json() == {"world_size": 1}
    info = (await api.admin.get("/server_info?config_format=json")).json()
    assert set(info) == {"vllm_config", "vllm_env", "system_env"}
    config, ready = info["vllm_config"], demo_ready()
    assert config["model_config"]["served_model_name"] == BASE
    assert config["model_config"]["max_model_len"] == ready.max_model_len
    assert config["lora_config"] == {
        "max_loras": ready.memory.slots,
        "max_lora_rank": ready.max_rank,
    }
    assert config["cache_config"]["block_size"] == ready.geometry.page_tokens
    assert config["cache_config"]["cache_dtype"] == "auto"
    assert config["scheduler_config"]["max_num_batched_tokens"] == ready.memory.step_tokens
    text = (await api.admin.get("/server_info")).json()["vllm_config"]
    assert isinstance(text, str)
    assert BASE in text
    assert "postgresql" not in json.dumps(info)


async def test_the_fingerprint_of_answers_names_the_format_of_the_weights(api: Api) -> None:
    ready = demo_ready()
    rounded = replace(
        api.services, ready=replace(ready, memory=replace(ready.memory, weights="int8"))
    )
    assert api.services.fingerprint.endswith("-float32-bf16")
    assert rounded.fingerprint == f"{api.services.fingerprint.removesuffix('bf16')}int8"
