"""Addresses that nobody means and somebody types: the page shows something sound, and stays quick."""

from __future__ import annotations

import pytest
from playwright.sync_api import Page, expect

from browser import Watch, sign_in
from weft_server import ADMIN_KEY


@pytest.mark.parametrize("name", ["constructor", "__proto__"])
def test_names_that_every_object_has_choose_nothing(page: Page, name: str) -> None:
    sign_in(page, ADMIN_KEY, "/account")
    for address in (
        f"/usage?metric={name}",
        f"/usage?group={name}",
        f"/usage?group=adapter&subgroup={name}",
        f"/usage?range={name}",
        f"/?range={name}",
        f"/adapters/pirate?tenant=harbour&measure={name}&code={name}",
    ):
        page.goto(address)
        expect(page.get_by_role("heading", level=1)).to_be_visible()
        expect(page.locator(".skeleton")).to_have_count(0)


def test_a_badly_written_name_is_one_that_nothing_has(watched: tuple[Page, Watch]) -> None:
    page, watch = watched
    watch.allowed.add(404)
    sign_in(page, ADMIN_KEY, "/account")
    page.goto("/adapters/%zz?tenant=harbour")
    expect(page.get_by_text("There is no adapter %zz here.")).to_be_visible()
    page.goto("/tenants/%E0%A4%A")
    expect(page.get_by_role("main")).to_contain_text("There is no tenant")


@pytest.mark.parametrize(("path", "otherwise"), [("/", "24h"), ("/usage", "30d")])
def test_a_range_of_centuries_is_cut_to_years(page: Page, path: str, otherwise: str) -> None:
    sign_in(page, ADMIN_KEY, "/account")
    page.goto(f"{path}?start=0202-01-01&end=2026-11-22&tz=UTC")
    expect(page.get_by_text("Shown from 2023-11-21 on, because at most three years can be shown.")).to_be_visible()
    assert page.locator("g.bar").count() <= 3 * 366
    for end in ("0203-01-01", "99999-01-01", "+275760-09-13"):
        page.goto(f"{path}?start=0202-01-01&end={end}&tz=UTC")
        expect(page.get_by_label("Range")).to_have_value(otherwise)
