from __future__ import annotations

import re
from pathlib import Path

import httpx
import pytest
from starlette.datastructures import Headers

from api_server import Api
from api_server import api as open_api
from manylora.errors import ForbiddenError
from manylora.server.auth.browser import check_own_page
from manylora.server.http import dashboard

pytestmark = pytest.mark.anyio
OWN = {"sec-fetch-site": "same-origin"}


async def begun(api: Api, **headers: str) -> str:
    """The header that sets the cookie of a new session."""
    answer = await api.admin.post("/v1/session", headers=headers)
    assert answer.status_code == 201, answer.text
    return str(answer.headers["set-cookie"])


async def browser(api: Api) -> httpx.AsyncClient:
    """One whose pages are our own, with a session of the admin."""
    client = api.client()
    client.headers.update({"cookie": (await begun(api)).partition(";")[0], **OWN})
    return client


async def test_a_key_begins_a_session_that_is_worth_as_much(api: Api) -> None:
    header = await begun(api)
    assert {"HttpOnly", "SameSite=strict", "Path=/"} <= set(header.split("; "))
    assert "Secure" not in header
    client = await browser(api)
    assert (await client.get("/v1/me")).json()["role"] == "admin"
    ended = await client.delete("/v1/session")
    assert (ended.status_code, "Max-Age=0" in ended.headers["set-cookie"]) == (204, True)
    over = await client.get("/v1/me")
    assert (over.status_code, over.json()["error"]["code"]) == (401, "session.ended")


async def test_behind_tls_the_cookie_is_secure(api: Api) -> None:
    assert (await begun(api, **{"x-forwarded-proto": "https"})).endswith("; Secure")


async def test_servers_on_two_ports_do_not_share_their_cookie(api: Api) -> None:
    hosts = ("127.0.0.1:8000", "127.0.0.1:8001", "manylora.example", "[::1]:8000", "x:y")
    names = [(await begun(api, host=host)).partition("=")[0] for host in hosts]
    assert names == [
        "manylora_session_8000",
        "manylora_session_8001",
        "manylora_session",
        "manylora_session_8000",
        "manylora_session",
    ]


async def test_pages_of_others_cannot_use_a_session(api: Api) -> None:
    cases: list[tuple[str, dict[str, str], int]] = [
        ("GET", {"sec-fetch-site": "same-origin"}, 200),
        ("GET", {"sec-fetch-site": "none"}, 200),
        ("GET", {"sec-fetch-site": "same-site"}, 403),
        ("GET", {"sec-fetch-site": "cross-site"}, 403),
        ("GET", {}, 200),
        ("POST", {"sec-fetch-site": "same-origin"}, 200),
        ("POST", {"sec-fetch-site": "same-site", "origin": "http://test"}, 403),
        ("POST", {}, 403),
        ("POST", {"origin": "http://test"}, 200),
        ("POST", {"origin": "http://test:3000"}, 403),
        ("POST", {"origin": "null"}, 403),
        ("POST", {"origin": "http://["}, 403),
    ]
    client = await browser(api)
    del client.headers["sec-fetch-site"]
    for method, headers, status in cases:
        path, body = ("/v1/me", None) if method == "GET" else ("/tokenize", {"prompt": "x"})
        answer = await client.request(method, path, headers={"host": "test", **headers}, json=body)
        assert answer.status_code == status, (method, headers, answer.text)
        if status == 403:
            assert answer.json()["error"]["code"] == "session.foreign_page"


def test_no_origin_is_not_that_of_a_request_without_host() -> None:
    """HTTP/1.0 needs no Host, and `null` is what sandboxed pages say."""
    sent = [(b"cookie", b"manylora_session=token"), (b"origin", b"null")]
    with pytest.raises(ForbiddenError, match="own pages"):
        check_own_page({"type": "http", "method": "POST", "headers": sent}, Headers(raw=sent))


async def test_a_session_begins_no_other_and_makes_no_link(api: Api) -> None:
    client = await browser(api)
    for path in ("/v1/session", "/v1/session/links"):
        answer = await client.post(path)
        assert (answer.status_code, answer.json()["error"]["code"]) == (401, "auth.missing"), path
    assert (await client.get("/v1/me")).status_code == 200


async def test_a_key_goes_before_a_session(api: Api) -> None:
    client = await browser(api)
    for key, told in ((await api.key("acme"), (200, "tenant")), ("wrong", (401, None))):
        answer = await client.get("/v1/me", headers={"authorization": f"Bearer {key}"})
        assert (answer.status_code, answer.json().get("role")) == told


async def test_a_link_signs_in_once_and_nowhere_else(api: Api) -> None:
    async with api.client(await api.key("acme")) as client:
        link = (await client.post("/v1/session/links")).json()["link"]
    async with api.client(link) as client:
        assert (await client.get("/v1/me")).status_code == 401
        begun = await client.post("/v1/session")
        assert (begun.status_code, begun.json()["tenant"]) == (201, "acme")
        client.cookies.clear()
        again = await client.post("/v1/session")
    assert (again.status_code, again.json()["error"]["code"]) == (401, "session.link_used")


async def test_a_link_takes_no_open_session_away(api: Api) -> None:
    async with api.client(await api.key("acme")) as client:
        link = {
            "authorization": f"Bearer {(await client.post('/v1/session/links')).json()['link']}"
        }
    client = await browser(api)
    refused = await client.post("/v1/session", headers=link)
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "session.open")
    assert "set-cookie" not in refused.headers
    assert (await client.get("/v1/me")).json()["role"] == "admin"
    assert (await client.delete("/v1/session")).status_code == 204
    begun = await client.post("/v1/session", headers=link)  # the cookie is there still
    assert (begun.status_code, begun.json()["tenant"]) == (201, "acme")


async def test_without_authentication_there_is_nothing_to_sign_in_to(tmp_path: Path) -> None:
    async with open_api(tmp_path, auth="off") as api, api.client() as client:
        for path in ("/v1/session", "/v1/session/links"):
            answer = await client.post(path)
            assert (answer.status_code, answer.json()["error"]["code"]) == (400, "auth.off")
        assert (await client.delete("/v1/session")).status_code == 204


async def test_the_page_is_open_and_keeps_to_this_server(api: Api) -> None:
    pages = [page.replace("{name}", "acme") for page in dashboard.PAGES]
    async with api.client() as client:
        for path in (*pages, "/static/app.js", "/static/vendor/preact.js"):
            answer = await client.get(path)
            assert answer.status_code == 200, path
            assert "default-src 'self'" in answer.headers["content-security-policy"]
            assert "unsafe" not in answer.headers["content-security-policy"]
            assert answer.headers["x-content-type-options"] == "nosniff"
            known = await client.get(path, headers={"if-none-match": answer.headers["etag"]})
            assert known.status_code == 304
            assert (await client.head(path)).status_code == 200
        assert (await client.get("/favicon.ico")).headers["content-type"] == "image/svg+xml"
        assert (
            (await client.get("/static/app.js"))
            .headers["content-type"]
            .startswith("text/javascript")
        )


async def test_no_cache_keeps_what_a_session_was_told(api: Api) -> None:
    client = await browser(api)
    for path, status in (("/v1/me", 200), ("/v1/usage?format=csv", 200), ("/v1/none", 404)):
        answer = await client.get(path)
        assert answer.status_code == status
        assert answer.headers["cache-control"] == "no-store"
        assert answer.headers["x-content-type-options"] == "nosniff"
    assert (await client.get("/static/app.js")).headers["cache-control"] == "no-cache"


async def test_what_is_no_page_stays_closed(api: Api) -> None:
    async with api.client() as client:
        for path in ("/usage/x", "/admin", "/static", "/adapters/a/b", "/v1/usage", "/v1/session"):
            assert (await client.get(path)).status_code == 401, path
        assert (await client.post("/")).status_code == 401
        for path in (
            "/static/none.js",
            "/static/../app.py",
            "/static/%2e%2e/app.py",
            "/static/..%2fapp.py",
        ):
            assert (await client.get(path)).status_code in (401, 404), path


def test_every_page_of_the_router_is_served() -> None:
    routed = re.findall(r'path: "([^"]+)"', (dashboard.STATIC / "app.js").read_text())
    assert sorted(path.replace(":name", "{name}") for path in routed) == sorted(dashboard.PAGES)


def test_the_frame_is_fetched_in_one_go() -> None:
    page = (dashboard.STATIC / "index.html").read_text()
    assert set(re.findall(r'rel="modulepreload" href="/static/([^"]+)"', page)) == imported(
        "app.js"
    )


def imported(module: str) -> set[str]:
    """All that a module needs before it runs, and what that needs."""
    source = (dashboard.STATIC / module).read_text()
    names = {
        str(
            (dashboard.STATIC / module)
            .parent.joinpath(name)
            .resolve()
            .relative_to(dashboard.STATIC)
        )
        for name in re.findall(r'\bfrom\s*"(\.[^"]+)"', source)
    }
    return names.union(*(imported(name) for name in names))
