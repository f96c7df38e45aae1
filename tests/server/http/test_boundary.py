"""What nobody expected still has an answer, and the answer tells nothing."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from functools import partial

import httpx
import pytest
from structlog.testing import capture_logs

from api_adapters import upload
from api_server import BASE, Api, Client, eventually, new_client
from manylora.engine.request import ErrorInfo, GenerationRequest, RequestOutput
from manylora.server.http.listen import metrics_app
from manylora.server.status.routes import metrics_response

pytestmark = pytest.mark.anyio
BODY = {"model": BASE, "prompt": "x"}


def breaking_after(num_outputs: int, api: Api) -> None:
    whole = api.engine.generate

    async def generate(request: GenerationRequest) -> AsyncGenerator[RequestOutput, None]:
        count = 0
        async for output in whole(request):
            if count == num_outputs:
                raise RuntimeError("secret /home/manylora 0xdeadbeef")
            count += 1
            yield output

    api.engine.generate = generate  # type: ignore[method-assign]


async def test_a_fault_before_the_first_byte_is_a_constant_500(api: Api, acme: Client) -> None:
    breaking_after(0, api)
    answer = await acme.post("/v1/completions", json=BODY)
    assert answer.status_code == 500
    assert answer.json()["error"]["code"] == "internal_error"
    assert "secret" not in answer.text
    assert answer.headers["x-request-id"].startswith("req-")


async def test_a_fault_that_the_engine_reports_is_in_the_log_under_the_requests_id(
    api: Api, acme: Client
) -> None:
    api.engine.refusal = ErrorInfo(
        kind="internal", code="internal_error", message="secret /home/manylora"
    )
    with capture_logs() as logged:
        answer = await acme.post("/v1/completions", json=BODY)
    assert answer.status_code == 500
    assert "secret" not in answer.text
    assert [line["request_id"] for line in logged if line["event"] == "internal_error"] == [
        answer.headers["x-request-id"]
    ]


async def test_a_fault_within_a_stream_is_an_error_event(api: Api) -> None:
    breaking_after(2, api)
    async with api.listening() as url, new_client(await api.key("acme"), url) as client:
        try:
            async with client.stream(
                "POST", "/v1/completions", json={**BODY, "stream": True}
            ) as answer:
                lines = [line async for line in answer.aiter_lines() if line]
        except httpx.RemoteProtocolError:
            pytest.fail("the connection was dropped")
        await eventually(lambda: not api.services.drain.num_running)
        assert (await client.get("/health")).status_code == 200
    assert json.loads(lines[-1].removeprefix("data: "))["error"]["code"] == "internal_error"
    assert "secret" not in "".join(lines)


async def test_a_port_of_its_own_shows_metrics_and_nothing_else(api: Api) -> None:
    async with new_client(
        None,
        "http://test",
        httpx.ASGITransport(app=metrics_app(partial(metrics_response, api.services))),
    ) as client:
        assert "manylora_build_info" in (await client.get("/metrics")).text
        assert (await client.get("/v1/models")).status_code == 404
        assert (await client.post("/metrics")).status_code == 405


async def test_deleting_a_tenant_takes_its_adapters_from_engine_and_disk(
    api: Api, acme: Client
) -> None:
    digest = (await upload(acme, "pirate")).json()["digest"]
    assert (await api.admin.delete("/v1/tenants/acme")).status_code == 204
    assert api.engine.dropped == [digest]
    assert api.files() == []
    assert (await acme.get("/v1/models")).status_code == 401
