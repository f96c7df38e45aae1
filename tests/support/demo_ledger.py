"""Compares the usage of marked traffic with what its clients were told, to the token."""

from __future__ import annotations

import csv
import io
import time
from collections.abc import Mapping, Sequence
from typing import Any

from manylora.client import Client
from marked_traffic import LEFT, TOKENS, Told, Traffic

FIGURES = ("requests", *TOKENS)
WAIT_S = 10.0
"""Longest wait for the usage events of clients that left: the server may notice a closed connection late."""
POLL_S = 0.2


def usage_differences(
    url: str, admin_key: str, traffic: Traffic, wait_s: float = WAIT_S
) -> list[str]:
    """Compare the usage of the traffic's keys: totals, CSV, events, and what the clients were told.

    Each answer that was read to its end must have one event, with exactly the tokens that it told; each whose client
    left early one event, of at least the tokens that were read. Events of requests that were refused or failed, if
    there are any, are in the totals.

    Args:
        url: The server that the traffic was sent to, without /v1.
        admin_key: Its admin key.
        traffic: What was sent.
        wait_s: Longest wait for the event of each request.

    Returns:
        One sentence for each difference; none if all agree.

    Raises:
        ManyloraError: The server refused a question, or does not answer.
    """
    asked: dict[str, Any] = {"key": [*traffic.key_ids], "start": traffic.since.isoformat()}
    billed = [told for told in traffic.told if told.is_whole or told.end == LEFT]
    with Client(url, admin_key) as client:
        events = _events(client, asked, {told.request_id for told in billed}, wait_s)
        totals = _sum([client.usage(**asked)["totals"]])
        table = csv.DictReader(
            io.StringIO("".join(client.usage_csv(**asked, group_by="tenant,adapter,status")))
        )
        from_csv = _sum(list(table))
    by_id = {event["request_id"]: event for event in events}
    of_events = _sum([{**event, "requests": 1} for event in events])
    differences = [
        f"{name}: {found}, but the API's totals: {totals}"
        for name, found in (("sum of the CSV", from_csv), ("sum of the events", of_events))
        if found != totals
    ]
    if len(by_id) != len(events):
        differences.append(f"{len(events)} events for {len(by_id)} requests")
    return differences + [
        each for told in billed for each in _differences(told, by_id.get(told.request_id))
    ]


def _events(
    client: Client, asked: Mapping[str, Any], awaited: set[str], wait_s: float
) -> list[dict[str, Any]]:
    """The usage events, once those of the requests `awaited` are there or the time is over."""
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
    billed = {figure: event[figure] for figure in TOKENS}
    agrees = (
        billed == told.tokens
        if told.is_whole
        else all(billed[name] >= told.tokens[name] for name in billed)
    )
    if told.is_whole and event["status"] != told.end:
        return [f"{told.request_id} is recorded as {event['status']}, but ended with {told.end}"]
    return (
        []
        if agrees
        else [f"{told.request_id} is billed {billed}, but its client was told {dict(told.tokens)}"]
    )
