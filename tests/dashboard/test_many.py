"""Three months of 20 tenants with 500 adapters: what a page asks for and draws does not grow with them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime

import pytest
from playwright.sync_api import Browser, expect

from browser import sign_in, wait_until_shown, watched_page
from many_usage import ADAPTERS, DAYS, PATHS, fill
from manylora_server import ADMIN_KEY, ManyloraServer, manylora_server

EVENTS = 4_000
MOST_REQUESTS = 11
"""Requests of a page: the overview asks six times, and five for the range before."""
MOST_BYTES = 650_000
"""Bytes of its answers: five hundred adapters with their reports."""
MOST_ROWS = 101
ASKED = """() => {
    const asked = performance.getEntriesByType("resource").filter((each) => each.name.includes("/v1/"));
    return [asked.length, asked.reduce((sum, each) => sum + each.decodedBodySize, 0)];
}"""


@pytest.fixture(scope="module")
def busy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ManyloraServer]:
    folder = tmp_path_factory.mktemp("many")
    with ThreadPoolExecutor(1) as own_loop:  # the browser's driver holds this thread's
        own_loop.submit(
            asyncio.run, fill(folder / "data", ADMIN_KEY, datetime.now(UTC), EVENTS)
        ).result()
    with manylora_server(
        folder, "--served-model-name", "manylora-demo", MANYLORA_MEMORY__POISON="false"
    ) as running:
        yield running


def test_every_page_asks_for_little_and_draws_few_rows(
    busy: ManyloraServer, browser: Browser
) -> None:
    start = int(time.time()) - (DAYS + 1) * 86_400  # the usage was written a while ago
    totals = busy.admin.get("/v1/usage", params={"start": start}).json()["totals"]
    assert totals["requests"] == EVENTS
    too_much = {}
    with watched_page(browser, busy.url) as (page, _):
        page.clock.set_fixed_time(datetime.now(UTC))  # a new minute would be asked for again
        sign_in(page, ADMIN_KEY, "/account")
        for path in PATHS:
            page.goto(path, wait_until="commit")
            wait_until_shown(page)
            found = (*page.evaluate(ASKED), page.locator("tr").count())
            if any(
                number > most
                for number, most in zip(found, (MOST_REQUESTS, MOST_BYTES, MOST_ROWS), strict=True)
            ):
                too_much[path] = found
    assert too_much == {}


def test_of_500_adapters_50_are_drawn_and_all_searched(
    busy: ManyloraServer, browser: Browser
) -> None:
    with watched_page(browser, busy.url) as (page, _):
        sign_in(page, ADMIN_KEY, "/adapters?range=90d")
        rows = page.locator("tr[data-key]")
        expect(rows).to_have_count(50)
        expect(page.get_by_text(f"50 of {ADAPTERS} shown")).to_be_visible()
        page.get_by_role("searchbox").fill("adapter-19-24")
        expect(page.get_by_role("link", name="adapter-19-24")).to_be_visible()
        expect(rows).to_have_count(1)
