"""Lines of batches over the real registry: what they wait for, what fails them, and that each counts once."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from api_adapters import upload
from api_server import BASE, Api, Client, eventually
from manylora.engine.request import ErrorInfo
from manylora.registry import batches as registry_batches
from manylora.registry import cache
from manylora.registry.records import Identity
from manylora.server.batches import line_run
from manylora.server.batches import results as batch_results
from manylora.server.batches.worker import BatchWorker

pytestmark = pytest.mark.anyio
URL = "/v1/completions"


@pytest.fixture
async def worker(api: Api) -> AsyncIterator[BatchWorker]:
    worker = BatchWorker(api.services, "srv_a")
    yield worker
    await worker.leave_off()


def lines_for(*models: str, **body: Any) -> bytes:
    lines = [
        {
            "custom_id": str(n),
            "method": "POST",
            "url": URL,
            "body": {"model": model, "prompt": "x", **body},
        }
        for n, model in enumerate(models)
    ]
    return "\n".join(map(json.dumps, lines)).encode()


async def start(api: Api, content: bytes, url: str = URL, tenant: str = "acme") -> str:
    client = await api.tenant(tenant)
    file = await client.post(
        "/v1/files", data={"purpose": "batch"}, files={"file": ("a.jsonl", content)}
    )
    assert file.status_code == 200, file.text
    body = {"input_file_id": file.json()["id"], "endpoint": url, "completion_window": "24h"}
    made = await client.post("/v1/batches", json=body)
    assert made.status_code == 200, made.text
    return str(made.json()["id"])


async def run(
    api: Api, worker: BatchWorker, batch_id: str, goal: int | None = None, tenant: str = "acme"
) -> dict[str, Any]:
    """Have the worker look until the batch has ended, or has so many lines completed."""
    for _ in range(3000):
        await worker.look()
        batch = dict((await (await api.tenant(tenant)).get(f"/v1/batches/{batch_id}")).json())
        is_at_goal = goal is not None and batch["request_counts"]["completed"] >= goal
        if is_at_goal or batch["status"] in ("completed", "failed", "expired", "cancelled"):
            return batch
        await asyncio.sleep(0.02)
    raise AssertionError(batch)


async def results(api: Api, file_id: str) -> dict[str, dict[str, Any]]:
    answer = await (await api.tenant("acme")).get(f"/v1/files/{file_id}/content")
    found = [json.loads(line) for line in answer.text.splitlines()]
    assert len({each["custom_id"] for each in found}) == len(found)
    return {each["custom_id"]: each for each in found}


async def events(api: Api) -> list[dict[str, Any]]:
    return list((await api.admin.get("/v1/usage/events?service_class=batch")).json()["data"])


def codes(found: dict[str, dict[str, Any]]) -> set[tuple[int, str]]:
    return {
        (each["response"]["status_code"], each["response"]["body"]["error"]["code"])
        for each in found.values()
    }


async def test_lines_may_be_responses(api: Api, worker: BatchWorker) -> None:
    url = "/v1/responses"
    bodies: list[dict[str, Any]] = [
        {"model": BASE, "input": "x"},
        {"model": BASE, "input": "x", "background": True},
    ]
    lines = [
        {"custom_id": str(n), "method": "POST", "url": url, "body": body}
        for n, body in enumerate(bodies)
    ]
    ended = await run(
        api, worker, await start(api, "\n".join(map(json.dumps, lines)).encode(), url)
    )
    assert ended["request_counts"] == {"total": 2, "completed": 1, "failed": 1}
    body = (await results(api, ended["output_file_id"]))["0"]["response"]["body"]
    assert (body["object"], body["status"], body["output"][0]["type"]) == (
        "response",
        "completed",
        "message",
    )
    assert codes(await results(api, ended["error_file_id"])) == {(400, "unsupported_parameter")}
    assert [(event["endpoint"], event["status"]) for event in await events(api)] == [(url, "stop")]


async def test_lines_run_in_the_lane_of_batches_and_are_billed_as_such(
    api: Api, acme: Client, worker: BatchWorker
) -> None:
    await upload(acme, "pirate")
    ended = await run(api, worker, await start(api, lines_for(BASE, "pirate", BASE)))
    assert ended["status"] == "completed"
    assert ended["request_counts"] == {"total": 3, "completed": 3, "failed": 0}
    assert {request.flow.lane for request in api.engine.requests} == {1}
    billed = await events(api)
    assert len(billed) == 3
    assert {event["service_class"] for event in billed} == {"batch"}
    latency = (await api.admin.get("/v1/usage/latency")).json()
    assert latency["totals"]["requests"] == 0


async def test_a_rate_limit_is_waited_for_and_fails_no_line(api: Api, worker: BatchWorker) -> None:
    await api.key("acme")
    await api.services.registry.tenants.update_tenant("acme", {"concurrent_requests": 1})
    ended = await run(api, worker, await start(api, lines_for(BASE, BASE, BASE)))
    assert (ended["status"], ended["request_counts"]["failed"]) == ("completed", 0)
    assert len(await events(api)) == 3


async def test_a_month_that_is_used_up_fails_lines_with_the_reason(
    api: Api, worker: BatchWorker
) -> None:
    await api.key("acme")
    await api.services.registry.tenants.update_tenant("acme", {"tokens_per_month": 1})
    ended = await run(api, worker, await start(api, lines_for(BASE, BASE)))
    assert (ended["status"], ended["output_file_id"]) == ("completed", None)
    failed = await results(api, ended["error_file_id"])
    assert {status for status, _ in codes(failed)} == {429}
    assert await events(api) == []


async def test_a_revoked_key_and_a_deleted_adapter_fail_the_lines_that_follow(
    api: Api, acme: Client, worker: BatchWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache, "MAX_AGE_S", 0.0)
    await upload(acme, "pirate")
    batch_id = await start(api, lines_for(BASE, "pirate"))
    await acme.delete("/v1/adapters/pirate")
    ended = await run(api, worker, batch_id)
    assert codes(await results(api, ended["error_file_id"])) == {(404, "model_not_found")}
    assert set(await results(api, ended["output_file_id"])) == {"0"}
    batch_id = await start(api, lines_for(BASE, BASE))
    (key,) = await api.services.registry.keys.list_keys("acme")
    await api.services.registry.keys.revoke_key(key.id)
    api.keys.clear()
    ended = await run(api, worker, batch_id)
    assert codes(await results(api, ended["error_file_id"])) == {(401, "invalid_api_key")}


async def test_lines_of_all_batches_of_a_key_share_one_look_at_it(
    api: Api, worker: BatchWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = api.services.registry.keys
    looks: list[str] = []
    really = keys.identify_key

    async def counted(key_id: str) -> Identity:
        looks.append(key_id)
        return await really(key_id)

    monkeypatch.setattr(keys, "identify_key", counted)
    monkeypatch.setattr(cache, "MAX_AGE_S", 60.0)
    batches = [await start(api, lines_for(*[BASE] * 8)) for _ in range(4)]
    for batch in batches:
        assert (await run(api, worker, batch))["request_counts"]["completed"] == 8
    assert len(looks) == 1


async def test_lines_that_the_engine_loses_run_again_and_are_billed_once(
    api: Api, worker: BatchWorker
) -> None:
    api.engine.failure_after = 2
    batch_id = await start(api, lines_for(BASE, BASE))
    await worker.look()
    await eventually(lambda: len(api.engine.aborted) + len(api.engine.requests) >= 2)
    api.engine.failure_after = None
    ended = await run(api, worker, batch_id)
    assert ended["request_counts"] == {"total": 2, "completed": 2, "failed": 0}
    assert len(await events(api)) == 2


async def test_a_line_that_the_engine_always_dies_under_fails_at_last(
    api: Api, worker: BatchWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(line_run, "MAX_LOSSES", 2)
    api.engine.failure_after = 1
    ended = await run(api, worker, await start(api, lines_for(BASE)))
    assert codes(await results(api, ended["error_file_id"])) == {(503, "engine_restarted")}
    assert len(api.engine.requests) == 2


async def test_a_line_that_ends_by_what_it_asked_for_is_billed_what_was_computed(
    api: Api, worker: BatchWorker
) -> None:
    api.engine.refusal, api.engine.refusal_after = (
        ErrorInfo(code="grammar_dead_end", message="No token fits."),
        2,
    )
    ended = await run(api, worker, await start(api, lines_for(BASE)))
    assert codes(await results(api, ended["error_file_id"])) == {(400, "grammar_dead_end")}
    (event,) = await events(api)
    assert (event["status"], event["prompt_tokens"], event["completion_tokens"]) == ("error", 2, 2)


async def test_a_batch_whose_window_is_over_keeps_its_results(
    api: Api, worker: BatchWorker
) -> None:
    api.engine.token_s = 0.01
    slow = {"model": BASE, "prompt": "x", "max_tokens": 200, "ignore_eos": True}
    last = {"custom_id": "s", "method": "POST", "url": URL, "body": slow}
    batch_id = await start(
        api, lines_for(*[BASE] * 4, max_tokens=1) + f"\n{json.dumps(last)}".encode()
    )
    await run(api, worker, batch_id, goal=4)
    api.ahead = timedelta(hours=25)
    ended = await run(api, worker, batch_id)
    assert (ended["status"], ended["request_counts"]) == (
        "expired",
        {"total": 5, "completed": 4, "failed": 1},
    )
    left = await results(api, ended["error_file_id"])
    assert {name: each["error"]["code"] for name, each in left.items()} == {"s": "batch_expired"}
    assert api.engine.running == set()


async def test_another_server_goes_on_where_one_leaves_off(api: Api) -> None:
    api.engine.token_s = 0.005
    hold_places(api, 4)
    batch_id = await start(api, lines_for(*[BASE] * 40, max_tokens=5))
    first, other = (BatchWorker(api.services, name) for name in ("srv_a", "srv_b"))
    await run(api, first, batch_id, goal=5)
    assert not await api.services.registry.batches.claim("srv_b")
    await first.leave_off()
    assert len(await events(api)) < 40
    ended = await run(api, other, batch_id)
    assert ended["request_counts"] == {"total": 40, "completed": 40, "failed": 0}
    assert len(await results(api, ended["output_file_id"])) == 40
    assert len(await events(api)) == 40
    await other.leave_off()


def hold_places(api: Api, places: int) -> None:
    """Let so many lines run at once."""
    batch = replace(api.services.config.batch, max_running=places)
    object.__setattr__(api.services, "config", replace(api.services.config, batch=batch))


def started(api: Api, tenant_id: str) -> int:
    return sum(request.flow.tenant == tenant_id for request in api.engine.requests)


async def flood(api: Api, worker: BatchWorker, num_batches: int = 40) -> str:
    """Have a tenant's many batches run; returns its id."""
    lines = lines_for(*[BASE] * 5, max_tokens=3, ignore_eos=True)
    for _ in range(num_batches):
        await start(api, lines)
    await worker.look()
    await eventually(lambda: len(api.engine.requests) > 3)
    return api.engine.requests[0].flow.tenant


async def test_a_tenant_waits_for_a_few_lines_of_another_with_forty_batches(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_results, "COMMIT_S", 0.01)
    hold_places(api, 4)
    worker = BatchWorker(api.services, "srv_a")
    busy = await flood(api, worker)
    batch_id = await start(
        api, lines_for(*[BASE] * 10, max_tokens=3, ignore_eos=True), tenant="rival"
    )
    ended = await run(api, worker, batch_id, tenant="rival")
    assert ended["request_counts"]["completed"] == 10
    tenants = [request.flow.tenant for request in api.engine.requests]
    own = [place for place, tenant in enumerate(tenants) if tenant != busy]
    assert len(own) == 10
    assert own[-1] - own[0] <= 40  # 20 if each line took as long; 200 lines of the other wait
    await worker.leave_off()


async def test_a_newcomer_has_its_share_of_lines_before_a_line_of_another_ends(api: Api) -> None:
    hold_places(api, 4)
    worker = BatchWorker(api.services, "srv_a")
    api.engine.token_s = 3600.0
    busy = await flood(api, worker, num_batches=1)
    await start(api, lines_for(*[BASE] * 10), tenant="rival")
    await worker.look()
    await eventually(lambda: len(api.engine.running) == 6)
    assert started(api, busy) == 4
    await worker.leave_off()


async def test_a_tenant_with_weight_has_as_many_lines_more(api: Api) -> None:
    hold_places(api, 4)
    worker = BatchWorker(api.services, "srv_a")
    api.engine.token_s = 3600.0
    busy = await flood(api, worker, num_batches=1)
    await api.key("rival")
    await api.services.registry.tenants.update_tenant("rival", weight=3.0)
    async with api.admin as admin:  # the weight is the tenant's, whoever makes the batch
        file = await admin.post(
            "/v1/files?tenant=rival",
            data={"purpose": "batch"},
            files={"file": ("a", lines_for(*[BASE] * 10))},
        )
        body = {"input_file_id": file.json()["id"], "endpoint": URL, "completion_window": "24h"}
        assert (await admin.post("/v1/batches?tenant=rival", json=body)).status_code == 200
    await worker.look()
    await eventually(lambda: len(api.engine.running) == 7)
    assert started(api, busy) == 4
    await worker.leave_off()


async def test_a_tenants_batches_leave_room_for_another_on_a_server_that_runs_as_many_as_it_may(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry_batches, "MAX_CLAIMED", 4)
    api.engine.token_s = 3600.0
    worker = BatchWorker(api.services, "srv_a")
    await flood(api, worker, num_batches=8)
    batch_id = await start(api, lines_for(BASE), tenant="rival")
    await worker.look()
    assert batch_id in {batch.id for batch in await api.services.registry.batches.claim("srv_a")}
    await worker.leave_off()


async def test_files_are_bounded_in_number_and_bytes(api: Api, acme: Client) -> None:
    config = api.services.config
    small = replace(config.batch, max_files=2, max_stored_bytes=150, max_file_bytes=100)
    object.__setattr__(api.services, "config", replace(config, batch=small))

    async def send(size: int) -> tuple[int, str]:
        answer = await acme.post(
            "/v1/files", data={"purpose": "batch"}, files={"file": ("a", b"x" * size)}
        )
        return answer.status_code, answer.json().get("error", {}).get("code", "")

    assert await send(101) == (413, "upload.too_large")
    assert await send(100) == (200, "")
    assert await send(90) == (413, "upload.too_large")
    assert await send(40) == (200, "")
    assert await send(1) == (403, "quota.files")
    assert len(api.files()) == 2
    for file in (await acme.get("/v1/files")).json()["data"]:
        assert (await acme.delete(f"/v1/files/{file['id']}")).status_code == 200
    assert api.files() == []


async def test_a_file_whose_life_is_over_is_gone_with_its_bytes(api: Api, acme: Client) -> None:
    made = (
        await acme.post("/v1/files", data={"purpose": "batch"}, files={"file": ("a", b"x")})
    ).json()
    assert made["expires_at"] == made["created_at"] + 30 * 86_400
    api.ahead = timedelta(days=31)
    assert (await acme.get(f"/v1/files/{made['id']}")).status_code == 404
    assert await api.services.registry.files.forget_expired() == 1
