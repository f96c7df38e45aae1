from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, Locator, Page, expect

from browser import Watch, sign_in, watched_page
from manylora_server import ADMIN_KEY, ManyloraServer


@pytest.fixture
def tenant(server: ManyloraServer, request: pytest.FixtureRequest) -> Iterator[str]:
    """A tenant of the test's own."""
    name = re.sub(r"[^a-z0-9]+", "-", request.node.name.removeprefix("test_"))[:40].strip("-")
    assert server.admin.post("/v1/tenants", json={"name": name}).status_code == 201
    yield name
    server.admin.delete(f"/v1/tenants/{name}")


def row(page: Page, text: str) -> Locator:
    return page.get_by_role("row").filter(has_text=text)


def status(server: ManyloraServer, key: str) -> int:
    with server.client(key) as client:
        return client.get("/v1/models").status_code


def test_a_tenant_is_made_with_limits_and_deleted_by_its_name(
    watched: tuple[Page, Watch], server: ManyloraServer
) -> None:
    page, watch = watched
    watch.allowed = {409}
    sign_in(page, ADMIN_KEY, "/tenants?range=24h&tz=UTC")
    for name in ("atelier", "harbour"):
        used = server.admin.get("/v1/usage", params={"tenant": name}).json()["totals"]
        for column in ("requests", "prompt_tokens", "completion_tokens"):
            expect(row(page, name).locator(f"[data-column={column}]")).to_have_text(
                f"{used[column]:,}"
            )
    page.get_by_role("button", name="New tenant").click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_label("Name").fill("New Tenant")
    expect(dialog).to_contain_text("Lower-case letters, digits")
    make = dialog.get_by_role("button", name="Make the tenant")
    expect(make).to_be_disabled()
    dialog.get_by_label("Name").fill("harbour")
    make.click()
    expect(dialog.get_by_role("alert")).to_contain_text("harbour")
    dialog.get_by_label("Name").fill("weavers")
    dialog.get_by_text("Limits; they can be changed later").click()
    dialog.get_by_label("Requests per minute").fill("many")
    expect(dialog).to_contain_text("A whole number of at least 0")
    dialog.get_by_label("Requests per minute").fill("60")
    make.click()
    expect(page.get_by_role("heading", name="weavers", level=1)).to_be_visible()
    assert server.admin.get("/v1/tenants/weavers").json()["limits"]["requests_per_minute"] == 60
    expect(page.locator("[data-limit=requests_per_minute]")).to_contain_text("0 of 60")
    page.get_by_role("button", name="Delete the tenant").click()
    delete = page.get_by_role("dialog").get_by_role("button", name="Delete")
    expect(delete).to_be_disabled()
    page.get_by_label("Type the tenant's name to confirm").fill("weavers")
    delete.click()
    expect(page.get_by_role("heading", name="Tenants", level=1)).to_be_visible()
    assert server.admin.get("/v1/tenants/weavers").status_code == 404


def test_a_key_is_shown_once_works_and_works_no_more_when_revoked(
    page: Page, server: ManyloraServer, tenant: str
) -> None:
    sign_in(page, ADMIN_KEY, f"/tenants/{tenant}")
    expect(page.get_by_text("No key yet.")).to_be_visible()
    page.get_by_role("button", name="New key").click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_label("Name").fill("robot")
    dialog.get_by_label("change adapters").uncheck()
    dialog.get_by_role("button", name="Make the key").click()
    secret = page.get_by_label("The key", exact=True).inner_text()
    assert status(server, secret) == 200
    page.get_by_role("button", name="I have saved it").click()
    assert secret not in page.content()
    (key,) = server.admin.get(f"/v1/tenants/{tenant}/keys").json()["data"]
    assert (key["name"], key["scopes"]) == ("robot", ["infer", "usage"])
    expect(row(page, "robot")).to_contain_text(key["prefix"])
    page.get_by_role("button", name="Revoke robot").click()
    page.get_by_role("dialog").get_by_role("button", name="Revoke").click()
    expect(page.get_by_text("No key yet.")).to_be_visible()
    assert status(server, secret) == 401


def test_a_key_is_rotated_with_a_grace_and_changed(
    page: Page, server: ManyloraServer, tenant: str
) -> None:
    before = server.new_key(tenant)
    sign_in(page, ADMIN_KEY, f"/tenants/{tenant}")
    page.get_by_role("button", name="Rotate test").click()
    page.get_by_label("The old secret stops working").select_option("3600")
    page.get_by_role("dialog").get_by_role("button", name="Rotate").click()
    after = page.get_by_label("The key", exact=True).inner_text()
    assert after != before
    assert [status(server, key) for key in (before, after)] == [200, 200]
    page.get_by_role("button", name="I have saved it").click()
    page.get_by_role("button", name="Change test").click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_text("Limits of this key").click()
    dialog.get_by_label("Requests at a time").fill("3")
    dialog.get_by_role("button", name="Save").click()
    expect(row(page, "test")).to_contain_text("Requests at a time: 3")
    (key,) = server.admin.get(f"/v1/tenants/{tenant}/keys").json()["data"]
    assert key["limits"] == {"concurrent_requests": 3}


@pytest.mark.parametrize("width", [1280, 1024])
def test_the_keys_fit_their_card(
    browser: Browser, server: ManyloraServer, tenant: str, width: int
) -> None:
    server.new_key(
        tenant,
        name="everything",
        limits={"requests_per_minute": 600, "tokens_per_month": 2_000_000},
    )
    server.new_key(tenant, name="a-robot-with-a-long-name", expires_at="2100-01-01T00:00:00Z")
    with watched_page(browser, server.url, size=(width, 900)) as (page, _):
        sign_in(page, ADMIN_KEY, f"/tenants/{tenant}")
        card = page.get_by_role("region", name=re.compile("^Keys requests"))
        expect(card.get_by_role("button", name="Revoke everything")).to_be_visible()
        wide = card.evaluate(
            """(card) => [...card.querySelectorAll("*:not(.unseen)")]
                .filter((part) => part.getBoundingClientRect().right > card.getBoundingClientRect().right)
                .map((part) => part.outerHTML.slice(0, 120))"""
        )
        assert wide == []


def test_changes_stand_in_the_audit_log_by_tenant(
    page: Page, server: ManyloraServer, tenant: str
) -> None:
    server.new_key(tenant)
    sign_in(page, ADMIN_KEY, f"/audit?tenant={tenant}")
    rows = page.get_by_role("table", name="Changes").locator("tbody tr")
    expect(rows).to_have_count(2)
    assert rows.locator("[data-column=action]").all_inner_texts() == ["key.create", "tenant.create"]
    page.get_by_label("Tenant", exact=True).select_option("")
    expect(rows.filter(has_text="atelier").first).to_be_attached()


def test_a_tenant_sees_its_key_and_what_is_taken_of_its_limits(
    browser: Browser, server: ManyloraServer, tenant: str
) -> None:
    key = server.new_key(tenant, limits={"requests_per_minute": 5})
    server.admin.patch(f"/v1/tenants/{tenant}", json={"limits": {"tokens_per_month": 1000}})
    with server.client(key) as client:
        body = {"model": "manylora-demo", "prompt": "Hello", "max_tokens": 4}
        used = client.post("/v1/completions", json=body).json()["usage"]["total_tokens"]
    with watched_page(browser, server.url) as (page, _):
        sign_in(page, key, "/account")
        expect(page.locator("[data-limit=requests_per_minute]").last).to_contain_text("1 of 5")
        expect(page.locator("[data-limit=tokens_per_month]").first).to_contain_text(
            f"{used} of 1,000"
        )
        expect(page.get_by_role("meter", name="Requests per minute: 20% used")).to_be_attached()
