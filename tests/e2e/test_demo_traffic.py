"""The demo's traffic: real, marked by its keys, counted to the token, and removed without a trace."""

from __future__ import annotations

import asyncio
import csv
import io
import os
import sqlite3
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from demo_ledger import FIGURES, usage_differences
from long_model import LONG_ANSWER, long_model
from manylora.cli.demo import traffic as demo_traffic
from manylora.cli.demo.round import ADAPTERS, BASE_NAME, TENANTS, play
from manylora.cli.demo.traffic import KEY_NAME, LEFT, MAX_AT_ONCE, Planned, Traffic, plan, replay
from manylora.registry.registry import Registry
from manylora_server import ADMIN_KEY, ManyloraServer, manylora_server
from usage_sums import wrong_sums

SECONDS = 9.0
MANYLORA = str(Path(sys.executable).with_name("manylora"))
Rows = dict[str, list[dict[str, Any]]]


@dataclass
class Played:
    """The demo's traffic on a server that others use too."""

    server: ManyloraServer
    traffic: Traffic
    differences: list[str]
    events: list[dict[str, Any]]
    """Of the whole ledger."""
    keys: dict[str, str]
    """Name of each key by its id."""


def endless(duration_s: float) -> list[Planned]:
    """The plan, where answers whose clients leave do not end by themselves before the server has noticed."""
    return [
        each
        if each.leaves_after is None
        else replace(each, body={**each.body, "max_tokens": LONG_ANSWER})
        for each in plan(duration_s)
    ]


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Played]:
    folder = tmp_path_factory.mktemp("traffic")
    with (
        manylora_server(
            folder, "--served-model-name", BASE_NAME, model=long_model(folder / "long")
        ) as server,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setattr(demo_traffic, "plan", endless)
        play(server.url, ADMIN_KEY)
        server.publish("acme", "pirate")
        server.ask("acme", "pirate", "Do you have the scarf?")
        namesake = server.client(server.new_key("acme", name=KEY_NAME))
        body = {"model": "pirate", "prompt": "Hello!", "max_tokens": 4}
        assert namesake.post("/v1/completions", json=body).status_code == 200
        namesake.close()
        traffic = asyncio.run(replay(server.url, ADMIN_KEY, SECONDS))
        differences = usage_differences(server.url, ADMIN_KEY, traffic)
        events = server.admin.get("/v1/usage/events", params={"limit": 10_000}).json()["data"]
        listed = [
            server.admin.get(f"/v1/tenants/{tenant}/keys").json()["data"]
            for tenant in (*TENANTS, "acme")
        ]
        yield Played(
            server,
            traffic,
            differences,
            events,
            {key["id"]: key["name"] for keys in listed for key in keys},
        )


def test_every_planned_request_is_in_the_ledger_under_the_traffics_keys(played: Played) -> None:
    marked = [event for event in played.events if event["key"] in played.traffic.key_ids]
    assert {played.keys[event["key"]] for event in marked} == {KEY_NAME}
    assert len(played.traffic.key_ids) == len(TENANTS)
    assert sorted(event["request_id"] for event in marked) == [
        f"demo-{number:04}" for number in range(1, len(plan(SECONDS)) + 1)
    ]
    asked = Counter((planned.tenant, planned.body["model"]) for planned in plan(SECONDS))
    assert Counter((event["tenant"], event["adapter"] or BASE_NAME) for event in marked) == asked


def test_it_holds_all_adapters_tenants_and_ends(played: Played) -> None:
    marked = [event for event in played.events if event["key"] in played.traffic.key_ids]
    assert {(event["tenant"], event["adapter"]) for event in marked} == {
        *((tenant, adapter) for adapter, tenant in ADAPTERS.items()),
        *((tenant, None) for tenant in TENANTS),
    }
    ends = Counter(event["status"] for event in marked)
    assert set(ends) == {"stop", "length", "aborted"}
    assert ends["aborted"] == Counter(told.end for told in played.traffic.told)[LEFT]
    assert {event["endpoint"] for event in marked} == {"/v1/chat/completions", "/v1/completions"}
    assert sum(event["cached_tokens"] for event in marked) > 0


def test_api_csv_events_and_answers_agree(played: Played) -> None:
    assert played.differences == []
    # Counted once more, by other questions than the demo asks.
    params = {"key": played.traffic.key_ids, "group_by": "key,version", "bucket": "1m"}
    rows = played.server.admin.get("/v1/usage", params={**params, "format": "csv"}).text
    table = list(csv.DictReader(io.StringIO(rows)))
    totals = {name: sum(int(row[name]) for row in table) for name in FIGURES}
    told = Counter[str](requests=len(played.traffic.told))
    for each in played.traffic.told:
        told.update(each.tokens)
    assert len(plan(SECONDS)) == totals["requests"]
    left = {
        each.request_id: each.tokens["completion_tokens"]
        for each in played.traffic.told
        if each.end == LEFT
    }
    billed = sum(
        event["completion_tokens"] for event in played.events if event["request_id"] in left
    )
    assert billed >= sum(left.values()) > 0
    assert {
        **told,
        "completion_tokens": told["completion_tokens"] + billed - sum(left.values()),
    } == totals


def test_a_token_too_many_or_a_request_too_few_is_noticed(played: Played) -> None:
    *rest, last = (told for told in played.traffic.told if told.is_whole)
    wrong = replace(
        last, tokens={**last.tokens, "completion_tokens": last.tokens["completion_tokens"] + 1}
    )
    for told, expected in (
        (wrong, f"{last.request_id} is billed"),
        (replace(last, end="error"), f"{last.request_id} is recorded as {last.end}"),
    ):
        found = usage_differences(
            played.server.url, ADMIN_KEY, replace(played.traffic, told=[*rest, told])
        )
        assert [difference.startswith(expected) for difference in found] == [True]
    other = replace(played.traffic, key_ids=played.traffic.key_ids[:1])
    found = usage_differences(played.server.url, ADMIN_KEY, other, wait_s=0)
    assert any(difference.endswith("has no event") for difference in found)


def test_reset_removes_this_and_nothing_else(played: Played) -> None:
    while_it_runs = reset(played.server.data_dir)
    assert while_it_runs.returncode == 2
    assert "in use by another Manylora process" in while_it_runs.stderr
    assert played.server.stop() == 0
    before = tables(played.server.data_dir)
    key_ids = set(played.traffic.key_ids)

    done = reset(played.server.data_dir)
    assert done.returncode == 0, done.stderr
    num = len(plan(SECONDS))
    assert done.stdout == f"Removed {num} usage events of the demo traffic; revoked 2 keys.\n"
    after = tables(played.server.data_dir)
    for table in (
        "usage_events",
        "usage_rollups",
        "usage_latency",
        "usage_adapters",
        "usage_months",
    ):
        kept = [row for row in before[table] if row["key_id"] not in key_ids]
        assert len(kept) < len(before[table])
        assert after.pop(table) == kept != []
    revoked = {row["id"] for row in after["api_keys"] if row["revoked_at"] is not None}
    assert revoked == key_ids
    assert [{**row, "revoked_at": None} for row in after.pop("api_keys")] == before["api_keys"]
    new = after["audit_log"][len(before["audit_log"]) :]
    assert sorted((row["action"], row["target"]) for row in new) == [
        *sorted(("key.revoke", key_id) for key_id in key_ids),
        *sorted(("usage.erase", key_id) for key_id in key_ids),
    ]
    assert after.pop("audit_log")[: len(before["audit_log"])] == before["audit_log"]
    assert after == {table: before[table] for table in after}
    assert asyncio.run(count_wrong_sums(played.server.data_dir)) == 0

    again = reset(played.server.data_dir)
    assert again.returncode == 0
    assert again.stdout == "Removed 0 usage events of the demo traffic; revoked 0 keys.\n"


def test_reset_where_no_demo_was_says_so_and_makes_nothing(tmp_path: Path) -> None:
    for folder in (tmp_path / "missing", tmp_path):
        done = reset(folder)
        assert done.returncode == 2
        assert "There is no demo in" in done.stderr
        assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []
    asyncio.run(count_wrong_sums(tmp_path))  # a registry, where the demo never was
    assert "There is no demo in" in reset(tmp_path).stderr


def test_the_plan_is_the_same_each_time_gentle_and_uneven() -> None:
    planned = plan()
    assert planned == plan()
    assert plan(SECONDS) == planned[: len(plan(SECONDS))]
    per_second = Counter(int(each.at_s) for each in planned)
    assert max(per_second.values()) <= 8
    assert MAX_AT_ONCE <= 6
    assert set(range(60)) - set(per_second), "no quiet second"
    popularity = Counter(each.body["model"] for each in planned)
    assert popularity["pirate"] > 3 * popularity["haiku"] > 0
    prompts = Counter(str(each.body.get("messages") or each.body["prompt"]) for each in planned)
    assert prompts.most_common(1)[0][1] > 1, "no prompt comes twice"
    assert {each.body.get("stream", False) for each in planned} == {True, False}


def reset(data_dir: Path) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("MANYLORA_")}  # noqa: TID251
    command = [MANYLORA, "demo", "--reset", "--data-dir", str(data_dir)]
    return subprocess.run(command, env=kept, capture_output=True, text=True, timeout=60)


def tables(data_dir: Path) -> Rows:
    """All rows of the database."""
    with sqlite3.connect(data_dir / "registry.sqlite") as database:
        database.row_factory = sqlite3.Row
        names = [
            row[0]
            for row in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
        ]
        found = {
            name: [dict(row) for row in database.execute(f"SELECT * FROM {name} ORDER BY 1")]
            for name in names
        }
    database.close()
    return found


async def count_wrong_sums(data_dir: Path) -> int:
    registry = await Registry.open(None, data_dir)
    try:
        return await wrong_sums(registry.database)
    finally:
        await registry.close()
