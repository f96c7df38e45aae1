"""Whether the ledger says of the demo traffic what its clients were told, to the token."""

from __future__ import annotations

import csv
import io
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from weft.cli.demo.traffic import LEFT, Told, Traffic
from weft.client import Client

FIGURES = ("requests", "prompt_tokens", "cached_tokens", "completion_tokens")
WAIT_S = 10.0
"""Longest wait for the events of clients that left: the server may notice that later than they do."""
POLL_S = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageCheck:
    """What was compared, and how it came out."""

    totals: Mapping[str, int]
    """As GET /v1/usage has them."""
    num_whole: int
    """Answers read to their end: each has one event, with the very tokens that its usage block named."""
    num_left: int
    """Requests whose client went away: each has one event, of at least what had been read."""
    left_billed: int
    """Completion tokens of their events."""
    left_read: int
    """Completion tokens that their clients had read."""
    num_failed: int
    """Requests refused or ended by an error; they count in the totals as far as the ledger has them."""
    differences: tuple[str, ...]
    """Sentences on what does not agree; empty where all does."""


def check_usage(url: str, admin_key: str, traffic: Traffic, wait_s: float = WAIT_S) -> UsageCheck:
    """Compare the usage of the traffic's keys: totals, CSV, events, and what the clients were told.

    Args:
        url: The server that the traffic was sent to, without /v1.
        admin_key: Its admin key.
        traffic: What was sent.
        wait_s: Longest wait for the event of each request.

    Raises:
        WeftError: The server refused a question, or does not answer.
    """
    asked: dict[str, Any] = {"key": [*traffic.key_ids], "start": traffic.since.isoformat()}
    whole = [told for told in traffic.told if told.is_whole]
    left = [told for told in traffic.told if told.end == LEFT]
    with Client(url, admin_key) as client:
        events = _events(client, asked, {told.request_id for told in (*whole, *left)}, wait_s)
        totals = client.usage(**asked)["totals"]
        table = csv.DictReader(io.StringIO("".join(client.usage_csv(**asked, group_by="tenant,adapter,status"))))
        from_csv = _sum(list(table))
    by_id = {event["request_id"]: event for event in events}
    of_events = _sum([{**event, "requests": 1} for event in events])
    sums = {figure: totals[figure] for figure in FIGURES}
    differences = [
        f"{name}: {found}, but the API's totals: {sums}"
        for name, found in (("sum of the CSV", from_csv), ("sum of the events", of_events))
        if found != sums
    ]
    if len(by_id) != len(events):
        differences.append(f"{len(events)} events for {len(by_id)} requests")
    differences += [sentence for told in (*whole, *left) for sentence in _differences(told, by_id.get(told.request_id))]
    return UsageCheck(
        totals=sums,
        num_whole=len(whole),
        num_left=len(left),
        left_billed=sum(by_id[told.request_id]["completion_tokens"] for told in left if told.request_id in by_id),
        left_read=sum(told.tokens["completion_tokens"] for told in left),
        num_failed=len(traffic.told) - len(whole) - len(left),
        differences=tuple(differences),
    )


def _events(client: Client, asked: Mapping[str, Any], awaited: set[str], wait_s: float) -> list[dict[str, Any]]:
    """The ledger's events, once those awaited are there, or cannot be expected any more."""
    deadline = time.monotonic() + wait_s
    while True:
        events: list[dict[str, Any]] = client.usage(events=True, **asked)["data"]
        if awaited <= {event["request_id"] for event in events} or time.monotonic() > deadline:
            return events
        time.sleep(POLL_S)


def _sum(rows: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    return {figure: sum(int(row[figure]) for row in rows) for figure in FIGURES}


def _differences(told: Told, event: Mapping[str, Any] | None) -> list[str]:
    if event is None:
        return [f"{told.request_id} has no event"]
    billed = {figure: event[figure] for figure in FIGURES[1:]}
    agrees = billed == told.tokens if told.is_whole else all(billed[name] >= told.tokens[name] for name in billed)
    if told.is_whole and event["status"] != told.end:
        return [f"{told.request_id} is recorded as {event['status']}, but ended with {told.end}"]
    return [] if agrees else [f"{told.request_id} is billed {billed}, but its client was told {dict(told.tokens)}"]
