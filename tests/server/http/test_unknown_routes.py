"""A path that Manylora does not serve is answered with what to call instead."""

from __future__ import annotations

import pytest

from api_server import Api
from manylora.server.errors import ELSEWHERE, NOT_SERVED

pytestmark = pytest.mark.anyio
V1 = "the base URL of a client ends in one /v1"


async def test_a_route_of_openai_that_is_not_served_is_a_400(api: Api) -> None:
    """After a 404 a LiteLLM proxy takes the model away from all of its users."""
    client = await api.tenant("acme", "infer")
    posts = (
        *NOT_SERVED,
        "/v1/responses/resp_1/cancel",
        "/v1/responses/compact",
        "/v1/threads/x/runs",
    )
    others = [("GET", "/v1/responses/resp_1/input_items"), ("DELETE", "/v1/responses/resp_1")]
    for method, path in (*(("POST", path) for path in posts), *others):
        answer = await client.request(method, path, json={"model": "demo", "input": "hi"})
        code = (
            None if path.startswith("/v1/messages") else "unsupported_route"
        )  # Anthropic's errors have no code
        assert (answer.status_code, answer.json()["error"].get("code")) == (400, code)
        assert answer.json()["error"]["message"].startswith("Manylora does not serve ")


@pytest.mark.parametrize(
    ("path", "status", "says"),
    [
        *(
            (path, 405 if path == "/" else 404, f"route for this is {here}.")
            for path, here in ELSEWHERE.items()
        ),
        (
            "/chat/completions",
            404,
            f"There is no route /chat/completions. Call /v1/chat/completions: {V1}",
        ),
        ("/v1/v1/models", 404, f"Call /v1/models: {V1}"),
        ("/api/v1/completions", 404, f"Call /v1/completions: {V1}"),
        ("/v1/chat/completions/", 404, f"Call /v1/chat/completions: {V1}"),
        ("/adapters", 405, f"This route takes GET, HEAD, not POST. Call /v1/adapters: {V1}"),
        ("/v1/models", 405, "This route takes GET, not POST."),
        ("/v1/responsesx", 404, "There is no route /v1/responsesx."),
        ("/" + "x" * 5000, 404, "/" + "x" * 99 + "."),
    ],
)
async def test_an_unknown_path_is_named_with_the_one_that_is_meant(
    api: Api, path: str, status: int, says: str
) -> None:
    answer = await (await api.tenant("acme", "infer")).post(path, json={})
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (
        status,
        "not_found" if status == 404 else "method_not_allowed",
    )
    assert says in error["message"]
    assert len(error["message"]) < 300


async def test_an_unknown_path_needs_a_key_first(api: Api) -> None:
    assert (await api.client().post("/v1/responses", json={})).status_code == 401
    assert (await api.client().get("/nothing")).status_code == 401


async def test_an_empty_model_name_is_told_where_the_names_are(api: Api) -> None:
    answer = await (await api.tenant("acme", "infer")).get("/v1/models/")
    assert answer.status_code == 404
    assert "GET /v1/models lists all" in answer.json()["error"]["message"]
