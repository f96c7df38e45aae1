"""The system's Chromium on pages of a Manylora server: what goes wrong in a page fails the test that looked at it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from axe_playwright_python.base import AxeResults
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import (
    Browser,
    BrowserContext,
    ConsoleMessage,
    Page,
    Request,
    Response,
    expect,
    sync_playwright,
)

from manylora_server import ManyloraServer
from system_tools import require

VIOLATIONS = {"resultTypes": ["violations"]}
COLOUR_RULES = ["color-contrast", "link-in-text-block"]
"""Of axe's rules that it runs unless asked for more, those that look at colours."""
GRAVE = {"serious", "critical"}
OPTIONS = (
    *(
        "--no-sandbox",
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-sync",
    ),
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1, EXCLUDE localhost",
)
"""Nothing off this machine is found: a route that kept pages from it would also turn the browser's cache off."""
LOCAL_SCHEMES = ("blob", "data")
DESKTOP = (1440, 900)
PHONE = (390, 844)
REFUSAL = "Failed to load resource: the server responded with a status of"
"""What Chromium writes for every answer that is an error; those are looked at by their status."""
BROKEN = re.compile(r"Failed to load resource: net::ERR_(CONNECTION_|INCOMPLETE_CHUNKED_ENCODING)")

TIMEOUT_MS = 15_000
"""A machine that does other things as well is slow to draw a page."""


@dataclass
class Watch:
    """What a page did that it should not have."""

    allowed: set[int] = field(default_factory=set)
    """Statuses of errors that the test brings about."""
    broken: bool = False
    """Whether the test breaks connections. What the console says about one can arrive after it is back."""
    foreign: list[str] = field(default_factory=list)
    """Addresses off this machine that something asked for."""
    said: list[str] = field(default_factory=list)
    """Errors and warnings of the console, and what no code caught."""
    refused: list[str] = field(default_factory=list)

    def check(self) -> None:
        """Fail if there was anything."""
        assert not self.foreign, f"the page asked for {self.foreign}"
        assert not self.said, f"the console says {self.said}"
        assert not self.refused, f"the server refused {self.refused}"


@contextmanager
def chromium() -> Iterator[Browser]:
    """The system's browser; without one tests are skipped, and fail in CI."""
    path = require("chromium", package="chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=list(OPTIONS))
        try:
            yield browser
        finally:
            browser.close()


@contextmanager
def watched_page(
    browser: Browser,
    url: str,
    *,
    size: tuple[int, int] = DESKTOP,
    scheme: str = "light",
    zone: str = "UTC",
) -> Iterator[tuple[Page, Watch]]:
    """A page of a fresh visitor, and what it must not do; checked when the test is through with it."""
    context = browser.new_context(
        base_url=url,
        viewport={"width": size[0], "height": size[1]},
        color_scheme="dark" if scheme == "dark" else "light",
        timezone_id=zone,
        accept_downloads=True,
        reduced_motion="reduce",
    )
    context.set_default_timeout(TIMEOUT_MS)
    expect.set_options(timeout=TIMEOUT_MS)
    watch = Watch()
    page = context.new_page()
    _listen(context, page, watch)
    try:
        yield page, watch
        watch.check()
    finally:
        context.close()


def sign_in(page: Page, key: str, path: str = "/") -> None:
    """Sign in through the page, and wait for its frame."""
    page.goto(path)
    page.get_by_label("Key", exact=True).fill(key)
    page.get_by_role("button", name="Sign in").click()
    page.locator("#main").wait_for()


def sign_out_elsewhere(page: Page, server: ManyloraServer) -> None:
    """End the page's session without it."""
    cookies = "; ".join(
        f"{cookie.get('name')}={cookie.get('value')}" for cookie in page.context.cookies()
    )
    with server.client(None) as anyone:
        left = anyone.delete(
            "/v1/session", headers={"cookie": cookies, "sec-fetch-site": "same-origin"}
        )
    assert left.status_code == 204


def grave_findings(page: Page) -> list[str]:
    """What axe finds that keeps people from using the page."""
    return _grave(Axe().run(page, options=VIOLATIONS))


def grave_findings_in_the_dark(page: Page) -> list[str]:
    """What axe finds besides in a page by day whose colours become those of the night; it is left in them."""
    page.emulate_media(color_scheme="dark")
    return _grave(Axe().run(page, options={**VIOLATIONS, "runOnly": COLOUR_RULES}))


def _grave(results: AxeResults) -> list[str]:
    found = results.response["violations"]
    return [
        f"{rule['id']}: {node['html'][:120]}"
        for rule in found
        if rule["impact"] in GRAVE
        for node in rule["nodes"]
    ]


def wait_until_shown(page: Page) -> None:
    """Return when the page has read all that it shows, and can be used."""
    page.wait_for_function(
        """() => document.querySelector("h1") && !document.querySelector(".skeleton, [aria-busy='true']")""",
        polling=10,
    )
    page.evaluate("new Promise((done) => requestAnimationFrame(() => setTimeout(done)))")


def _listen(context: BrowserContext, page: Page, watch: Watch) -> None:
    def asked(request: Request) -> None:
        address = urlsplit(request.url)
        if address.scheme not in LOCAL_SCHEMES and address.hostname not in (
            "127.0.0.1",
            "localhost",
        ):
            watch.foreign.append(request.url)

    def console(message: ConsoleMessage) -> None:
        expected = REFUSAL in message.text or (watch.broken and BROKEN.search(message.text))
        if message.type in ("error", "warning") and not expected:
            watch.said.append(message.text)

    def answered(response: Response) -> None:
        # Whether somebody is signed in can only be found out by asking.
        is_question = response.status == 401 and urlsplit(response.url).path == "/v1/me"
        if response.status >= 400 and response.status not in watch.allowed and not is_question:
            watch.refused.append(f"{response.request.method} {response.url}: {response.status}")

    context.on("request", asked)
    page.on("console", console)
    page.on("pageerror", lambda error: watch.said.append(str(error)))
    page.on("response", answered)
