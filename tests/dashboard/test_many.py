"""Three months of 20 tenants with 500 adapters: what a page asks for and draws does not grow with them."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from playwright.sync_api import Browser, expect

from browser import sign_in, wait_until_shown, watched_page
from registry_samples import facts, publish_version, usage_event
from usage_history import insert_usage
from weft.registry.registry import Registry
from weft_server import ADMIN_KEY, WeftServer, weft_server

TENANTS, ADAPTERS, EVENTS, DAYS = 20, 500, 10_000, 90
MOST_REQUESTS, MOST_BYTES, MOST_ROWS = 10, 600_000, 101
PATHS = (
    "/?range=90d",
    "/usage?range=90d&group=adapter",
    "/usage?range=90d&group=tenant&tz=America/New_York",
    "/adapters?range=90d",
    "/adapters/adapter-03-07?tenant=tenant-03&range=90d",
    "/live",
    "/playground",
    "/tenants?range=90d",
    "/tenants/tenant-03?range=90d",
    "/audit",
)
"""Pages that show all of it, or much."""
ASKED = """() => {
    const asked = performance.getEntriesByType("resource").filter((each) => each.name.includes("/v1/"));
    return [asked.length, asked.reduce((sum, each) => sum + each.decodedBodySize, 0)];
}"""


async def fill(data_dir: Path) -> None:
    """Make the folder's database, with events that ended in the last three months."""
    registry = await Registry.open(None, data_dir, ADMIN_KEY)
    rng, now = random.Random(20), datetime.now(UTC)
    owned: list[dict[str, str]] = []
    try:
        for tenant in range(TENANTS):
            owner = await registry.tenants.create_tenant(f"tenant-{tenant:02}")
            key, _ = await registry.keys.create_key(owner.name, "app")
            for number in range(ADAPTERS // TENANTS):
                name = f"adapter-{tenant:02}-{number:02}"
                adapter, _, _ = await publish_version(registry, owner.id, name, facts(name))
                ids = {"tenant_id": owner.id, "key_id": key.id, "adapter_id": adapter.id}
                owned.append({"tenant": owner.name, "adapter": name, **ids})
    finally:
        await registry.close()
    events = [
        usage_event(
            f"use_{number:08}",
            at=now - timedelta(seconds=rng.random() * (DAYS * 86_400 - 60)),
            status=rng.choice(("stop", "stop", "stop", "length", "aborted", "error")),
            prompt_tokens=rng.randrange(20, 800),
            **rng.choice(owned),
        )
        for number in range(EVENTS)
    ]
    await insert_usage(data_dir, events)


@pytest.fixture(scope="module")
def busy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WeftServer]:
    folder = tmp_path_factory.mktemp("many")
    with ThreadPoolExecutor(1) as own_loop:  # the browser's driver holds this thread's
        own_loop.submit(asyncio.run, fill(folder / "data")).result()
    with weft_server(folder, "--served-model-name", "weft-demo", WEFT_MEMORY__POISON="false") as running:
        yield running


def test_every_page_asks_for_little_and_draws_few_rows(busy: WeftServer, browser: Browser) -> None:
    totals = busy.admin.get("/v1/usage", params={"start": int(time.time()) - DAYS * 86_400}).json()["totals"]
    assert totals["requests"] == EVENTS
    too_much = {}
    with watched_page(browser, busy.url) as (page, _):
        sign_in(page, ADMIN_KEY, "/account")
        for path in PATHS:
            page.goto(path, wait_until="commit")
            wait_until_shown(page)
            found = (*page.evaluate(ASKED), page.locator("tr").count())
            if any(number > most for number, most in zip(found, (MOST_REQUESTS, MOST_BYTES, MOST_ROWS), strict=True)):
                too_much[path] = found
    assert too_much == {}


def test_of_500_adapters_50_are_drawn_and_all_searched(busy: WeftServer, browser: Browser) -> None:
    with watched_page(browser, busy.url) as (page, _):
        sign_in(page, ADMIN_KEY, "/adapters?range=90d")
        rows = page.locator("tr[data-key]")
        expect(rows).to_have_count(50)
        expect(page.get_by_text(f"50 of {ADAPTERS} shown")).to_be_visible()
        page.get_by_role("searchbox").fill("adapter-19-24")
        expect(page.get_by_role("link", name="adapter-19-24")).to_be_visible()
        expect(rows).to_have_count(1)
        page.get_by_role("searchbox").fill("")
        page.get_by_role("button", name="Show more").click()
        expect(rows).to_have_count(250)
