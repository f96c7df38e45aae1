"""Real traffic, marked by its keys, is billed to the token as its clients were told."""

from __future__ import annotations

import asyncio
import csv
import io
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest

import marked_traffic
from demo_ledger import FIGURES, usage_differences
from long_model import LONG_ANSWER, long_model
from manylora.cli.demo.round import ADAPTERS, BASE_NAME, TENANTS, play
from manylora.cli.demo.traffic import MAX_AT_ONCE
from manylora_server import ADMIN_KEY, ManyloraServer, manylora_server
from marked_traffic import KEY_NAME, LEFT, Planned, Traffic, plan, replay

SECONDS = 9.0


@dataclass
class Played:
    """The traffic on a server that others use too."""

    server: ManyloraServer
    traffic: Traffic
    differences: list[str]
    events: list[dict[str, Any]]
    """Events of the whole ledger."""
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
        patch.setattr(marked_traffic, "plan", endless)
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
