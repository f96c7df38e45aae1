"""The adapters: what the list shows is what the API says, and what is changed on the page is changed in the API."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from playwright.sync_api import Locator, Page, expect

from browser import Watch, sign_in
from manylora_server import ADMIN_KEY, DEMO_ADAPTERS, ManyloraServer

LIST = "/v1/adapters?limit=1000"


def row(page: Page, key: str) -> Locator:
    return page.locator(f'tr[data-key="{key}"]')


def cell(page: Page, key: str, column: str) -> Locator:
    return row(page, key).locator(f'td[data-column="{column}"]')


def shown(page: Page) -> list[str]:
    """The names in the table, from top to bottom."""
    page.locator("tr[data-key]").first.wait_for()
    return page.locator('tbody td[data-column="name"]').all_inner_texts()


def aliases(client: httpx.Client) -> dict[str, Any]:
    return dict(client.get("/v1/adapters/many").json()["aliases"])


@pytest.fixture(scope="module")
def atelier(server: ManyloraServer) -> httpx.Client:
    return server.tenant("atelier")


@pytest.fixture
def many(page: Page, atelier: httpx.Client, server: ManyloraServer) -> Iterator[None]:
    """The page of an adapter of three versions, each of which was asked."""
    for version, source in enumerate(("haiku", "french", "pirate"), 1):
        assert server.upload(atelier, "many", DEMO_ADAPTERS / source).status_code == 201
        for _ in range(version):
            server.ask("atelier", "many", "Where is my order?")
    sign_in(page, server.tenants["atelier"], "/adapters/many")
    yield
    assert atelier.delete("/v1/adapters/many").status_code in (204, 404)


def test_the_list_shows_the_figures_of_the_api(
    page: Page, atelier: httpx.Client, server: ManyloraServer
) -> None:
    sign_in(page, server.tenants["atelier"], "/adapters")
    expect(cell(page, "atelier/haiku", "requests")).to_have_text(re.compile(r"^\d+$"))
    usage, latency = (
        {
            one["adapter"]: one
            for one in atelier.get(path, params={"group_by": "adapter"}).json()["data"]
        }
        for path in ("/v1/usage", "/v1/usage/latency")
    )
    adapters = [one for one in atelier.get(LIST).json()["data"] if one["name"] in usage]
    assert {"french", "haiku"} <= {one["name"] for one in adapters}
    for adapter in adapters:
        name, key = adapter["name"], f"atelier/{adapter['name']}"
        tokens = usage[name]["prompt_tokens"] + usage[name]["completion_tokens"]
        own = {column: adapter[column] for column in ("rank", "version", "pages")}
        for column, value in {"requests": usage[name]["requests"], "tokens": tokens, **own}.items():
            expect(cell(page, key, column)).to_have_text(f"{value:,}")
        expect(cell(page, key, "hit_rate")).to_have_text(f"{latency[name]['hit_rate']:.1%}")
        expect(cell(page, key, "ttft")).to_have_text(re.compile(r"^\d.* m?s$"))
        expect(cell(page, key, "residency")).to_have_text(adapter["residency"])
    rows = page.locator("tr[data-key]")
    expect(page.get_by_role("button", name=f"All {rows.count()}", exact=True)).to_be_visible()
    owners = set(rows.evaluate_all("rows => rows.map((row) => row.dataset.key.split('/')[0])"))
    assert owners == {"atelier"}


def test_search_filter_and_sort_stand_in_the_address(page: Page, server: ManyloraServer) -> None:
    sign_in(page, ADMIN_KEY, "/adapters")
    adapters = server.admin.get(f"{LIST}&tenant=*").json()["data"]
    assert (
        set(shown(page))
        == {one["name"] for one in adapters}
        >= {"haiku", "french", "shout", "pirate", "json"}
    )
    page.get_by_role("button", name="Rank").click()
    expect(page).to_have_url(re.compile("sort=-rank"))
    ranks = {one["name"]: one["rank"] for one in adapters}
    in_order = [ranks[name] for name in shown(page)]
    assert in_order == sorted(ranks.values(), reverse=True)
    page.get_by_role("button", name="Rank").click()
    page.get_by_label("Search").fill("harbour j")
    expect(page.locator("tr[data-key]")).to_have_count(1)
    page.reload()
    assert shown(page) == ["json"]
    expect(page.get_by_label("Search")).to_have_value("harbour j")
    page.get_by_label("Search").fill("nothing is called so")
    page.get_by_role("button", name="Show all").click()
    assert ranks[shown(page)[0]] == min(ranks.values())
    page.get_by_role("button", name=re.compile(r"^Pinned \d")).click()
    expect(page).to_have_url(re.compile("where=pinned"))
    expect(page.get_by_text("No adapter matches.")).to_be_visible()
    page.go_back()
    expect(page.locator("tr[data-key]")).to_have_count(len(adapters))
    page.get_by_label("Tenant").select_option("harbour")
    expect(page.locator("tr[data-key]")).to_have_count(
        sum(one["tenant"] == "harbour" for one in adapters)
    )
    page.get_by_role("link", name="shout").click()
    expect(page).to_have_url(re.compile(r"/adapters/shout\?tenant=harbour"))
    expect(page.get_by_role("heading", level=1)).to_contain_text("shout")


def test_a_key_that_may_only_call_looks_and_does_not_change(
    page: Page, server: ManyloraServer
) -> None:
    sign_in(page, server.new_key("atelier", scopes=["infer"]), "/adapters")
    assert {"french", "haiku"} <= set(shown(page))
    expect(page.get_by_text("this key lacks the scope adapters")).to_be_visible()
    expect(page.get_by_role("button", name="Upload adapter")).to_have_count(0)
    expect(page.get_by_role("columnheader", name="Requests")).to_have_count(0)
    page.get_by_role("link", name="haiku").click()
    expect(page.get_by_role("heading", name=re.compile("^Versions"))).to_be_visible()
    for name in ("Pin", "Delete", "Make current", "Add", "Grant", "Add a description"):
        expect(page.get_by_role("button", name=name, exact=True)).to_have_count(0)
    expect(page.get_by_role("link", name="Try it")).to_be_visible()


@pytest.mark.usefixtures("many")
def test_versions_their_traffic_and_the_way_back(page: Page, atelier: httpx.Client) -> None:
    for version in (1, 2, 3):
        expect(cell(page, str(version), "requests")).to_have_text(str(version))
        expect(cell(page, str(version), "ttft")).to_have_text(re.compile(r"^\d.* m?s$"))
        bars = page.locator(f'svg.chart rect[data-series="v{version}"]')
        expect(bars.first).to_be_attached()
        values = bars.evaluate_all("bars => bars.map((bar) => Number(bar.dataset.value))")
        assert sum(values) == version
    expect(cell(page, "3", "names")).to_have_text("many")
    page.get_by_role("button", name="Roll back to version 2").click()
    expect(cell(page, "2", "names")).to_have_text("many")
    assert aliases(atelier) == {"default": 2}
    row(page, "1").get_by_role("button", name="Make current").click()
    expect(page.locator('[data-fact="Current version"]')).to_have_text("1")
    assert atelier.get("/v1/adapters/many").json()["version"] == 1


@pytest.mark.usefixtures("many")
def test_a_canary_takes_its_part_and_is_rolled_back(page: Page, atelier: httpx.Client) -> None:
    atelier.patch("/v1/adapters/many", json={"aliases": {"default": 1}})
    page.reload()
    page.get_by_label("Add a version").select_option("Version 3")
    page.get_by_role("button", name="Apply: 95% / 5%").click()
    expect(page.locator("[data-split]")).to_have_text("95% / 5%")
    expect(cell(page, "3", "names")).to_have_text("many 5%")
    assert aliases(atelier)["default"] == {"1": 95, "3": 5}
    page.get_by_label("Slide from version 1 to version 3").fill("40")
    page.get_by_label("Weight of version 1").fill("1.5")
    expect(page.get_by_text("Weights are whole numbers")).to_be_visible()
    page.get_by_label("Weight of version 1").fill("160")
    page.get_by_role("button", name="Apply: 80% / 20%").click()
    expect(cell(page, "3", "names")).to_have_text("many 20%")
    assert aliases(atelier)["default"] == {"1": 160, "3": 40}
    page.get_by_role("button", name="Roll back to version 1 alone").click()
    expect(page.locator("[data-split]")).to_have_text("100%")
    assert aliases(atelier)["default"] == 1


@pytest.mark.usefixtures("many")
def test_aliases_are_added_moved_and_removed(page: Page, atelier: httpx.Client) -> None:
    card = page.get_by_role("region", name=re.compile("^Aliases names"))
    card.get_by_label("New alias").fill("7")
    expect(card.get_by_role("button", name="Add")).to_be_disabled()
    card.get_by_label("New alias").fill("prod")
    card.get_by_label("Version", exact=True).select_option("Version 2")
    card.get_by_role("button", name="Add").click()
    expect(card.locator('[data-key="prod"]')).to_be_visible()
    assert aliases(atelier)["prod"] == 2
    card.get_by_label("Version of prod").select_option("Version 1")
    expect(cell(page, "1", "names")).to_have_text("@prod")
    assert aliases(atelier)["prod"] == 1
    card.get_by_role("button", name="Remove the alias prod").click()
    page.get_by_role("button", name="Remove it").click()
    expect(card.locator('[data-key="prod"]')).to_have_count(0)
    assert "prod" not in aliases(atelier)


@pytest.mark.usefixtures("many")
def test_description_pin_grant_and_deletion(
    watched: tuple[Page, Watch], atelier: httpx.Client, server: ManyloraServer
) -> None:
    page, watch = watched
    watch.allowed.add(404)
    page.get_by_role("button", name="Add a description").click()
    page.get_by_label("Description").fill("Speaks in <b>many</b> tongues")
    page.get_by_role("button", name="Save").click()
    expect(page.get_by_text("Speaks in <b>many</b> tongues")).to_be_visible()
    page.get_by_role("button", name="Pin", exact=True).click()
    expect(page.get_by_role("button", name="Unpin")).to_be_visible()
    page.get_by_label("Other tenant").fill("harbour")
    page.get_by_role("button", name="Grant", exact=True).click()
    expect(page.get_by_role("alert")).to_contain_text("ten_")
    page.get_by_label("Other tenant").fill(
        server.tenant("harbour").get("/v1/me").json()["tenant"]["id"]
    )
    page.get_by_role("button", name="Grant", exact=True).click()
    expect(page.locator('tr[data-key="harbour "]')).to_contain_text("atelier/many")
    adapter = atelier.get("/v1/adapters/many").json()
    assert (adapter["description"], adapter["pinned"]) == ("Speaks in <b>many</b> tongues", True)
    server.ask("harbour", "atelier/many", "Where is my order?")
    page.get_by_role("button", name="Withdraw the grant of harbour").click()
    page.get_by_role("button", name="Withdraw it").click()
    expect(page.get_by_text("No other tenant.")).to_be_visible()
    row(page, "2").get_by_role("button", name="Delete version 2").click()
    page.get_by_role("button", name="Delete it").click()
    expect(row(page, "2")).to_have_count(0)
    assert [one["version"] for one in atelier.get("/v1/adapters/many/versions").json()["data"]] == [
        3,
        1,
    ]
    page.get_by_role("button", name="Delete", exact=True).first.click()
    page.get_by_role("button", name="Delete it").click()
    expect(page).to_have_url(re.compile("/adapters$"))
    assert atelier.get("/v1/adapters/many").status_code == 404


def test_an_admin_without_a_tenant_is_asked_whose_it_is(page: Page) -> None:
    sign_in(page, ADMIN_KEY, "/adapters/shout")
    page.get_by_role("link", name="Show the adapters of this name").click()
    expect(page.get_by_label("Search")).to_have_value("shout")
    page.get_by_role("link", name="shout", exact=True).click()
    expect(page.get_by_role("heading", level=1)).to_contain_text("shout")
    expect(page.get_by_text("of harbour ·")).to_be_visible()
