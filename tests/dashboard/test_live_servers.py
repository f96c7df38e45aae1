"""The live page behind a gateway: its servers, the choice of one, and what it says when that one is lost."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect

from browser import DESKTOP, PHONE, Watch, grave_findings, sign_in, watched_page
from manylora_cluster import Cluster, manylora_cluster
from manylora_server import ADMIN_KEY, DEMO_ADAPTERS

UNKNOWN = "\u2013"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with manylora_cluster(tmp_path_factory.mktemp("cluster"), num_replicas=2) as running:
        answer = running.gateway.upload(
            running.gateway.tenant("acme"), "pirate", DEMO_ADAPTERS / "pirate"
        )
        assert answer.status_code == 201, answer.text
        running.gateway.ask("acme", "pirate", "Where is my order?")
        yield running


@contextmanager
def live(browser: Browser, cluster: Cluster, **options: Any) -> Iterator[tuple[Page, Watch]]:
    with watched_page(browser, cluster.gateway.url, **options) as (page, watch):
        sign_in(page, ADMIN_KEY, "/live")
        expect(page.locator(".cells svg")).to_be_visible()
        expect(page).to_have_url(
            re.compile(r"\?server=srv_\w+$")
        )  # the replica that answered first
        yield page, watch


def cells(page: Page, server: str) -> list[str]:
    """A server's row: name, role, state, running, waiting, in flight, backlog, on device, on host, address."""
    return page.locator(f'[aria-label="Servers"] tr[data-key="{server}"] td').all_inner_texts()


def many(num_replicas: int) -> dict[str, Any]:
    """What a gateway says of many servers, some of them in trouble."""
    states = {3: "draining", 5: "down", 7: "lost"}
    servers: list[dict[str, Any]] = [
        {
            "name": f"srv_{index:024x}",
            "role": "gateway",
            "state": "ready",
            "url": f"http://10.0.0.{index}:8000",
        }
        for index in (1, 2)
    ]
    for index in range(num_replicas):
        state = states.get(index, "ready")
        load = {
            "running": 7 * index,
            "waiting": index,
            "in_flight": 8 * index,
            "backlog_s": index / 7,
        }
        near = {"adapters": {"device": 40 + index, "host": 900 * index}}
        url = f"http://replica-{index}.manylora.internal:8000"
        servers.append(
            {"name": f"srv_{index + 16:024x}", "role": "replica", "state": state, "url": url}
            | ({} if state == "lost" else {**load, **near})
        )
    return {"object": "list", "data": servers}


def test_the_servers_are_shown_and_one_is_chosen(browser: Browser, cluster: Cluster) -> None:
    with live(browser, cluster) as (page, _):
        rows = page.get_by_role("region", name="Servers").locator("tbody tr")
        expect(rows).to_have_count(3)
        servers = cluster.servers()
        for name in cluster.replicas:
            engine, row = cluster.engine(name), cells(page, name)
            assert row[:6] == [name, "replica", "ready", "0", "0", "0"]
            assert row[-1] == servers[name]["url"]
            tiers = [one["tier"] for one in engine["residents"]]
            expect(page.locator(f'tr[data-key="{name}"] [data-column="device"]')).to_have_text(
                str(tiers.count("device"))
            )
            page.get_by_role("link", name=name).click()
            expect(page).to_have_url(re.compile(rf"/live\?server={name}$"))
            expect(page.get_by_role("link", name=name)).to_have_attribute("aria-current", "true")
            expect(page.locator('[data-stat="On the device"] .stat-value')).to_have_text(
                str(tiers.count("device"))
            )
            expect(page.locator('[data-fact="Steps"]')).to_have_text(f"{engine['num_steps']:,}")
        assert page.locator(".notice.warn").count() == 0  # another replica is no restart
        (gateway,) = servers.keys() - cluster.replicas.keys()
        assert cells(page, gateway) == [
            gateway,
            "gateway",
            "ready",
            *[UNKNOWN] * 6,
            servers[gateway]["url"],
        ]
        page.reload()
        expect(page.get_by_role("link", name=name)).to_have_attribute("aria-current", "true")


@pytest.mark.parametrize("num_replicas", [2, 12])
@pytest.mark.parametrize(
    ("size", "scheme"), [(DESKTOP, "light"), (DESKTOP, "dark"), (PHONE, "light")]
)
def test_many_servers_are_accessible_and_fit(
    browser: Browser, cluster: Cluster, num_replicas: int, size: tuple[int, int], scheme: str
) -> None:
    with watched_page(browser, cluster.gateway.url, size=size, scheme=scheme) as (page, _):
        page.route("**/v1/servers", lambda route: route.fulfill(json=many(num_replicas)))
        sign_in(page, ADMIN_KEY, "/live")
        expect(page.get_by_role("region", name="Servers").locator("tbody tr")).to_have_count(
            num_replicas + 2
        )
        assert grave_findings(page) == []
        assert page.evaluate("document.documentElement.scrollWidth") <= size[0]


def test_a_replica_that_dies_is_told_and_another_can_be_chosen(
    browser: Browser, cluster: Cluster
) -> None:
    with live(browser, cluster) as (page, watch):
        watch.broken, watch.allowed = True, {404, 503}
        victim = page.url.partition("server=")[2]
        (other,) = cluster.replicas.keys() - {victim}
        cluster.kill(cluster.replicas[victim])
        expect(page.locator(f'tr[data-key="{victim}"] [data-server-state="lost"]')).to_be_visible()
        expect(page.get_by_role("alert")).to_contain_text("The connection broke.")
        page.get_by_role("link", name=other).click()
        expect(page.locator('[data-state="live"]')).to_be_visible()
        expect(page.get_by_role("alert")).to_have_count(0)
