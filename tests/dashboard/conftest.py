"""A server with two tenants, their adapters and a little traffic for all these tests, and a browser for each file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page

from browser import Watch, chromium, watched_page
from manylora_server import DEMO_ADAPTERS, ManyloraServer, manylora_server
from usage_history import History, write_history

PRICES = "currency: EUR\nper_million_tokens:\n  default: {prompt: 0.20, cached: 0.05, completion: 0.60}\n"
OWNERS = {
    "haiku": "atelier",
    "french": "atelier",
    "shout": "harbour",
    "pirate": "harbour",
    "json": "harbour",
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A server and a browser take seconds."""
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ManyloraServer]:
    options = ("--served-model-name", "manylora-demo", "--dtype", "float32", "--memory-gib", "0.25")
    prices = tmp_path_factory.mktemp("prices") / "prices.yaml"
    prices.write_text(PRICES)
    folder = tmp_path_factory.mktemp("dashboard")
    with manylora_server(folder, *options, MANYLORA_REGISTRY__PRICE_FILE=str(prices)) as running:
        for name, owner in OWNERS.items():
            answer = running.upload(running.tenant(owner), name, DEMO_ADAPTERS / name)
            assert answer.status_code == 201, answer.text
            for _ in range(2):
                running.ask(owner, name, "Where is my order?")
        running.ask("atelier", "manylora-demo", "Where is my order?")
        yield running


@pytest.fixture(scope="session")
def history(server: ManyloraServer) -> History:
    """What two more tenants used about the day on which clocks went back."""
    return write_history(server)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Its driver holds this thread's event loop, so it ends with the file."""
    with chromium() as running:
        yield running


@pytest.fixture
def watched(browser: Browser, server: ManyloraServer) -> Iterator[tuple[Page, Watch]]:
    """A page that nobody is signed in to, and what it must not do."""
    with watched_page(browser, server.url) as both:
        yield both


@pytest.fixture
def page(watched: tuple[Page, Watch]) -> Page:
    return watched[0]
