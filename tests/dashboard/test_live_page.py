"""What the live page shows is what GET /v1/engine tells, while requests run and when the connection breaks."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, Route, expect

from browser import DESKTOP, PHONE, Watch, grave_findings, sign_in, sign_out_elsewhere, watched_page
from manylora.engine.fairness.service import TenantLoad
from manylora_server import ADMIN_KEY, DEMO_ADAPTERS, ManyloraServer, engines, manylora_server

UNKNOWN = "\u2013"
OWNERS = {"haiku": "atelier", "shout": "harbour", "pirate": "harbour"}
LOOK = """() => {
  const of = (selector, key, value) => [...document.querySelectorAll(selector)]
    .map(({dataset}) => [dataset[key], Number(dataset[value])])
    .reduce((sums, [name, number]) => ({...sums, [name]: (sums[name] ?? 0) + number}), {});
  return {
    cells: of(".cells path.use", "kind", "cells"),
    legend: of(".map-legend [data-entry]", "kind", "pages"),
    running: document.querySelector("[data-stat=Running] .stat-value").textContent,
  };
}"""
"""Pages by kind in the map and in its legend, looked at in one moment."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ManyloraServer]:
    """One whose pool is small enough for a cell to be a page."""
    options = ("--served-model-name", "manylora-demo", "--dtype", "float32", "--memory-gib", "0.1")
    with manylora_server(tmp_path_factory.mktemp("live"), *options) as running:
        for name, owner in OWNERS.items():
            assert (
                running.upload(running.tenant(owner), name, DEMO_ADAPTERS / name).status_code == 201
            )
        for owner, model in (
            ("atelier", "haiku"),
            ("harbour", "shout"),
            ("atelier", "manylora-demo"),
        ):
            running.ask(owner, model, "Where is my order?")
        yield running


@contextmanager
def long_request(server: ManyloraServer, owner: str, model: str) -> Iterator[None]:
    """Somebody asks for as much as the context takes."""
    body = {"model": model, "prompt": "Once", "max_tokens": 900, "ignore_eos": True}
    with server.client(server.tenants[owner]) as client:
        statuses: list[int] = []
        asking = threading.Thread(
            target=lambda: statuses.append(client.post("/v1/completions", json=body).status_code)
        )
        asking.start()
        try:
            yield
        finally:
            asking.join()
        assert statuses == [200]


def tenant_cells(page: Page, row: str) -> list[str]:
    """A tenant's row: name, weight, share, in step, paused, waiting, why, predicted wait, refusals."""
    selector = row if row == "tfoot" else f'tr[data-key="{row}"]'
    cells = page.locator(f'[aria-label="Tenants in the engine"] {selector} td')
    return [text.strip().replace("\u00a0", " ") for text in cells.all_inner_texts()]


def show_snapshots(page: Page, *snapshots: dict[str, Any]) -> None:
    """The live page after these snapshots and no others."""
    body = "retry: 600000\n" + "".join(
        f"data: {json.dumps(snapshot)}\n\n" for snapshot in snapshots
    )
    page.route(
        "**/v1/engine/events",
        lambda route: route.fulfill(body=body, content_type="text/event-stream"),
    )
    show_live(page)


def load(**fields: Any) -> dict[str, Any]:
    return asdict(TenantLoad(**fields))


def crowded(engine: dict[str, Any]) -> dict[str, Any]:
    """A snapshot with 1,000 tenants, of whom two were served."""
    tenants = {f"customer-{index:03}": load(waiting=3, reasons={"NEW": 3}) for index in range(996)}
    tenants |= {
        "flood": load(
            weight=1,
            running=60,
            paused=52,
            waiting=200,
            reasons={"NEW": 150, "NO_PAGES": 50},
            rate=250.0,
        ),
        "quiet": load(weight=3, running=8, waiting=1, reasons={"LOADING": 1}, rate=750.0),
        "(admin)": load(waiting=2, reasons={"FORK": 1, "NO_ROOM": 1}),
        "ten_gone": load(waiting=1, reasons={"SOMETHING": 1}),
    }
    admission = {
        "flood": {"wait_s": 12.5, "refused": {"limit.queue": 4000, "server.overloaded": 2}},
        "quiet": {"wait_s": 0.0, "refused": {}},
        "customer-000": {"wait_s": 75.0, "refused": {"server.overloaded": 1, "other.code": 1}},
        "customer-001": {"wait_s": 3.0, "refused": {"engine_overloaded": 3, "deadline.queue": 2}},
    }
    reasons = {
        "NEW": 2988 + 150,
        "NO_PAGES": 50,
        "LOADING": 1,
        "FORK": 1,
        "NO_ROOM": 1,
        "SOMETHING": 1,
    }
    sums = {"running": 68, "base_running": 5, "waiting": 2988 + 204, "waiting_reasons": reasons}
    return {**engine, **sums, "tenants": tenants, "admission": admission}


def stat(page: Page, label: str) -> str:
    return page.locator(f'[data-stat="{label}"] .stat-value').inner_text()


def milliseconds(value: float) -> str:
    """A time below a second as the page shows it."""
    return f"{value * 1000:.1f} ms" if value < 0.0995 else f"{round(value * 1000)} ms"


def show_live(page: Page, path: str = "/live") -> None:
    sign_in(page, ADMIN_KEY, path)
    expect(page.locator(".cells svg")).to_be_visible()


def test_all_figures_are_those_of_the_snapshot(page: Page, server: ManyloraServer) -> None:
    engine = server.engine()
    show_live(page)
    times = sorted(step["seconds"] for step in engine["last_steps"])
    tokens = sum(step["tokens"] for step in engine["last_steps"])
    assert stat(page, "Running") == stat(page, "Waiting") == "0"
    assert stat(page, "Tokens/s") == f"{round(tokens / sum(times)):,}"
    assert stat(page, "Step time") == milliseconds(times[-(-len(times) // 2) - 1])
    assert stat(page, "On the device") == "2"
    assert (
        f"of {engine['slots']:,} slots" in page.locator('[data-stat="On the device"]').inner_text()
    )
    assert page.evaluate(LOOK)["legend"] == engine["pages"]
    total = page.locator(".entry-total .entry-pages")
    assert total.get_attribute("data-total") == str(engine["ready"]["memory"]["num_pages"])
    rows = page.get_by_role("region", name="Adapters in memory").locator("tbody tr")
    shown = {
        row.get_attribute("data-key"): row.locator("td").all_inner_texts() for row in rows.all()
    }
    for one in engine["residents"]:
        cells = shown.pop(one["digest"])
        assert cells[0] == one["adapters"][0]
        figures = [
            one[key] for key in ("pages", "prefix_pages", "running", "holds", "uses", "loads")
        ]
        assert cells[1:8] == [one["tier"], *map(str, figures)]
        assert cells[8] == milliseconds(one["load_p95_s"])
    assert shown == {}
    assert engine["tenants"] == {}
    expect(page.get_by_role("main")).to_contain_text("No tenant has a request in the engine.")
    expect(page.locator('[data-load="stored>device:ok"]')).to_contain_text("stored → device: 2")
    expect(page.locator('[data-fact="Steps"]')).to_have_text(f"{engine['num_steps']:,}")
    series = page.locator(".chart path[data-series]").all()
    in_steps = {
        one.get_attribute("data-series"): int(one.get_attribute("data-total") or 0)
        for one in series
    }
    columns = ["base", *(one["digest"] for one in engine["batches"]["adapters"]), "others"]
    sums = [sum(row[at] for row in engine["batches"]["steps"]) for at in range(1, len(columns) + 1)]
    assert in_steps == {name: number for name, number in zip(columns, sums, strict=True) if number}
    idle = page.locator('[data-notice="idle"]')
    expect(idle).to_contain_text("The engine is idle.")
    expect(idle).to_contain_text("manylora demo")
    expect(idle.get_by_role("link", name="Playground")).to_have_attribute("href", "/playground")


def test_tenants_are_told_who_is_served_who_waits_and_why(
    page: Page, server: ManyloraServer
) -> None:
    show_snapshots(page, crowded(server.engine()))
    assert page.locator('[data-stat="Running"]').inner_text().split("\n")[1:] == [
        "68",
        "52 paused, 5 of the base",
    ]
    waiting = page.locator('[data-stat="Waiting"]').inner_text().replace("\u00a0", " ")
    assert waiting.split("\n")[1:] == ["3,192", "3,138 in line, 50 no pages, 4 others"]
    rows = page.locator('[aria-label="Tenants in the engine"] tbody tr')
    assert [row.get_attribute("data-key") for row in rows.all()[:3]] == [
        "quiet",
        "flood",
        "customer-000",
    ]
    assert rows.count() == 10
    assert tenant_cells(page, "quiet") == [
        "quiet",
        "3 0.30%",
        "75.0%",
        "8",
        "0",
        "1",
        "1 loading",
        "none",
        "none",
    ]
    in_line, refused = "150 in line, 50 no pages", "4,000 over share, 2 overload"
    assert tenant_cells(page, "flood") == [
        "flood",
        "1 0.10%",
        "25.0%",
        "8",
        "52",
        "200",
        in_line,
        "12.50 s",
        refused,
    ]
    assert tenant_cells(page, "customer-000")[5:] == [
        "3",
        "3 in line",
        "1 min 15 s",
        "1 overload, 1 other.code",
    ]
    assert tenant_cells(page, "customer-001")[8] == "3 queue full, 2 too late"
    assert tenant_cells(page, "customer-002")[7:] == [UNKNOWN, "none"]
    in_line = "2,964 in line, 1 shared prompt, 1 no room, 1 SOMETHING"
    many = ["990 others", "990 98.8%", "0.0%", "0", "0", "2,967", in_line, UNKNOWN, "none"]
    assert tenant_cells(page, "tfoot") == many
    page.get_by_role("button", name="Show more").click()
    expect(rows).to_have_count(210)
    table = page.get_by_role("region", name="Tenants in the engine")
    for column, first in {
        "Refused": "flood",
        "Predicted wait": "customer-000",
        "Tenant": "(admin)",
    }.items():
        table.get_by_role("button", name=column, exact=True).click()
        assert rows.first.get_attribute("data-key") == first, column
    assert tenant_cells(page, "(admin)")[0] == "admin"
    assert table.locator('tr[data-key="(admin)"] a').count() == 0
    assert (
        table.locator('tr[data-key="customer-000"] a').get_attribute("href")
        == "/tenants/customer-000"
    )


def test_a_tenant_that_ended_stays_for_a_while_and_one_that_was_refused_is_there(
    page: Page, server: ManyloraServer
) -> None:
    engine = server.engine()
    page.clock.install()
    refused = {
        "rival": {"wait_s": 2.0, "refused": {"limit.queue": 1}},
        "calm": {"wait_s": 0.0, "refused": {}},
    }
    busy = {**engine, "tenants": {"flood": load(running=1, rate=9.0)}, "running": 1}
    show_snapshots(page, busy, {**engine, "admission": refused})
    assert tenant_cells(page, "flood") == [
        "flood",
        UNKNOWN,
        UNKNOWN,
        "0",
        "0",
        "0",
        "",
        UNKNOWN,
        "none",
    ]
    assert tenant_cells(page, "rival") == [
        "rival",
        UNKNOWN,
        UNKNOWN,
        "0",
        "0",
        "0",
        "",
        "2.00 s",
        "1 over share",
    ]
    expect(page.locator('tr[data-key="calm"]')).to_have_count(0)
    page.clock.run_for(10_500)
    expect(page.locator('tr[data-key="flood"]')).to_have_count(0)
    expect(page.locator('tr[data-key="rival"]')).to_have_count(1)


def test_the_map_shows_what_runs_as_it_runs(page: Page, server: ManyloraServer) -> None:
    show_live(page)
    pirate = server.tenant("harbour").get("/v1/adapters/pirate").json()
    weights = page.locator(f'.cells path[data-kind="adapter"][data-adapter="{pirate["digest"]}"]')
    assert weights.count() == 0
    with (
        long_request(server, "harbour", "pirate"),
        long_request(server, "atelier", "manylora-demo"),
    ):
        expect(page.locator('[data-stat="Running"] .stat-value')).to_have_text("2")
        expect(weights).to_have_attribute("data-cells", str(pirate["pages"]))
        expect(page.locator('.map-legend [data-kind="kv"]')).not_to_have_attribute(
            "data-pages", "0"
        )
        look = page.evaluate(LOOK)
        assert look["running"] == "2"
        assert {kind: look["cells"].get(kind, 0) for kind in look["legend"]} == look["legend"]
        assert sum(look["legend"].values()) == server.engine()["ready"]["memory"]["num_pages"]
        assert look["cells"]["kv"] > 0
        assert (
            tenant_cells(page, "harbour")[3:6]
            == tenant_cells(page, "atelier")[3:6]
            == ["1", "0", "0"]
        )
    expect(page.locator('[data-stat="Running"] .stat-value')).to_have_text("0")
    expect(page.locator('.map-legend [data-kind="kv"]')).to_have_attribute("data-pages", "0")
    assert page.evaluate(LOOK)["legend"] == server.engine()["pages"]


def test_a_map_of_thousands_of_pages_is_a_few_shapes(page: Page, server: ManyloraServer) -> None:
    show_live(page, "/live?map=whole")
    cells = int(page.locator(".cells svg").get_attribute("data-cells") or 0)
    assert cells == server.engine()["ready"]["memory"]["num_pages"] > 3000
    assert page.locator(".cells svg *").count() < 60
    assert page.locator(".cells path.use").count() == len(server.engine()["page_map"]["uses"])


def test_an_entry_of_the_legend_lights_its_cells_and_stays_chosen(
    page: Page, server: ManyloraServer
) -> None:
    haiku = server.tenant("atelier").get("/v1/adapters/haiku").json()
    show_live(page)
    page.locator(f'[data-entry="{haiku["digest"]}"]').click()
    page.mouse.move(0, 0)
    assert f"show={haiku['digest'].replace(':', '%3A')}" in page.url
    page.reload()
    expect(page.locator(".cells path.lit")).not_to_have_count(0)
    lit = {one.get_attribute("data-adapter") for one in page.locator(".cells path.lit").all()}
    kinds = {one.get_attribute("data-kind") for one in page.locator(".cells path.lit").all()}
    assert (lit, kinds) == ({haiku["digest"]}, {"adapter", "prefix"})
    expect(page.get_by_role("button", name=re.compile("haiku@1"))).to_have_attribute(
        "aria-pressed", "true"
    )
    page.get_by_text("The pool as a table").click()
    row = page.locator(f'.as-table tr[data-key="{haiku["digest"]}"]')
    expect(row).to_contain_text(str(haiku["pages"]))


def test_a_paused_page_stands_still_and_goes_on(page: Page, server: ManyloraServer) -> None:
    show_live(page)
    page.get_by_role("button", name="Pause").click()
    expect(page.locator('[data-state="paused"]')).to_be_visible()
    before = page.locator('[data-fact="Steps"]').inner_text()
    server.ask("harbour", "shout", "When are you open?")
    page.wait_for_timeout(1200)
    assert page.locator('[data-fact="Steps"]').inner_text() == before
    page.get_by_role("button", name="Continue").click()
    expect(page.locator('[data-fact="Steps"]')).to_have_text(f"{server.engine()['num_steps']:,}")


@contextmanager
def broken_stream(watched: tuple[Page, Watch], server: ManyloraServer) -> Iterator[None]:
    """The page had one snapshot when the stream ended, and gets no other as long as this lasts."""
    page, watch = watched
    watch.broken = True
    last = f"retry: 200\ndata: {json.dumps(server.engine())}\n\n"
    bodies = [last]
    is_back = threading.Event()

    def answer(route: Route) -> None:
        if is_back.is_set():
            route.fallback()
        elif bodies:
            route.fulfill(body=bodies.pop(), content_type="text/event-stream")
        else:
            route.abort("connectionrefused")

    page.route("**/v1/engine/events", answer)
    show_live(page)
    expect(page.get_by_role("alert")).to_contain_text("The connection broke.")
    expect(page.locator('[data-state="broken"]')).to_be_visible()
    yield
    is_back.set()  # taking the route away could meet a request that is on its way through it


def test_a_broken_connection_is_told_and_comes_back(
    watched: tuple[Page, Watch], server: ManyloraServer
) -> None:
    page, _ = watched
    with broken_stream(watched, server):
        expect(page.locator(".cells svg")).to_be_visible()
        server.ask("harbour", "shout", "Can I return something?")
    expect(page.locator('[data-state="live"]')).to_be_visible()
    expect(page.get_by_role("alert")).to_have_count(0)
    expect(page.locator('[data-fact="Steps"]')).to_have_text(f"{server.engine()['num_steps']:,}")


def test_who_was_signed_out_meanwhile_is_led_to_the_sign_in(
    watched: tuple[Page, Watch], server: ManyloraServer
) -> None:
    page, watch = watched
    watch.allowed = {401}
    with broken_stream(watched, server):
        sign_out_elsewhere(page, server)
    expect(page.get_by_label("Key", exact=True)).to_be_visible()


@pytest.mark.parametrize(
    ("size", "scheme"), [(DESKTOP, "light"), (DESKTOP, "dark"), (PHONE, "light")]
)
def test_the_crowded_page_is_accessible_and_fits(
    browser: Browser, server: ManyloraServer, size: tuple[int, int], scheme: str
) -> None:
    with watched_page(browser, server.url, scheme=scheme) as (page, _):
        show_snapshots(page, crowded(server.engine()))
        page.get_by_text("What the columns say").click()
        page.set_viewport_size({"width": size[0], "height": size[1]})
        assert grave_findings(page) == []
        assert page.evaluate("document.documentElement.scrollWidth") <= size[0]


def test_an_engine_that_dies_is_told_and_its_next_life_as_well(
    page: Page, server: ManyloraServer
) -> None:
    show_live(page)
    engines(server)[0].kill()
    expect(page.get_by_role("alert")).to_contain_text("engine", timeout=30_000)
    expect(page.locator(".notice.warn")).to_contain_text("The engine was restarted", timeout=60_000)
    expect(page.get_by_role("alert")).to_have_count(0)
    expect(page.locator('[data-stat="On the device"] .stat-value')).to_have_text("0")
    page.get_by_role("button", name="OK").click()
    expect(page.locator(".notice.warn")).to_have_count(0)
