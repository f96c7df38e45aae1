"""The overview shows the figures of the API for the one who is signed in, and what to do where there are none."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlencode

import pytest
from playwright.sync_api import Browser, Locator, Page, expect

from browser import sign_in, watched_page
from manylora_server import ADMIN_KEY, ManyloraServer
from usage_history import NORTH, PLACE, History

MINUS = "\N{MINUS SIGN}"
THERE = f"/?{urlencode(PLACE)}"


@pytest.fixture(scope="module")
def signed_in(browser: Browser, server: ManyloraServer, history: History) -> Iterator[Page]:
    """The admin's view of both tenants' usage."""
    with watched_page(browser, server.url) as (page, _):
        sign_in(page, ADMIN_KEY, THERE)
        wait_for_figures(page)
        yield page


def wait_for_figures(page: Page) -> None:
    page.locator("[data-stat=Requests] [data-exact]").wait_for()
    page.wait_for_load_state("networkidle")


def stat(page: Page, label: str) -> Locator:
    return page.locator(f'[data-stat="{label}"]')


def exact(page: Page, label: str) -> float:
    return float(stat(page, label).locator("[data-exact]").get_attribute("data-exact") or "nan")


def percent(share: float) -> str:
    return f"{share * 100:.{2 if share < 0.00995 else 1}f}%"


def change(now: float, before: float) -> str:
    """What a tile says, by its own arithmetic."""
    share = (now - before) / before
    return f"{'+' if share > 0 else MINUS}{abs(share) * 100:.{1 if abs(share) < 0.1 else 0}f}%"


def errors(answer: dict[str, Any]) -> int:
    return int(
        sum(row["requests"] for row in answer["data"] if row["status"] in ("error", "interrupted"))
    )


def test_tiles_show_the_totals_of_the_api_and_their_change(
    page: Page, server: ManyloraServer, history: History
) -> None:
    client = server.tenant(NORTH)
    sign_in(page, server.tenants[NORTH], THERE)
    wait_for_figures(page)
    now, then = (
        history.usage(client, **span, group_by="status") for span in (history.span, history.before)
    )
    totals, before = now["totals"], then["totals"]
    assert totals["requests"] > 100
    for label in ("Requests", "Prompt tokens", "Cached tokens", "Completion tokens"):
        name = label.lower().replace(" ", "_")
        assert exact(page, label) == totals[name]
        tone = stat(page, label).locator(".stat-change")
        expect(tone).to_contain_text(change(totals[name], before[name]))
        expect(tone).to_have_class(re.compile("good" if totals[name] > before[name] else "bad"))
    failed = errors(now) / totals["requests"]
    aborted = sum(row["requests"] for row in now["data"] if row["status"] == "aborted")
    expect(stat(page, "Errors")).to_contain_text(
        f"{errors(now)} of {totals['requests']}; {aborted} aborted by clients"
    )
    expect(stat(page, "Errors").locator(".stat-value")).to_have_text(percent(failed))
    worse = failed > errors(then) / before["requests"]
    expect(stat(page, "Errors").locator(".stat-change")).to_have_class(
        re.compile("bad" if worse else "good")
    )
    in_use = len({event["adapter"] for event in history.events(client) if event["adapter"]})
    expect(stat(page, "Adapters in use").locator(".stat-value")).to_have_text(str(in_use))
    share = percent(totals["cached_tokens"] / totals["prompt_tokens"])
    expect(stat(page, "Cached tokens")).to_contain_text(f"{share} of the prompt tokens")
    expect(stat(page, "Cost").locator(".stat-value")).to_have_attribute(
        "title", f"{totals['cost']} EUR"
    )
    expect(stat(page, "Cost").locator(".stat-change")).not_to_have_class(re.compile("good|bad"))


def test_times_to_the_first_token_are_those_of_the_api(
    signed_in: Page, server: ManyloraServer, history: History
) -> None:
    answer = server.admin.get("/v1/usage/latency", params={**history.span, "bucket": "1d"}).json()
    for name in ("p50", "p95"):
        assert exact(signed_in, f"Time to first token, {name}") == answer["totals"]["ttft_s"][name]
        circles = signed_in.locator(f"[data-series={name}] circle")
        drawn = circles.evaluate_all("all => all.map((one) => Number(one.dataset.value))")
        assert drawn == [row["ttft_s"][name] for row in answer["data"] if row["ttft_s"]]


def test_arrow_keys_tell_what_a_bar_is_made_of(signed_in: Page) -> None:
    chart = signed_in.get_by_role("group", name="Tokens by adapter, by arrow keys")
    signed_in.mouse.move(0, 0)
    chart.focus()
    signed_in.keyboard.press("ArrowRight")
    signed_in.keyboard.press("ArrowRight")
    bar = chart.locator(".bar").nth(1)
    total = f"{int(bar.get_attribute('data-sum') or 0):,}"
    expect(chart.get_by_role("status")).to_contain_text("Tue, 28 Oct 2025")
    expect(chart.get_by_role("status").get_by_role("row").last).to_have_text(f"Total{total}")
    signed_in.keyboard.press("Escape")
    expect(chart.get_by_role("status")).to_have_count(0)


def test_top_tables_and_their_links(
    signed_in: Page, server: ManyloraServer, history: History
) -> None:
    def figures(name: str) -> list[list[int]]:
        rows = signed_in.get_by_role("table", name=name).locator("tbody tr")
        return [
            row.locator("[data-exact]").evaluate_all(
                "all => all.map((one) => Number(one.dataset.exact))"
            )
            for row in rows.all()
        ]

    def told(**question: Any) -> list[list[int]]:
        rows = history.usage(server.admin, top=10, **question)["data"]
        return [
            [row[name] for name in ("requests", "prompt_tokens", "completion_tokens")]
            for row in rows
        ]

    assert figures("Top tenants") == told(group_by="tenant")
    assert figures("Top adapters") == told(group_by="tenant,adapter")
    top = history.usage(server.admin, group_by="tenant,adapter", top=10)["data"]
    rows = signed_in.get_by_role("table", name="Top adapters").locator("tbody tr")
    first = next(row for row in top if row["adapter"])
    link = rows.filter(has_text=first["tenant"]).get_by_role(
        "link", name=first["adapter"], exact=True
    )
    kept = {**PLACE, "tenant": first["tenant"]}
    assert link.get_attribute("href") == f"/adapters/{first['adapter']}?{urlencode(kept)}"
    signed_in.get_by_role("combobox", name=re.compile("^Tenant")).select_option(first["tenant"])
    expect(signed_in.get_by_role("table", name="Top tenants")).to_have_count(0)
    signed_in.go_back()
    expect(signed_in.get_by_role("table", name="Top tenants")).to_be_visible()


def test_device_pages_are_all_pages_of_the_engine(signed_in: Page, server: ManyloraServer) -> None:
    pages = signed_in.get_by_role("region", name="Device pages")
    parts = "all => all.map((one) => [one.dataset.series, Number(one.dataset.total)])"
    shown = dict(pages.locator(".legend li").evaluate_all(parts))
    engine = server.engine()
    assert sum(shown.values()) == engine["ready"]["memory"]["num_pages"]
    assert shown["adapter"] == engine["pages"]["adapter"]


def test_a_request_shows_itself_soon(page: Page, server: ManyloraServer) -> None:
    page.clock.install()
    sign_in(page, server.tenants["harbour"])
    wait_for_figures(page)
    before = exact(page, "Requests")
    server.ask("harbour", "pirate", "Where is my order?")
    page.clock.fast_forward("00:16")
    expect(stat(page, "Requests").locator(f'[data-exact="{before + 1:.0f}"]')).to_be_visible()
