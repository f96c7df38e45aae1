"""Servers, engines and databases die under load: no acknowledged usage is lost or counted twice, to the token."""

from __future__ import annotations

import asyncio
import itertools
import random
import sqlite3
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import psutil
import pytest

from idleness import PATIENCE_S, seconds_until_idle, wait_until
from manylora.config import environment
from manylora.errors import ManyloraError
from manylora.registry.db.database import Database
from manylora.registry.usage.journal import Journal
from manylora.registry.usage.ledger import UsageLedger
from manylora_server import DEMO_ADAPTERS, ManyloraServer, engines, manylora_server
from postgres_server import OwnPostgres
from usage_events import Billed, stored_events, usage_events
from usage_load import BASE, Asked, UsageLoad, send
from usage_sums import wrong_sums

pytestmark = pytest.mark.timeout(3600)

KILLS = int(environment().get("TEST_KILLS", "4"))
"""For each database; 50 are the hundred of the promise."""
MOST_ENGINE_KILLS = 2
"""In one life of the API; a third within a minute would count as a crash loop."""
TENANTS = ("acme", "globex", "initech")
ADAPTERS = ("pirate", "shout")
ENDS = {"stop", "length"}


@dataclass
class Trial:
    """A data folder with its database, and the kills and outages so far."""

    folder: Path
    rng: random.Random
    postgres: OwnPostgres | None
    keys: dict[str, str] = field(default_factory=dict)
    done: Counter[str] = field(default_factory=Counter)
    outage_s: float = 0.0
    probes: list[Asked] = field(default_factory=list)

    @property
    def database_url(self) -> str | None:
        return self.postgres.url if self.postgres else None

    @property
    def num_kills(self) -> int:
        return self.done["engine kills"] + self.done["api kills"]

    @contextmanager
    def server(self) -> Iterator[ManyloraServer]:
        """One life of the API."""
        settings: dict[str, object] = {"model.threads": 1, "memory.gib": 0.1}
        if self.database_url is not None:
            settings["registry.database_url"] = self.database_url
        with manylora_server(self.folder, settings=settings) as server:
            yield server


def make_tenants(trial: Trial, server: ManyloraServer) -> None:
    for tenant in TENANTS:
        server.publish(tenant, *ADAPTERS)
    trial.keys.update(server.tenants)


def one_life(trial: Trial, server: ManyloraServer) -> None:
    """Kill the engine some times, take the database away perhaps, and kill the API in the end."""
    trial.done["lives"] += 1
    steps: list[Callable[[], None]] = [lambda: kill_engine(trial, server)] * trial.rng.randint(
        0, MOST_ENGINE_KILLS
    )
    if trial.done["lives"] % 2:
        steps.append(lambda: outage(trial, server))
    trial.rng.shuffle(steps)
    for step in steps:
        time.sleep(trial.rng.uniform(0.3, 1.5))
        step()
    time.sleep(trial.rng.uniform(0.3, 2.0))
    if trial.postgres is not None and trial.done["lives"] % 3 == 2:
        probes(trial, server)
        with away(trial, trial.rng.choice(["stopped", "killed"]), server.data_dir):
            probes(trial, server)
            kill_api(trial, server)
            with (
                pytest.raises(
                    ManyloraError, match="database_url names a database that cannot be used"
                ),
                trial.server(),
            ):
                pytest.fail("it started without its database")
        trial.done["api kills without a database"] += 1
    else:
        kill_api(trial, server)


def kill_engine(trial: Trial, server: ManyloraServer) -> None:
    """Kill it, or stop it, which is noticed after some seconds."""
    (engine,) = engines(server)
    trial.rng.choice([engine.kill, engine.suspend])()
    wait_until(lambda: engines(server) not in ([], [engine]))
    server.wait_ready(PATIENCE_S)
    trial.done["engine kills"] += 1


def kill_api(trial: Trial, server: ManyloraServer) -> None:
    orphans = psutil.Process(server.process.pid).children(recursive=True)
    server.process.kill()
    server.process.wait()
    _, alive = psutil.wait_procs(orphans, PATIENCE_S)
    assert alive == []
    trial.done["api kills"] += 1


def outage(trial: Trial, server: ManyloraServer) -> None:
    """Take the database away for seconds: known keys are served on, changes are refused, and all is billed after."""
    probes(trial, server)
    kind = trial.rng.choice(["stopped", "killed", "frozen"] if trial.postgres else ["locked"])
    with away(trial, kind, server.data_dir):
        started = time.monotonic()
        numbers = probes(trial, server)
        assert_refused(server.admin.post("/v1/tenants", json={"name": "late"}))
        if trial.postgres is not None:
            with server.client(trial.keys["acme"]) as late:
                assert_refused(server.upload(late, "late", DEMO_ADAPTERS / "french"))
            assert_refused(server.admin.get("/v1/usage"))
        time.sleep(trial.rng.uniform(0.0, 2.0))
        ready = server.admin.get("/ready")
        assert (ready.status_code, ready.json()) == (200, {"status": "ready"})
        trial.outage_s += time.monotonic() - started
    wait_until(
        lambda: (
            numbers <= {e.request_id for e in stored_events(server.data_dir, trial.database_url)}
        )
    )
    trial.done[f"database {kind}"] += 1


@contextmanager
def away(trial: Trial, kind: str, data_dir: Path) -> Iterator[None]:
    """The database, for the length of the block."""
    if trial.postgres is None:
        with closing(sqlite3.connect(data_dir / "registry.sqlite", isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            yield
        return
    take, give = {
        "stopped": (trial.postgres.stop, trial.postgres.start),
        "killed": (trial.postgres.kill, trial.postgres.start),
        "frozen": (trial.postgres.freeze, trial.postgres.thaw),
    }[kind]
    take()
    try:
        yield
    finally:
        give()


def probes(trial: Trial, server: ManyloraServer) -> set[str]:
    """One whole answer for each tenant and model, which must be good; returns the ids of these requests."""
    numbers = set()
    for tenant, model in itertools.product(TENANTS, (BASE, *ADAPTERS)):
        asked = Asked(
            request_id=f"probe-{len(trial.probes)}",
            tenant=tenant,
            path="/v1/completions",
            body={"model": model, "prompt": "hello", "max_tokens": 4, "n": 1, "ignore_eos": True},
            is_stream=False,
        )
        trial.probes.append(asked)
        numbers.add(asked.request_id)
        asyncio.run(send(server.url, trial.keys[tenant], asked))
        assert (asked.seen.status, asked.seen.error) == (200, None)
    return numbers


def assert_refused(answer: httpx.Response) -> None:
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "db.unavailable"), (
        answer.text
    )
    assert int(answer.headers["retry-after"]) >= 1


@pytest.mark.parametrize("backend", ["sqlite", "postgresql"])
def test_no_usage_is_lost_or_doubled_whoever_dies(backend: str, tmp_path: Path) -> None:
    with ExitStack() as stack:
        postgres = stack.enter_context(OwnPostgres()) if backend == "postgresql" else None
        trial = Trial(tmp_path, random.Random(11), postgres)
        load = UsageLoad(trial.keys, ADAPTERS, seed=5)
        with ExitStack() as clients:
            while trial.num_kills < KILLS:
                with trial.server() as server:
                    load.url = server.url
                    if not trial.keys:
                        make_tenants(trial, server)
                        clients.enter_context(load)
                    one_life(trial, server)
        with trial.server() as server:
            seconds_until_idle(server)
            state = server.engine()
            assert sum(state["pages"].values()) == state["ready"]["memory"]["num_pages"]
            events = usage_events(server, trial.database_url)
            report = check(trial, [*load.asked, *trial.probes], events, server)
            assert server.stop() == 0
        asyncio.run(check_sums(trial))
    print(f"{backend}: {dict(trial.done)}; {report}; outages {trial.outage_s:.0f} s")


def check(trial: Trial, asked: list[Asked], events: list[Billed], server: ManyloraServer) -> str:
    """Compare what the clients saw with what was billed, request by request, and with the totals."""
    billed = {event.request_id: event for event in events}
    assert len(billed) == len(events), "billed twice"
    assert set(billed) <= {each.request_id for each in asked}
    wrong = [
        (each, billed.get(each.request_id))
        for each in asked
        if not is_right(each, billed.get(each.request_id))
    ]
    assert wrong == []
    totals = server.admin.get("/v1/usage").json()["totals"]
    for name in ("prompt_tokens", "cached_tokens", "completion_tokens"):
        assert totals[name] == sum(getattr(event, name) for event in events), name
    assert totals["requests"] == len(events)
    ends = Counter(outcome(each) for each in asked)
    assert all(ends[how] for how in ("done", "cut", "error event", "503 engine_restarted")), ends
    return f"{len(asked)} requests: {dict(ends)}, {len(events)} events {dict(Counter(e.status for e in events))}"


def outcome(asked: Asked) -> str:
    seen = asked.seen
    if seen.is_done:
        return "done"
    if seen.status in (None, 200):
        return "error event" if seen.error else "unanswered" if seen.status is None else "cut"
    return f"{seen.status} {seen.error}"


def is_right(asked: Asked, bill: Billed | None) -> bool:
    """At most one event; exactly what the client saw where it saw an end, and no more than was sent elsewhere."""
    seen = asked.seen
    if seen.is_done:
        return (
            bill is not None
            and bill.status in ENDS
            and (bill.prompt_tokens, bill.cached_tokens, bill.completion_tokens)
            == (seen.prompt_tokens, seen.cached_tokens, seen.tokens)
            and (
                bill.status == "stop"
                or not asked.body["ignore_eos"]
                or seen.tokens == asked.asked_tokens
            )
        )
    if seen.status not in (None, 200, 503):
        return False
    if seen.status == 503:  # told before a token was sent
        return bill is None or (bill.status == "error" and bill.completion_tokens == 0)
    if seen.error is not None:  # the engine died, and all that it had said was sent
        return bill is not None and bill.status == "error" and bill.completion_tokens == seen.tokens
    if bill is None:
        return True
    if (
        bill.status in ENDS
    ):  # the end was billed, as it must be before it goes out, and never went out
        return bill.completion_tokens <= asked.asked_tokens
    return bill.status == "interrupted" and bill.completion_tokens <= seen.tokens


async def check_sums(trial: Trial) -> None:
    """The sums by hour are those of the events, and the journal has nothing left."""
    data_dir = trial.folder / "data"
    assert [path.name for path in (data_dir / "usage").iterdir()] == ["lock"]
    database = await Database.open(trial.database_url, data_dir)
    ledger = UsageLedger(database, await Journal.open(data_dir / "usage"))
    await ledger.start()
    assert await wrong_sums(database) == 0
    await ledger.close()
    await database.close()
