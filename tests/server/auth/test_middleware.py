from __future__ import annotations

from pathlib import Path

import pytest

from api_server import BASE
from api_server import api as open_api
from manylora.errors import ConfigError
from manylora.server.auth.admin_key import admin_key, check_shared_secrets, given_pepper

pytestmark = pytest.mark.anyio


async def test_without_authentication_everybody_here_is_admin_of_a_default_tenant(
    tmp_path: Path,
) -> None:
    async with open_api(tmp_path, auth="off") as api, api.client() as client:
        assert (await client.get("/v1/tenants")).json()["data"][0]["name"] == "default"
        assert (
            await client.post("/v1/completions", json={"model": BASE, "prompt": "x"})
        ).status_code == 200
        usage = (await client.get("/v1/usage?group_by=tenant")).json()
        assert [row["tenant"] for row in usage["data"]] == ["default"]


async def test_without_authentication_web_pages_of_others_are_kept_out(tmp_path: Path) -> None:
    async with open_api(tmp_path, auth="off") as api, api.client() as client:
        for headers, status in (
            ({"origin": "https://evil.example"}, 403),
            ({"origin": "null"}, 403),
            ({"origin": "http://127.evil.example"}, 403),
            ({"origin": "http://127.0.0.1.evil.example"}, 403),
            ({"host": "rebound.evil.example"}, 403),
            ({"origin": "http://["}, 403),
            ({"host": "[::1"}, 403),
            ({"origin": "http://localhost:3000"}, 200),
            ({"origin": "http://127.0.0.2:3000"}, 200),
            ({"host": "127.0.0.1:8000"}, 200),
            ({"host": "[::1]:8000"}, 200),
        ):
            assert (await client.get("/v1/models", headers=headers)).status_code == status, headers


def test_the_admin_key_is_made_once_and_kept(tmp_path: Path) -> None:
    first = admin_key(tmp_path / "data", {})
    again = admin_key(tmp_path / "data", {})
    assert (first.is_new, again.is_new) == (True, False)
    assert first.secret == again.secret
    assert first.path is not None
    assert first.path.stat().st_mode & 0o777 == 0o600
    assert first.announcement == [f"admin key {first.secret}", f"admin key in {first.path}"]
    assert again.announcement == [
        f"admin key in {first.path}"
    ]  # the start that made it may have failed
    given = admin_key(tmp_path / "data", {"MANYLORA_ADMIN_KEY": "a-key-from-the-environment"})
    assert (given.secret, given.path, given.announcement) == (
        "a-key-from-the-environment",
        None,
        ["admin key from MANYLORA_ADMIN_KEY"],
    )


def test_a_weak_admin_key_is_refused(tmp_path: Path) -> None:
    for weak in ("", "short", "with spaces in the key", "ключ" * 10):
        with pytest.raises(ConfigError):
            admin_key(tmp_path, {"MANYLORA_ADMIN_KEY": weak})


def test_a_short_pepper_is_refused() -> None:
    assert given_pepper({}) is None
    assert given_pepper({"MANYLORA_PEPPER": "p" * 16}) == "p" * 16
    with pytest.raises(ConfigError, match="16 characters"):
        given_pepper({"MANYLORA_PEPPER": "p" * 15})


@pytest.mark.parametrize(
    ("pepper", "key", "missing"),
    [
        (None, "k", "MANYLORA_PEPPER"),
        ("p", None, "MANYLORA_ADMIN_KEY"),
        (None, None, "MANYLORA_PEPPER"),
    ],
)
def test_servers_over_one_database_must_be_given_the_secrets_that_they_share(
    pepper: str | None, key: str | None, missing: str
) -> None:
    check_shared_secrets("gateway", "p", "k")
    with pytest.raises(ConfigError, match=f"A gateway needs {missing}"):
        check_shared_secrets("gateway", pepper, key)
