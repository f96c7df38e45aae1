"""What holds for every page: on a desk and on a phone, by day and by night, at addresses that nobody means."""

from __future__ import annotations

from contextlib import suppress

import pytest
from playwright.sync_api import Browser, Page, expect
from playwright.sync_api import TimeoutError as PlaywrightTimeout

from browser import (
    DESKTOP,
    PHONE,
    Watch,
    grave_findings,
    grave_findings_in_the_dark,
    sign_in,
    watched_page,
)
from manylora_server import ADMIN_KEY, ManyloraServer

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
CLICKABLE = """() => [...document.querySelectorAll("#app *")]
    .filter((element) => getComputedStyle(element).cursor === "pointer")
    .filter((element) => !element.closest("a[href], button, input, select, textarea, summary, label, [tabindex='0']"))
    .filter((element) => !element.querySelector("a[href], button, input, select"))
    .map((element) => element.outerHTML.slice(0, 120))"""
"""What can be clicked and not be reached by the keyboard."""


def ask(page: Page) -> None:
    """Have four models answer: side by side on a desk, one below the other on a phone."""
    page.get_by_label("Prompt", exact=True).fill("Where is my order?")
    page.keyboard.press("Control+Enter")
    expect(page.locator(".exchange[data-state=done]")).to_have_count(4)
    lefts = page.locator(".talk").evaluate_all(
        "all => all.map((one) => one.getBoundingClientRect().left)"
    )
    assert len(set(lefts)) == (
        1 if page.viewport_size == {"width": PHONE[0], "height": PHONE[1]} else 4
    )


def open_filter(page: Page) -> None:
    page.get_by_role("group", name="Filters").get_by_role("button", name="Status").click()
    page.get_by_role("checkbox").first.wait_for()


STATES = {
    "/adapters?upload=new": lambda page: page.get_by_role("dialog").wait_for(),
    "/playground?tenant=harbour&model=manylora-demo&model=pirate&model=shout&model=json": ask,
    "/usage?group=adapter&subgroup=status": open_filter,
}
"""What a page looks like when it is used."""


@pytest.fixture
def admin(page: Page) -> Page:
    sign_in(page, ADMIN_KEY, "/account")
    return page


def settle(page: Page, path: str) -> None:
    """Open a page and wait until it has read what it shows."""
    page.goto(path)
    expect(page.get_by_role("heading", level=1)).to_be_visible()
    expect(page.locator(".skeleton")).to_have_count(0)


def flaws(page: Page, size: tuple[int, int]) -> list[str]:
    """What is wrong with what is shown, and on a desk also by night: the colours are all that differs."""
    with suppress(
        PlaywrightTimeout
    ):  # a chart has its width only after what is around it has its own
        page.wait_for_function(
            "() => document.documentElement.scrollWidth <= innerWidth", timeout=3000
        )
    found = grave_findings(page)
    if size == DESKTOP:
        found += [f"by night: {finding}" for finding in grave_findings_in_the_dark(page)]
    width, shown = page.evaluate("[document.documentElement.scrollWidth, innerWidth]")
    return [*found, *(["wider than the screen"] if width > shown else [])]


@pytest.mark.parametrize("size", [DESKTOP, PHONE], ids=["desktop", "phone"])
def test_pages_can_be_read_by_everybody_and_fit_the_screen(
    browser: Browser, server: ManyloraServer, size: tuple[int, int]
) -> None:
    wrong = {}
    with watched_page(browser, server.url, size=size) as (page, _):
        page.goto("/")
        expect(page.get_by_label("Key", exact=True)).to_be_focused()
        wrong["the sign-in"] = flaws(page, size)
        page.emulate_media(color_scheme="light")
        sign_in(page, ADMIN_KEY, "/account")
        for path in (*PAGES, *STATES):
            settle(page, path)
            STATES.get(path, lambda _: None)(page)
            unreachable = page.evaluate(CLICKABLE) if size == DESKTOP else []
            wrong[path] = [*flaws(page, size), *unreachable]
            page.emulate_media(color_scheme="light")
    assert {path: found for path, found in wrong.items() if found} == {}


def test_the_menu_of_a_phone_opens_by_keyboard_and_closes_on_the_next_page(
    browser: Browser, server: ManyloraServer
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


def test_a_new_tenant_is_told_how_to_begin(page: Page, server: ManyloraServer) -> None:
    server.tenant("newcomer")
    sign_in(page, server.tenants["newcomer"])
    main = page.get_by_role("main")
    expect(main).to_contain_text("No requests in this range.")
    expect(main).to_contain_text("manylora adapter push ./my-adapter")
    expect(page.locator("[data-stat=Requests]")).to_contain_text("nothing before to compare with")
    main.get_by_role("link", name="Adapters").click()
    expect(main).to_contain_text("No adapters yet.")
    expect(page.get_by_label("Upload with manylora")).to_contain_text(
        "manylora adapter push ./my-adapter --name support"
    )
    expect(page.get_by_label("Upload with curl")).to_contain_text(f"curl {server.url}/v1/adapters")
    main.get_by_role("button", name="Upload an adapter").click()
    expect(page.get_by_role("dialog")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.get_by_role("dialog")).to_have_count(0)
    page.goto("/usage?status=error")
    page.get_by_role("button", name="Clear the filters").first.click()
    expect(page.get_by_text("No usage in this range.").first).to_be_visible()
    assert "status" not in page.url


def test_a_page_that_is_none_says_so(admin: Page) -> None:
    admin.evaluate("import('/static/place.js').then(({ open }) => open('/nowhere'))")
    expect(admin.get_by_text("There is no such page.")).to_be_visible()
    admin.get_by_role("link", name="To the overview").click()
    expect(admin.get_by_role("heading", level=1)).to_be_visible()


@pytest.mark.parametrize("name", ["constructor", "__proto__"])
def test_names_that_every_object_has_choose_nothing(admin: Page, name: str) -> None:
    for address in (
        f"/usage?metric={name}",
        f"/usage?group={name}",
        f"/usage?group=adapter&subgroup={name}",
        f"/usage?range={name}&{name}={name}",
        f"/?range={name}",
        f"/adapters/pirate?tenant=harbour&measure={name}&code={name}",
    ):
        settle(admin, address)
    admin.get_by_role("button", name="Python").click()
    assert admin.url.endswith(f"measure={name}&code=python")


def test_a_badly_written_name_is_one_that_nothing_has(
    admin: Page, watched: tuple[Page, Watch]
) -> None:
    watched[1].allowed.add(404)
    admin.goto("/adapters/%zz?tenant=harbour")
    expect(admin.get_by_text("There is no adapter %zz here.")).to_be_visible()
    admin.goto("/tenants/%E0%A4%A")
    expect(admin.get_by_role("main")).to_contain_text("There is no tenant")


@pytest.mark.parametrize(("path", "otherwise"), [("/", "24h"), ("/usage", "30d")])
def test_a_range_of_centuries_is_cut_to_years(admin: Page, path: str, otherwise: str) -> None:
    admin.goto(f"{path}?start=0202-01-01&end=2026-11-22&tz=UTC")
    expect(
        admin.get_by_text("Shown from 2023-11-21 on, because at most three years can be shown.")
    ).to_be_visible()
    assert admin.locator("g.bar").count() <= 3 * 366
    for end in ("0203-01-01", "99999-01-01", "+275760-09-13"):
        admin.goto(f"{path}?start=0202-01-01&end={end}&tz=UTC")
        expect(admin.get_by_label("Range")).to_have_value(otherwise)
