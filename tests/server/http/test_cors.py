"""Web pages of other origins: closed by default; with `server.cors_origins` they may call the API with a key."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from api_server import Api, api
from manylora.config import ServerConfig
from manylora.errors import ConfigError

pytestmark = pytest.mark.anyio
PAGE = "https://chat.example.org"
ALLOW = "access-control-allow-origin"
ASKS = {
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization, content-type",
}


async def asked(server: Api, origin: str) -> list[httpx.Response]:
    """A preflight, an answer, an error of a route, an answer without a key, and one while draining."""
    headers = {"origin": origin}
    client = await server.tenant("acme")
    answers = [
        await server.client().request(
            "OPTIONS", "/v1/chat/completions", headers={**headers, **ASKS}
        ),
        await client.get("/v1/models", headers=headers),
        await client.post("/v1/completions", json={}, headers=headers),
        await server.client().get("/v1/models", headers=headers),
    ]
    await server.services.drain.drain(0)
    return [*answers, await client.get("/v1/models", headers=headers)]


@pytest.mark.parametrize(
    ("setting", "origin", "allowed"),
    [
        ("", PAGE, None),
        (f"http://localhost:3000, {PAGE}", PAGE, PAGE),
        (PAGE, "https://evil.example.org", None),
        ("*", PAGE, "*"),
    ],
)
async def test_listed_pages_read_every_answer_and_never_with_a_cookie(
    tmp_path: Path, setting: str, origin: str, allowed: str | None
) -> None:
    async with api(tmp_path, cors_origins=setting) as server:
        answers = await asked(server, origin)
    assert [answer.headers.get(ALLOW) for answer in answers] == [allowed] * 5
    assert [answer.status_code for answer in answers[1:]] == [200, 400, 401, 503]
    assert (answers[0].status_code == 200) == (allowed is not None)
    assert not any("access-control-allow-credentials" in answer.headers for answer in answers)
    if allowed is not None:
        assert (
            answers[0].headers["access-control-allow-headers"]
            == ASKS["access-control-request-headers"]
        )
        assert "POST" in answers[0].headers["access-control-allow-methods"]


async def test_a_session_and_a_server_without_keys_stay_closed_to_listed_pages(
    tmp_path: Path,
) -> None:
    foreign = {"origin": PAGE, "sec-fetch-site": "cross-site"}
    async with (
        api(tmp_path / "on", cors_origins=PAGE) as server,
        await server.tenant("acme") as own,
    ):
        await own.post("/v1/session", json={})
        token = {"cookie": "; ".join(f"{name}={value}" for name, value in own.cookies.items())}
        assert token["cookie"]
        answer = await server.client().get("/v1/models", headers={**foreign, **token})
    assert (answer.status_code, answer.json()["error"]["code"]) == (403, "session.foreign_page")
    async with api(tmp_path / "off", cors_origins="*", auth="off") as server:
        for origin in (PAGE, "http://127.evil.example"):
            headers = {**foreign, "origin": origin}
            assert (await server.client().get("/v1/models", headers=headers)).status_code == 403


def test_what_is_no_origin_is_refused() -> None:
    for wrong in ("chat.example.org", f"{PAGE}/", f"{PAGE};https://b", "https://*.example.org"):
        with pytest.raises(ConfigError, match="must be origins such as"):
            ServerConfig(cors_origins=wrong)


def test_origins_are_compared_as_browsers_send_them() -> None:
    assert ServerConfig(cors_origins="HTTPS://Chat.Example.org, *").allowed_origins == [
        "https://chat.example.org",
        "*",
    ]
