"""The state of an engine or of the servers behind a gateway, as lines of text."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping
from typing import Any

from manylora.cli.table import (
    LOADS,
    REASONS,
    REFUSALS,
    SERVERS,
    counts_text,
    in_words,
    num_paused,
    seconds_text,
    server_rows,
    servers_line,
    table_lines,
)
from manylora.kernels.weight_format import number_format

ADAPTERS = ("ADAPTER", "TIER", "PAGES", "PREFIX", "RUNNING", "HOLDS", "HITS", "PINNED")
ADAPTERS_NUMBERS = ("PAGES", "PREFIX", "RUNNING", "HOLDS", "HITS")
TENANTS_NUMBERS = ("WEIGHT", "DUE", "SERVED", "IN STEP", "PAUSED", "WAITING", "WAIT")
TENANTS = ("TENANT", *TENANTS_NUMBERS, "WHY", "REFUSED")
NO_LOAD: Mapping[str, Any] = {
    "weight": 0,
    "rate": 0,
    "running": 0,
    "paused": 0,
    "waiting": 0,
    "reasons": {},
}
TIERS = ("device", "loading", "host")
SHORT_DIGEST = len("sha256:") + 12
IDLE_S = 2.0
"""An engine counts as idle if its last step ended longer ago."""


def blocks(body: Mapping[str, Any]) -> list[list[str]]:
    """Make blocks of lines: tables, and last a summary.

    Args:
        body: As `GET /v1/engine` gives it, or a gateway's `GET /v1/servers`.
    """
    if "ready" not in body:
        return [list(table_lines([SERVERS, *server_rows(body)], LOADS)), [servers_line(body)]]
    residents = [_resident_row(each) for each in sorted(body["residents"], key=_rank)]
    tables = (
        table_lines([ADAPTERS, *residents], ADAPTERS_NUMBERS) if residents else (),
        table_lines([TENANTS, *rows], TENANTS_NUMBERS) if (rows := list(tenant_rows(body))) else (),
    )
    return [*filter(None, map(list, tables)), _summary(body)]


def adapter_name(resident: Mapping[str, Any]) -> str:
    """The first name, and how many others mean the same bytes; a digest that no version has any more is shortened."""
    names = resident["adapters"]
    if not names:
        return str(resident["digest"])[:SHORT_DIGEST]
    return f"{names[0]} (+{len(names) - 1})" if len(names) > 1 else str(names[0])


def tenant_rows(body: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    """List tenants with requests in the engine, and those with refusals; the most served first."""
    loads = body["tenants"]
    gates = body["admission"]
    weight, rate = (sum(load[name] for load in loads.values()) for name in ("weight", "rate"))

    def rank(name: str) -> tuple[float, int, int, int, str]:
        load = loads.get(name, NO_LOAD)
        num_refused = sum(gates[name]["refused"].values()) if name in gates else 0
        in_step = load["running"] - load["paused"]
        return -load["rate"], -in_step, -load["waiting"], -num_refused, name

    refused = {name for name, gate in gates.items() if gate["refused"]}
    for name in sorted(loads.keys() | refused, key=rank):
        load = loads.get(name, NO_LOAD)
        gate = gates.get(name, {})
        wait_s = gate.get("wait_s")
        yield (
            name,
            f"{load['weight']:g}" if load["weight"] else "-",
            _share(load["weight"], weight),
            _share(load["rate"], rate),
            f"{load['running'] - load['paused']:,}",
            f"{load['paused']:,}",
            f"{load['waiting']:,}",
            "none" if wait_s is not None and wait_s < 0.05 else seconds_text(wait_s),
            counts_text(in_words(load["reasons"], REASONS)) if load["waiting"] else "",
            counts_text(in_words(gate.get("refused", {}), REFUSALS)),
        )


def token_rates(body: Mapping[str, Any]) -> tuple[float, float]:
    """Tokens generated, and tokens of prompts computed, per second of the last second that steps took."""
    if body["last_step_age_s"] is None or body["last_step_age_s"] > IDLE_S:
        return 0.0, 0.0
    seconds = tokens = prompt = 0.0
    for step in reversed(body["last_steps"]):
        seconds += step["seconds"]
        tokens += step["tokens"]
        prompt += step["prefill_tokens"]
        if seconds >= 1.0:
            break
    return ((tokens - prompt) / seconds, prompt / seconds) if seconds else (0.0, 0.0)


def _rank(resident: Mapping[str, Any]) -> tuple[int, int, int, int, str]:
    """Order adapters: the busiest first."""
    return (
        -resident["running"],
        -resident["holds"],
        TIERS.index(resident["tier"]),
        -resident["uses"],
        adapter_name(resident),
    )


def _resident_row(resident: Mapping[str, Any]) -> tuple[str, ...]:
    counts = (
        f"{resident[name]:,}" for name in ("pages", "prefix_pages", "running", "holds", "uses")
    )
    return adapter_name(resident), resident["tier"], *counts, "yes" if resident["pinned"] else ""


def _share(part: float, whole: float) -> str:
    if not whole:
        return "-"
    return "<1%" if 0 < part / whole < 0.005 else f"{part / whole:.0%}"


def _summary(body: Mapping[str, Any]) -> list[str]:
    ready = body["ready"]
    name = number_format(
        ready["dtype"], ready["memory"]["weights"], ready["geometry"]["is_kv_int8"]
    )
    on_device = sum(resident["tier"] == "device" for resident in body["residents"])
    queries = body["prefix_queries"]
    hits = body["prefix_hits"]
    share = f" ({hits / queries:.1%})" if queries else ""
    generated, prompt = token_rates(body)
    p95 = "".join(
        f"; {path} p95 {seconds_text(seconds)}" for path, seconds in body["load_p95_s"].items()
    )
    return [
        f"{body['model']} on {ready['device']}, {name}: {body['running']:,} running ({body['base_running']:,} base, "
        f"{num_paused(body):,} paused), {body['waiting']:,} waiting, {on_device:,} of {body['slots']:,} adapter slots "
        "in use",
        f"waiting     {counts_text(in_words(body['waiting_reasons'], REASONS))}",
        f"steps       {_step_times(body)}; {body['num_steps']:,} since start",
        f"tokens/s    {generated:,.0f} generated, {prompt:,.0f} of prompts",
        f"pages       {ready['memory']['num_pages']:,}: {counts_text(body['pages'])}",
        f"host pages  {ready['memory']['host_pages']:,}: {counts_text(body['host_pages'])}",
        f"prefix      {hits:,} of {queries:,} prompt tokens found{share}",
        *(f"{name:11} {counts_text(body[name])}" for name in ("evictions", "preemptions")),
        f"loads       {counts_text(body['loads'])}{p95}",
    ]


def _step_times(body: Mapping[str, Any]) -> str:
    times = sorted(step["seconds"] for step in body["last_steps"])
    if not times:
        return "-"
    p95_s = times[math.ceil(0.95 * len(times)) - 1]
    return f"{seconds_text(statistics.median(times))}, p95 {seconds_text(p95_s)}"
