"""Takes the pictures in docs/screenshots: a demo server with a made-up month in its ledger, seen in Chromium."""

from __future__ import annotations

import asyncio
import random
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

from PIL import Image
from playwright.sync_api import Page

from browser import DESKTOP, PHONE, chromium, sign_in, watched_page
from manylora.cli.demo.round import ADAPTERS, BASE_NAME
from manylora.registry.db.database import Database
from manylora.registry.records import UsageEvent
from manylora.registry.usage.write import insert_events
from manylora_server import ADMIN_KEY, DEMO_ADAPTERS, ManyloraServer, manylora_server

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "docs" / "screenshots"
COLOURS = 128
"""Colours of a picture's palette. Pages have few, and files stay small."""
DAYS = 30
CLIENTS = 12
PRICES = """\
currency: EUR
per_million_tokens:
  default: {prompt: 0.30, cached: 0.03, completion: 0.90}
"""
SHOTS = (
    # Name, path, size, scheme
    ("overview", "/?range=30d&tz=UTC", DESKTOP, "light"),
    ("usage", "/usage?range=30d&tz=UTC&group=adapter&top=8", DESKTOP, "dark"),
    ("adapters", "/adapters?range=30d&tz=UTC", DESKTOP, "light"),
    ("adapter", "/adapters/pirate?tenant=harbour&range=30d&tz=UTC", DESKTOP, "dark"),
    ("tenant", "/tenants/harbour?range=30d&tz=UTC", DESKTOP, "light"),
    ("overview-phone", "/?range=30d&tz=UTC", PHONE, "dark"),
    ("adapters-phone", "/adapters?range=30d&tz=UTC", PHONE, "light"),
)


def main() -> None:
    """Take all of them."""
    OUT.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp())
    prices = folder / "prices.yaml"
    prices.write_text(PRICES)
    options = ("--served-model-name", BASE_NAME, "--dtype", "float32", "--memory-gib", "0.1")
    with (
        manylora_server(folder, *options, MANYLORA_REGISTRY__PRICE_FILE=str(prices)) as server,
        chromium() as browser,
    ):
        ids = _furnish(server)
        with ThreadPoolExecutor(1) as own_loop:  # the browser's driver holds this thread's
            own_loop.submit(asyncio.run, _write_month(server, ids)).result()
        for name, path, size, scheme in SHOTS:
            with watched_page(browser, server.url, size=size, scheme=scheme) as (page, _):
                sign_in(page, ADMIN_KEY, path)
                page.mouse.move(0, 0)  # off the chart that lies where the button was
                page.wait_for_load_state("networkidle")
                _take(page, name)
        with watched_page(browser, server.url, scheme="light") as (page, _):
            sign_in(
                page,
                ADMIN_KEY,
                f"/playground?{'&'.join(f'model={name}' for name in _SIDE_BY_SIDE)}",
            )
            page.get_by_label("Prompt", exact=True).fill("When are you open?")
            page.get_by_role("button", name="Send to all").click()
            page.wait_for_timeout(3000)
            _take(page, "playground")
        with _crowd(server), watched_page(browser, server.url, scheme="dark") as (page, _):
            sign_in(page, ADMIN_KEY, "/live")
            page.wait_for_timeout(9000)
            _take(page, "live")


_SIDE_BY_SIDE = (BASE_NAME, "harbour/pirate", "harbour/shout", "atelier/french")


@contextmanager
def _crowd(server: ManyloraServer) -> Iterator[None]:
    """Twelve clients that ask all the time: batches are full while a picture is taken."""
    is_over = threading.Event()

    def ask_on(seed: int) -> None:
        rng = random.Random(seed)
        while not is_over.is_set():
            name, owner = rng.choice(list(ADAPTERS.items()))
            server.ask(owner, name, f"{'Please tell me ' * rng.randrange(12)}when are you open?")

    with ThreadPoolExecutor(CLIENTS) as clients:
        for seed in range(CLIENTS):
            clients.submit(ask_on, seed)
        try:
            yield
        finally:
            is_over.set()


def _furnish(server: ManyloraServer) -> dict[str, tuple[str, str, str, str]]:
    """Tenants with their adapters; tenant, tenant's id, key's id and adapter's id by adapter."""
    ids = {}
    for name, owner in ADAPTERS.items():
        client = server.tenant(owner)
        uploaded = server.upload(client, name, DEMO_ADAPTERS / name)
        me = client.get("/v1/me").json()
        ids[name] = (owner, me["tenant"]["id"], me["key"]["id"], uploaded.json()["id"])
        server.ask(owner, name, "When are you open?")
    limits = {"requests_per_minute": 600, "tokens_per_month": 20_000_000, "stored_bytes": 1 << 30}
    server.admin.patch("/v1/tenants/harbour", json={"limits": limits})
    return ids


async def _write_month(server: ManyloraServer, ids: dict[str, tuple[str, str, str, str]]) -> None:
    database = await Database.open(None, server.data_dir)
    try:
        async with database.write() as session:
            await insert_events(session, list(_events(ids)))
    finally:
        await database.close()


def _events(ids: dict[str, tuple[str, str, str, str]]) -> Iterator[UsageEvent]:
    rng = random.Random(8)
    now = datetime.now(UTC)
    names = list(ids)
    for number in range(9_000):
        back = rng.triangular(0, 2 * DAYS * 86_400, 0)  # less further back: the shop grows
        at = now - timedelta(seconds=back)
        if rng.random() < 0.6 * (at.weekday() >= 5):
            continue
        name = rng.choices(names, (3, 5, 4, 9, 2))[0]
        tenant, tenant_id, key_id, adapter_id = ids[name]
        is_base = rng.random() < 0.12
        prompt = rng.randrange(60, 900)
        yield UsageEvent(
            id=f"use_{number:06}",
            at=at,
            tenant_id=tenant_id,
            tenant=tenant,
            key_id=key_id,
            adapter_id=None if is_base else adapter_id,
            adapter=None if is_base else name,
            adapter_version=None if is_base else 1,
            adapter_digest=None,
            request_id=f"req-{number}",
            endpoint="/v1/chat/completions",
            status=rng.choices(("stop", "length", "aborted", "error"), (86, 11, 2, 1))[0],
            prompt_tokens=prompt,
            cached_tokens=rng.randrange(prompt) // 2,
            completion_tokens=rng.randrange(10, 400),
            queue_s=0.002,
            ttft_s=rng.lognormvariate(-2.4, 0.6),
            duration_s=1.5,
            adapter_state=None
            if is_base
            else rng.choices(("device", "host", "stored"), (90, 8, 2))[0],
        )


def _take(page: Page, name: str) -> None:
    page.locator(".skeleton").first.wait_for(state="detached")
    page.wait_for_timeout(800)
    file = OUT / f"{name}.png"
    page.screenshot(path=file)
    Image.open(file).convert("RGB").quantize(COLOURS).save(file, optimize=True)
    print(f"{file.relative_to(ROOT)}  {file.stat().st_size / 1024:.0f} KiB")


if __name__ == "__main__":
    main()
