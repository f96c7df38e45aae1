from __future__ import annotations

import re

import httpx
import pytest
from playwright.sync_api import Browser, Page, expect

from browser import Watch, sign_in, sign_out_elsewhere, watched_page
from manylora_server import ADMIN_KEY, ManyloraServer


def menu(page: Page) -> list[str]:
    return page.get_by_role("navigation", name="Pages").get_by_role("link").all_inner_texts()


def test_the_admin_signs_in_with_the_key_and_out_again(page: Page) -> None:
    sign_in(page, ADMIN_KEY)
    assert menu(page) == [
        "Overview",
        "Usage",
        "Adapters",
        "Live",
        "Playground",
        "Tenants",
        "Audit log",
    ]
    assert page.evaluate("document.cookie") == ""
    (cookie,) = page.context.cookies()
    assert re.fullmatch(r"manylora_session_\d+", str(cookie.get("name")))
    assert (cookie.get("httpOnly"), cookie.get("sameSite"), cookie.get("path")) == (
        True,
        "Strict",
        "/",
    )
    page.reload()
    page.wait_for_load_state(
        "networkidle"
    )  # else answers to this page's questions come after the end of the session
    page.get_by_role("button", name="Sign out").click()
    expect(page.get_by_label("Key", exact=True)).to_be_visible()
    assert page.context.cookies() == []


def test_a_tenant_sees_no_page_for_admins(page: Page, server: ManyloraServer) -> None:
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    sign_in(page, server.tenants["atelier"], "/live")
    assert menu(page) == ["Overview", "Usage", "Adapters", "Playground", "Key and limits"]
    expect(page.get_by_role("main")).to_contain_text("This page is for admins.")
    expect(page.get_by_text("atelier", exact=True)).to_be_visible()
    assert not [url for url in asked if "/v1/engine" in url]
    assert page.get_by_label("Tenant", exact=True).count() == 0


@pytest.mark.parametrize(
    ("path", "has", "lacks"), [("/", "infer", "usage"), ("/playground", "usage", "infer")]
)
def test_a_key_without_the_scope_of_a_page_is_told_so(
    page: Page, server: ManyloraServer, path: str, has: str, lacks: str
) -> None:
    sign_in(page, server.new_key("harbour", scopes=[has]), path)
    expect(page.get_by_role("main")).to_contain_text(f"The key lacks the scope {lacks}.")
    expect(page.get_by_label("Prompt", exact=True)).to_have_count(0)


def test_a_wrong_key_says_so_and_a_key_with_spaces_is_not_sent(watched: tuple[Page, Watch]) -> None:
    page, watch = watched
    watch.allowed = {401}
    page.goto("/usage?range=7d")
    page.get_by_label("Key", exact=True).fill("manylora_no key")
    expect(page.get_by_role("button", name="Sign in")).to_be_disabled()
    expect(page.get_by_text("A key has no spaces")).to_be_visible()
    page.get_by_label("Key", exact=True).fill("manylora_nobodys_key")
    page.keyboard.press("Enter")
    expect(page.get_by_role("alert")).to_contain_text("wrong, expired or revoked")
    page.get_by_label("Key", exact=True).fill(ADMIN_KEY)
    page.keyboard.press("Enter")
    expect(page.get_by_role("link", name="Usage")).to_have_attribute("aria-current", "page")
    assert page.url.endswith("/usage?range=7d")


def test_the_link_printed_at_start_signs_in_once(browser: Browser, server: ManyloraServer) -> None:
    printed = re.search(
        r"^manylora: dashboard (\S+/#link=)\S+ ", server.log.read_text(), re.MULTILINE
    )
    assert printed is not None
    link = (
        printed[1] + server.admin.post("/v1/session/links").json()["link"]
    )  # the printed one may be too old by now
    with watched_page(browser, server.url) as (page, _):
        page.goto(link)
        expect(page.get_by_role("navigation", name="Pages")).to_be_visible()
        assert "#" not in page.url
    with watched_page(browser, server.url) as (page, watch):
        watch.allowed = {401}
        page.goto(link)
        expect(page.get_by_role("alert")).to_contain_text("This link has been used, or is too old")


def test_a_link_takes_no_open_session_away(
    watched: tuple[Page, Watch], server: ManyloraServer
) -> None:
    """Else who sends a link has others work in a session of the sender's."""
    page, watch = watched
    watch.allowed = {409}
    with httpx.Client(
        base_url=server.url, headers={"Authorization": f"Bearer {server.tenants['harbour']}"}
    ) as other:
        link = f"{server.url}/#link={other.post('/v1/session/links').json()['link']}"
    sign_in(page, server.tenants["atelier"])
    page.goto("about:blank")
    page.goto(link)
    expect(page.get_by_text("You are signed in already, so the link was not used.")).to_be_visible()
    expect(page.get_by_text("atelier", exact=True)).to_be_visible()
    page.get_by_role("button", name="Sign out").click()
    expect(page.get_by_label("Key", exact=True)).to_be_visible()
    page.goto("about:blank")
    page.goto(link)
    expect(page.get_by_text("harbour", exact=True)).to_be_visible()


@pytest.mark.parametrize("how", ["revoked", "signed out elsewhere"])
def test_a_session_that_ends_leads_back_to_the_sign_in(
    watched: tuple[Page, Watch], server: ManyloraServer, how: str
) -> None:
    page, watch = watched
    watch.allowed = {401}
    made = server.admin.post("/v1/tenants/harbour/keys", json={"name": "soon gone"}).json()
    sign_in(page, made["key"], "/adapters")
    page.wait_for_load_state(
        "networkidle"
    )  # else a first question of this page may find out before the click
    if how == "revoked":
        assert server.admin.delete(f"/v1/keys/{made['id']}").status_code == 204
    else:
        sign_out_elsewhere(page, server)
    page.get_by_role("link", name="Usage").click()
    expect(page.get_by_label("Key", exact=True)).to_be_visible()


def test_the_page_runs_under_a_policy_that_lets_nothing_else_in(
    watched: tuple[Page, Watch],
) -> None:
    page, watch = watched
    sign_in(page, ADMIN_KEY)
    page.wait_for_load_state("networkidle")
    assert watch.said == []
    page.evaluate(
        "document.head.append(Object.assign(document.createElement('script'), {text: 'window.ran = 1'}))"
    )
    assert page.evaluate("window.ran") is None
    (said,) = watch.said
    assert "Content Security Policy" in said
    watch.said.clear()
