"""What holds for every page, on a desk and on a phone, by day and by night."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

import pytest
from playwright.sync_api import Browser, Page, expect
from playwright.sync_api import TimeoutError as PlaywrightTimeout

from browser import DESKTOP, PHONE, grave_findings, sign_in, watched_page
from weft_server import ADMIN_KEY, WeftServer

PAGES = (
    "/",
    "/usage?group=adapter",
    "/adapters",
    "/adapters/pirate?tenant=harbour",
    "/live",
    "/playground",
    "/tenants",
    "/tenants/harbour",
    "/audit",
)
LOOKS = [(size, scheme) for size in (DESKTOP, PHONE) for scheme in ("light", "dark")]


@pytest.fixture(params=LOOKS, ids=lambda look: f"{look[0][0]}-{look[1]}")
def page(request: pytest.FixtureRequest, browser: Browser, server: WeftServer) -> Iterator[Page]:
    size, scheme = request.param
    with watched_page(browser, server.url, size=size, scheme=scheme) as (shown, _):
        sign_in(shown, ADMIN_KEY, "/account")
        yield shown


def settle(page: Page, path: str) -> None:
    """Open a page and wait until it has read what it shows."""
    page.goto(path)
    expect(page.get_by_role("heading", level=1)).to_be_visible()
    expect(page.locator(".skeleton")).to_have_count(0)


def test_pages_can_be_read_by_everybody_and_fit_the_screen(page: Page) -> None:
    wrong = {}
    for path in PAGES:
        settle(page, path)
        with suppress(PlaywrightTimeout):  # a chart has its width only after what is around it has its own
            page.wait_for_function("document.documentElement.scrollWidth <= innerWidth", timeout=3000)
        width, shown = page.evaluate("[document.documentElement.scrollWidth, innerWidth]")
        wrong[path] = [*(["wider than the screen"] if width > shown else []), *grave_findings(page)]
    assert {path: found for path, found in wrong.items() if found} == {}


def test_the_sign_in_can_be_read_by_everybody(browser: Browser, server: WeftServer) -> None:
    for size, scheme in LOOKS:
        with watched_page(browser, server.url, size=size, scheme=scheme) as (page, _):
            page.goto("/")
            expect(page.get_by_label("Key", exact=True)).to_be_focused()
            assert grave_findings(page) == []


def test_whatever_can_be_clicked_can_be_reached_by_the_keyboard(browser: Browser, server: WeftServer) -> None:
    missed = {}
    with watched_page(browser, server.url) as (page, _):
        sign_in(page, ADMIN_KEY, "/account")
        for path in PAGES:
            settle(page, path)
            missed[path] = page.evaluate(
                """() => [...document.querySelectorAll("#app *")]
                    .filter((element) => getComputedStyle(element).cursor === "pointer")
                    .filter((element) => !element.closest(
                        "a[href], button, input, select, textarea, summary, label, [tabindex='0']"))
                    .filter((element) => !element.querySelector("a[href], button, input, select"))
                    .map((element) => element.outerHTML.slice(0, 120))"""
            )
    assert {path: found for path, found in missed.items() if found} == {}


def test_the_menu_of_a_phone_opens_by_keyboard_and_closes_on_the_next_page(
    browser: Browser, server: WeftServer
) -> None:
    with watched_page(browser, server.url, size=PHONE) as (page, _):
        sign_in(page, ADMIN_KEY, "/account")
        menu = page.get_by_role("button", name="Menu")
        expect(menu).to_have_attribute("aria-expanded", "false")
        menu.focus()
        page.keyboard.press("Enter")
        expect(menu).to_have_attribute("aria-expanded", "true")
        page.get_by_role("link", name="Tenants").focus()
        page.keyboard.press("Enter")
        expect(page.get_by_role("heading", name="Tenants", level=1)).to_be_visible()
        expect(menu).to_have_attribute("aria-expanded", "false")


def test_a_page_that_is_none_says_so(browser: Browser, server: WeftServer) -> None:
    with watched_page(browser, server.url) as (page, _):
        sign_in(page, ADMIN_KEY, "/account")
        page.evaluate("import('/static/place.js').then(({ open }) => open('/nowhere'))")
        expect(page.get_by_text("There is no such page.")).to_be_visible()
        page.get_by_role("link", name="To the overview").click()
        expect(page.get_by_role("heading", level=1)).to_be_visible()
