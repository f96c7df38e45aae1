"""The usage explorer's bars, tables and files are the API's figures, which are the sums of the ledger's events."""

from __future__ import annotations

import csv
import io
import json
import re
from collections import Counter
from collections.abc import Iterator
from datetime import datetime, time, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, parse_qsl, urlencode, urlsplit
from zoneinfo import ZoneInfo

import pytest
from playwright.sync_api import Browser, Locator, Page, Route, expect

from browser import Watch, sign_in, watched_page
from manylora_server import ADMIN_KEY, ManyloraServer
from usage_history import FIRST, NORTH, PLACE, SOUTH, ZONE, History

FIGURES = ("requests", "prompt_tokens", "cached_tokens", "completion_tokens")
CELLS = """rows => rows.map((row) =>
  Object.fromEntries([...row.cells].map((cell) => [cell.dataset.column, cell.textContent.trim()])))"""
BARS = """bars => bars.flatMap((bar) => [...bar.querySelectorAll("[data-series]")].map((part) =>
  [bar.dataset.start, part.dataset.series, Number(part.dataset.value)]))"""
STARTS = "bars => bars.map((bar) => bar.dataset.start)"
REFUSAL = {
    "message": "The database does not answer.",
    "code": "unavailable",
    "type": "server_error",
    "param": None,
}


@pytest.fixture(scope="module")
def signed_in(browser: Browser, server: ManyloraServer, history: History) -> Iterator[Page]:
    """A page of the admin."""
    with watched_page(browser, server.url) as (page, _):
        sign_in(page, ADMIN_KEY, "/usage")
        yield page


def show(page: Page, **choices: Any) -> None:
    """The explorer with these choices in its address, when all of it is there."""
    page.goto(f"/usage?{urlencode({**PLACE, **choices}, doseq=True)}")
    settle(page)


def settle(page: Page) -> None:
    page.get_by_text("Totals as of").wait_for()
    page.wait_for_load_state("networkidle")
    expect(page.locator("main [aria-busy=true]")).to_have_count(0)


def table(page: Page) -> list[dict[str, str]]:
    return list(
        page.get_by_role("table", name="Usage by group").locator("tbody tr").evaluate_all(CELLS)
    )


def total(page: Page) -> dict[str, str]:
    return dict(
        page.get_by_role("table", name="Usage by group").locator("tfoot tr").evaluate_all(CELLS)[0]
    )


def opener_of(page: Page, dimension: str) -> Locator:
    return page.get_by_role("group", name="Filters").get_by_role(
        "button", name=re.compile(f"^{dimension}")
    )


def figures(row: dict[str, Any]) -> list[str]:
    return [f"{row[name]:,}" for name in FIGURES]


def shown_figures(row: dict[str, str]) -> list[str]:
    return [row[name] for name in FIGURES]


def chosen(page: Page) -> dict[str, list[str]]:
    """What the address says."""
    return parse_qs(urlsplit(page.url).query)


def download(page: Page, button: str) -> tuple[str, bytes]:
    with page.expect_download() as saved:
        page.get_by_role("button", name=button, exact=True).click()
    return saved.value.suggested_filename, Path(saved.value.path()).read_bytes()


def test_the_table_is_the_answer_of_the_api_and_its_costs_add_up(
    signed_in: Page, server: ManyloraServer, history: History
) -> None:
    show(signed_in, group="adapter", subgroup="status", tenant=NORTH)
    answer = history.usage(server.admin, group_by="adapter,status", tenant=NORTH)
    names = [(row["adapter"] or "base model", row["status"]) for row in answer["data"]]
    expected = sorted(
        (*name, *figures(row)) for name, row in zip(names, answer["data"], strict=True)
    )
    rows = table(signed_in)
    assert sorted((row["adapter"], row["status"], *shown_figures(row)) for row in rows) == expected
    assert shown_figures(total(signed_in)) == figures(answer["totals"])
    tokens = [int(row["total_tokens"].replace(",", "")) for row in rows]
    assert tokens == sorted(tokens, reverse=True)
    costs = [Decimal(row["cost"]) for row in rows]
    assert sum(costs) == Decimal(total(signed_in)["cost"]) == Decimal(answer["totals"]["cost"])


@pytest.mark.parametrize(
    ("metric", "rank_by"),
    [
        ("total_tokens", "total_tokens"),
        ("requests", "requests"),
        ("cached_tokens", "prompt_tokens"),
    ],
)
def test_bars_are_the_top_groups_and_others(
    signed_in: Page, server: ManyloraServer, history: History, metric: str, rank_by: str
) -> None:
    show(signed_in, group="adapter", tenant=NORTH, top=5, metric=metric)
    question = {
        "bucket": "1d",
        "tz": PLACE["tz"],
        "group_by": "adapter",
        "top": 5,
        "rank_by": rank_by,
    }
    answer = history.usage(server.admin, tenant=NORTH, **question)

    def value(row: dict[str, Any]) -> int:
        return int(
            row["prompt_tokens"] + row["completion_tokens"]
            if metric == "total_tokens"
            else row[metric]
        )

    names = ["other" if row["other"] else json.dumps([row["adapter"]]) for row in answer["data"]]
    expected = Counter(
        {
            (row["start"][:19], name): value(row)
            for row, name in zip(answer["data"], names, strict=True)
        }
    )
    drawn = Counter(
        {
            (start[:19], key): part
            for start, key, part in signed_in.locator(".bar").evaluate_all(BARS)
        }
    )
    assert drawn == +expected
    assert sum(drawn.values()) == value(answer["totals"])
    starts = [
        datetime.fromisoformat(start) for start in signed_in.locator(".bar").evaluate_all(STARTS)
    ]
    days = [
        datetime.combine(FIRST + timedelta(days=day), time(), ZoneInfo(ZONE)) for day in range(10)
    ]
    assert starts == days, "days without usage have their place too"
    assert len({start for start, _ in drawn}) == 9
    expect(signed_in.locator(".legend li").last).to_contain_text(
        f"Other ({answer['groups'] - 5} more)"
    )


def test_hours_of_the_day_on_which_clocks_went_back_are_25(
    signed_in: Page, server: ManyloraServer, history: History
) -> None:
    show(signed_in, start="2025-11-02", end="2025-11-02", group="none")
    bars = signed_in.locator(".bar")
    expect(bars).to_have_count(25)
    shown = bars.evaluate_all(
        "all => all.map((bar) => [bar.dataset.start.slice(0, 19), Number(bar.dataset.sum)])"
    )
    day = {
        "start": "2025-11-02T04:00:00Z",
        "end": "2025-11-03T05:00:00Z",
        "bucket": "1h",
        "tz": PLACE["tz"],
    }
    answer = history.usage(server.admin, **day)
    told = {
        row["start"][:19]: row["prompt_tokens"] + row["completion_tokens"] for row in answer["data"]
    }
    assert {start: tokens for start, tokens in shown if tokens} == told
    labels = bars.evaluate_all("all => all.map((bar) => bar.dataset.bucket)")
    assert labels.count("01:00") == 2


def test_filters_are_chosen_by_keyboard_and_only_what_was_used_is_offered(
    signed_in: Page, server: ManyloraServer, history: History
) -> None:
    show(signed_in, group="status", tenant=NORTH)
    keyboard = signed_in.keyboard
    opener = opener_of(signed_in, "Adapter")
    opener.focus()
    keyboard.press("Enter")
    options = signed_in.locator(".choice")
    names = {
        row["adapter"] or "~base"
        for row in history.usage(server.admin, group_by="adapter", tenant=NORTH)["data"]
    }
    expect(options).to_have_count(len(names))
    assert set(options.evaluate_all("all => all.map((one) => one.dataset.value)")) == names
    keyboard.type("supp")
    expect(options).to_have_count(1)
    keyboard.press("Enter")
    expect(options.get_by_role("checkbox")).to_be_checked()
    keyboard.press("Control+a")
    keyboard.type("base")
    keyboard.press("ArrowDown")
    keyboard.press("Space")
    keyboard.press("Escape")
    expect(opener).to_be_focused()
    expect(signed_in.locator(".choice")).to_have_count(0)
    settle(signed_in)
    assert chosen(signed_in)["adapter"] == ["support", "~base"]
    expect(opener).to_contain_text("2 chosen")
    filtered = history.usage(server.admin, group_by="status", tenant=NORTH, adapter=["support", ""])
    assert shown_figures(total(signed_in)) == figures(filtered["totals"])
    opener_of(signed_in, "Status").click()
    status = {row["status"] for row in filtered["data"]}
    expect(options).to_have_count(len(status))
    signed_in.get_by_role("checkbox", name=re.compile("^aborted")).check()
    keyboard.press("Escape")
    settle(signed_in)
    aborted = history.usage(server.admin, tenant=NORTH, adapter=["support", ""], status="aborted")
    assert shown_figures(total(signed_in)) == figures(aborted["totals"])
    signed_in.get_by_role("button", name="Clear all").click()
    settle(signed_in)
    assert shown_figures(total(signed_in)) == figures(history.usage(server.admin)["totals"])
    assert "adapter" not in chosen(signed_in)


def test_choices_are_in_the_address_and_come_back(signed_in: Page, server: ManyloraServer) -> None:
    show(signed_in)
    signed_in.get_by_label("Show").select_option("completion_tokens")
    signed_in.get_by_label("Group by").select_option("version")
    signed_in.get_by_label("Then by").select_option("key")
    signed_in.get_by_role("button", name="Top 12").click()
    signed_in.get_by_role("button", name="Each day").click()
    settle(signed_in)
    choices = {
        "metric": "completion_tokens",
        "group": "version",
        "subgroup": "key",
        "top": "12",
        "rows": "bucket",
    }
    assert {name: ",".join(chosen(signed_in)[name]) for name in choices} == choices

    def view() -> tuple[object, ...]:
        settle(signed_in)
        heads = signed_in.get_by_role("columnheader").all_inner_texts()
        return (
            heads,
            table(signed_in),
            total(signed_in),
            signed_in.locator(".bar").evaluate_all(BARS),
        )

    before = view()
    assert before[0][:5] == ["Day", "Tenant", "Adapter", "Version", "Key"]  # type: ignore[index]
    expect(
        signed_in.get_by_role("heading", name="Completion tokens by tenant, version and key")
    ).to_be_visible()
    signed_in.reload()
    assert view() == before
    signed_in.get_by_role("button", name="Whole range").click()
    settle(signed_in)
    signed_in.go_back()
    assert view() == before


def test_a_link_tells_the_zone_too(signed_in: Page) -> None:
    signed_in.context.grant_permissions(["clipboard-read", "clipboard-write"])
    show(signed_in, tz="", group="status")
    signed_in.get_by_role("button", name="Copy link").click()
    expect(signed_in.get_by_role("button", name="Copied")).to_be_visible()
    link = signed_in.evaluate("navigator.clipboard.readText()")
    assert dict(parse_qsl(urlsplit(link).query)) == {**PLACE, "tz": "UTC", "group": "status"}


def test_the_file_is_the_table_page_by_page(
    signed_in: Page, server: ManyloraServer, history: History
) -> None:
    pages: list[str] = []

    def small(route: Route) -> None:
        pages.append(route.request.url)
        route.fallback(url=route.request.url.replace("limit=10000", "limit=7"))

    show(signed_in, group="adapter", subgroup="status", rows="bucket", tenant=NORTH)
    signed_in.route("**/v1/usage?*format=csv*", small)
    name, content = download(signed_in, "CSV")
    signed_in.unroute("**/v1/usage?*format=csv*")
    question = {"bucket": "1d", "tz": PLACE["tz"], "group_by": "adapter,status", "tenant": NORTH}
    whole = server.admin.get(
        "/v1/usage", params={**history.span, **question, "limit": 10_000, "format": "csv"}
    )
    assert name == f"manylora-usage_{PLACE['start']}_{PLACE['end']}.csv"
    assert content == whole.content
    rows = list(csv.DictReader(io.StringIO(content.decode(), newline="")))
    assert len(pages) == -(-len(rows) // 7) > 3
    sums = {figure: sum(int(row[figure]) for row in rows) for figure in FIGURES}
    assert figures(sums) == shown_figures(total(signed_in))
    assert sum(Decimal(row["cost"]) for row in rows) == Decimal(total(signed_in)["cost"])


def test_json_and_events_are_files_too(
    signed_in: Page, server: ManyloraServer, history: History
) -> None:
    show(signed_in, group="adapter", status="stop", tenant=SOUTH)
    name, content = download(signed_in, "JSON")
    assert name.endswith(".json")
    assert json.loads(content) == history.usage(
        server.admin, group_by="adapter", status="stop", tenant=SOUTH
    )
    name, content = download(signed_in, "Events as CSV")
    assert name == f"manylora-usage-events_{PLACE['start']}_{PLACE['end']}.csv"
    facts = history.events(server.admin, status="stop", tenant=SOUTH)
    rows = csv.DictReader(io.StringIO(content.decode(), newline=""))
    shown = [(row["id"], row["prompt_tokens"]) for row in rows]
    assert shown == [(fact["id"], str(fact["prompt_tokens"])) for fact in facts]


def test_keys_have_names_for_admins_and_for_their_own_tenant(
    signed_in: Page, page: Page, server: ManyloraServer, history: History
) -> None:
    show(signed_in, group="key")
    keys = [
        server.admin.get(f"/v1/tenants/{tenant}/keys").json()["data"] for tenant in (NORTH, SOUTH)
    ]
    labels = {f"{key['name']} ({key['prefix']}…)" for key in keys[0] + keys[1]}
    expect(signed_in.get_by_role("table", name="Usage by group")).to_contain_text(f"{NORTH} batch")
    assert {row["key"] for row in table(signed_in)} <= labels
    opener_of(signed_in, "Key").click()
    expect(signed_in.locator(".choice").filter(has_text=f"{NORTH} batch")).to_have_count(1)
    signed_in.keyboard.press("Escape")
    sign_in(page, server.tenants[NORTH], f"/usage?{urlencode({**PLACE, 'group': 'key'})}")
    settle(page)
    own = server.tenant(NORTH).get("/v1/me").json()["key"]
    other = next(key_id for key_id in history.keys[NORTH] if key_id != own["id"])
    assert {row["key"] for row in table(page)} == {f"{own['name']} ({own['prefix']}…)", other}


def test_a_tenant_sees_itself_only(page: Page, server: ManyloraServer, history: History) -> None:
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    total_requests = history.usage(server.tenant(SOUTH))["totals"]["requests"]
    sign_in(page, server.tenants[SOUTH], f"/?{urlencode(PLACE)}")
    expect(page.locator(f'[data-stat=Requests] [data-exact="{total_requests}"]')).to_be_visible()
    page.wait_for_load_state("networkidle")
    expect(page.get_by_role("main")).not_to_contain_text(NORTH)
    expect(page.get_by_role("heading", name="Device pages")).to_have_count(0)
    assert not any("/v1/engine" in url or "/v1/tenants" in url for url in asked)
    page.goto(f"/usage?{urlencode({**PLACE, 'group': 'tenant'})}")
    settle(page)
    groups = page.get_by_label("Group by").get_by_role("option").all_inner_texts()
    assert groups == ["Adapter", "Version", "Key", "Status", "Nothing"]
    expect(opener_of(page, "Tenant")).to_have_count(0)
    expect(opener_of(page, "Adapter")).to_have_count(1)
    assert shown_figures(total(page)) == figures(history.usage(server.tenant(SOUTH))["totals"])
    expect(page.get_by_role("main")).not_to_contain_text(NORTH)


def test_a_refusal_is_told_and_nothing_old_stays(
    watched: tuple[Page, Watch], server: ManyloraServer, history: History
) -> None:
    page, watch = watched
    watch.allowed = {503}
    sign_in(page, server.tenants[NORTH], f"/usage?{urlencode(PLACE)}")
    settle(page)
    page.route("**/v1/usage?**", lambda route: route.fulfill(status=503, json={"error": REFUSAL}))
    page.get_by_label("Group by").select_option("status")
    expect(page.get_by_role("alert")).to_contain_text("The database does not answer.")
    expect(page.get_by_role("table")).to_have_count(0)
    page.unroute("**/v1/usage?**")
    page.get_by_role("button", name="Try again").click()
    settle(page)
    expect(page.get_by_role("alert")).to_have_count(0)
    page.route("**/v1/usage?**", lambda route: route.fulfill(status=503, json={"error": REFUSAL}))
    page.get_by_role("button", name="CSV", exact=True).click()
    expect(page.get_by_role("alert")).to_contain_text("The database does not answer.")
