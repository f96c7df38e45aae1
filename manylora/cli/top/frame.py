"""What `manylora top` shows of one snapshot of the engine: a frame for a terminal, or one line."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from rich.console import ConsoleDimensions, Group, RenderableType
from rich.table import Table
from rich.text import Text

from manylora.cli.ps import TIERS, adapter_name
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

LABEL = 11
"""Width of the labels."""
BAR = {
    "kv": ("█", "cyan"),
    "prefix": ("▓", "blue"),
    "adapter": ("▒", "magenta"),
    "quarantine": ("░", "yellow"),
    "free": ("·", "bright_black"),
}
"""How a page of each kind is drawn."""
HEADER = ("ADAPTER", "TIER", "PAGES", "RUNNING", "WAITING", "HITS", "LOADS", "LOAD P95")
IDLE_S = 2.0
"""Without a step for so long, the engine counts as idle."""
TEXTS = ("TENANT", "WHY", "REFUSED")
"""Columns of tenants that may be cut."""
WIDE_ONLY = ("WEIGHT", "WHY")
"""Columns of tenants left out on a terminal of fewer than `MIN_WIDE` columns."""
MIN_WIDE = 100
MIN_TENANT_LINES = 4
"""An empty line, the header, one tenant, the others."""


@dataclass(frozen=True, slots=True)
class TenantRow:
    """Requests and refusals of one tenant, or of several together."""

    name: str
    numbers: Mapping[str, float]
    """Weight, rate, and requests in the step, paused and waiting."""
    wait_s: float | None
    """What a new request is predicted to wait; of several tenants the longest."""
    reasons: Counter[str]
    refused: Counter[str]


def frame(
    body: Mapping[str, Any], age_s: float, size: ConsoleDimensions, trouble: str | None = None
) -> RenderableType:
    """A snapshot for a terminal of this size.

    Args:
        body: As `GET /v1/engine` gives it, or a gateway's `GET /v1/servers`.
        age_s: How old it is.
        size: What there is room for.
        trouble: Why there is no newer one.
    """
    if "ready" not in body:
        return _servers(body, size.height, trouble)
    ready = body["ready"]
    name = number_format(
        ready["dtype"], ready["memory"]["weights"], ready["geometry"]["is_kv_int8"]
    )
    lines = [Text(f"{body['model']} on {ready['device']}, {name}", "bold")]
    if trouble is not None:
        lines.append(Text(trouble, "bold red"))
    for label, fact in _facts(body, age_s):
        lines.append(Text.assemble((label.ljust(LABEL), "bold"), fact))
        if label == "pages":
            lines.append(Text(" " * LABEL) + _bar(body["pages"], size.width - LABEL))
    shown: list[RenderableType] = [
        Text(line.plain, line.style, spans=line.spans, no_wrap=True, overflow="ellipsis")
        for line in lines
    ]
    room = size.height - len(lines)
    tenants = tenant_rows(body)
    num_lines = min(len(tenants) + 2, room // 2) if tenants else 0
    if num_lines >= min(len(tenants) + 2, MIN_TENANT_LINES) > 2:
        shown += [Text(), _tenants(tenants, num_lines - 2, size.width)]
        room -= num_lines
    return Group(*shown, Text(), _adapters(body, room - 2))


def line(body: Mapping[str, Any], age_s: float) -> str:
    """A snapshot in one line, for a file or a pipe."""
    if "ready" not in body:
        return servers_line(body)
    generated, prompt = token_rates(body, age_s)
    rates = f"{generated:,.0f} generated + {prompt:,.0f} prompt tokens/s"
    requests = f"{_running(body)}, {body['waiting']:,} waiting"
    return f"{requests}; step {_step_times(body)}; {rates}; pages {counts_text(body['pages'])}"


def token_rates(body: Mapping[str, Any], age_s: float) -> tuple[float, float]:
    """Tokens generated, and tokens of prompts computed, per second of the last second that steps took."""
    last_age_s = body["last_step_age_s"]
    if last_age_s is None or last_age_s + age_s > IDLE_S:
        return 0.0, 0.0
    seconds = tokens = prompt = 0.0
    for step in reversed(body["last_steps"]):
        seconds += step["seconds"]
        tokens += step["tokens"]
        prompt += step["prefill_tokens"]
        if seconds >= 1.0:
            break
    return ((tokens - prompt) / seconds, prompt / seconds) if seconds else (0.0, 0.0)


def shares(counts: Sequence[int], width: int) -> list[int]:
    """Divide `width` about in proportion to counts; each count above 0 gets at least 1."""
    total, parts = sum(counts), [int(count > 0) for count in counts]
    rest = width - sum(parts)
    if not total or rest < 0:
        return [0] * len(counts)
    ends = [round(rest * upto / total) for upto in accumulate(counts)]
    return [part + end - start for part, start, end in zip(parts, [0, *ends], ends, strict=False)]


def tenant_rows(body: Mapping[str, Any]) -> list[TenantRow]:
    """Tenants with requests in the engine, and those with refusals; the most served first."""
    admission, rows = body["admission"], []
    for name in body["tenants"].keys() | {
        name for name, gate in admission.items() if gate["refused"]
    }:
        load, gate = body["tenants"].get(name, {}), admission.get(name, {})
        numbers = {
            each: load.get(each, 0) for each in ("weight", "rate", "running", "paused", "waiting")
        }
        numbers["in step"] = numbers["running"] - numbers["paused"]
        reasons, refused = Counter(load.get("reasons", {})), Counter(gate.get("refused", {}))
        rows.append(TenantRow(name, numbers, gate.get("wait_s"), reasons, refused))
    most = ("rate", "in step", "waiting")
    return sorted(
        rows,
        key=lambda row: (*(-row.numbers[each] for each in most), -row.refused.total(), row.name),
    )


def cells(rows: Sequence[TenantRow], num_shown: int) -> Iterator[dict[str, str]]:
    """The first `num_shown` rows as texts by column, and one for the sum of the others.

    DUE is the share of the service that the weight gives, SERVED the share of the last seconds, WAIT what a new request
    is predicted to wait.
    """
    weight, rate = (sum(row.numbers[each] for row in rows) for each in ("weight", "rate"))
    shown = [*rows[:num_shown], *([_together(rows[num_shown:])] if len(rows) > num_shown else [])]
    for row in shown:
        yield {
            "TENANT": row.name,
            "WEIGHT": f"{row.numbers['weight']:g}" if row.numbers["weight"] else "-",
            "DUE": _share(row.numbers["weight"], weight),
            "SERVED": _share(row.numbers["rate"], rate),
            **{each.upper(): f"{row.numbers[each]:,}" for each in ("in step", "paused", "waiting")},
            "WAIT": "none"
            if row.wait_s is not None and row.wait_s < 0.05
            else seconds_text(row.wait_s),
            "WHY": counts_text(in_words(row.reasons, REASONS)) if row.numbers["waiting"] else "",
            "REFUSED": counts_text(in_words(row.refused, REFUSALS)),
        }


def _together(rows: Sequence[TenantRow]) -> TenantRow:
    return TenantRow(
        f"{len(rows):,} others",
        {each: sum(row.numbers[each] for row in rows) for each in rows[0].numbers},
        max((row.wait_s for row in rows if row.wait_s is not None), default=None),
        sum((row.reasons for row in rows), Counter[str]()),
        sum((row.refused for row in rows), Counter[str]()),
    )


def _share(part: float, whole: float) -> str:
    if not whole:
        return "-"
    return "<1%" if 0 < part / whole < 0.005 else f"{part / whole:.0%}"


def _facts(body: Mapping[str, Any], age_s: float) -> Iterator[tuple[str, str]]:
    generated, prompt = token_rates(body, age_s)
    idle_s = (body["last_step_age_s"] or 0.0) + age_s
    idle = f", idle for {idle_s:,.0f} s" if body["num_steps"] and idle_s > IDLE_S else ""
    reasons = (
        f" ({counts_text(in_words(body['waiting_reasons'], REASONS))})" if body["waiting"] else ""
    )
    yield "requests", f"{_running(body)}, {body['waiting']:,} waiting{reasons}"
    yield "steps", f"{_step_times(body)}; {body['num_steps']:,} since start{idle}"
    yield "tokens/s", f"{generated:,.0f} generated, {prompt:,.0f} of prompts"
    yield "pages", f"{sum(body['pages'].values()):,}: {counts_text(body['pages'])}"
    p95 = (f"{path} p95 {seconds_text(seconds)}" for path, seconds in body["load_p95_s"].items())
    yield "loads", "; ".join([counts_text(body["loads"]), *p95])
    on_device = sum(resident["tier"] == "device" for resident in body["residents"])
    yield (
        "adapters",
        f"{on_device:,} of {body['slots']:,} slots in use, {len(body['residents']):,} in memory",
    )


def _step_times(body: Mapping[str, Any]) -> str:
    times = sorted(step["seconds"] for step in body["last_steps"])
    if not times:
        return "-"
    return f"{seconds_text(statistics.median(times))}, p95 {seconds_text(times[math.ceil(0.95 * len(times)) - 1])}"


def _running(body: Mapping[str, Any]) -> str:
    return (
        f"{body['running']:,} running ({body['base_running']:,} base, {num_paused(body):,} paused)"
    )


def _bar(pages: Mapping[str, int], width: int) -> Text:
    parts = shares([pages[kind] for kind in BAR], max(width, 0))
    return Text.assemble(
        *((glyph * part, colour) for (glyph, colour), part in zip(BAR.values(), parts, strict=True))
    )


def _tenants(rows: Sequence[TenantRow], height: int, width: int) -> Table:
    """The most served tenants, as many as there is room for, and one row for the others. Only text columns are cut."""
    table = Table(box=None, pad_edge=False, header_style="bold", expand=False)
    shown = list(cells(rows, len(rows) if len(rows) <= height else height - 1))
    header = [name for name in shown[0] if width >= MIN_WIDE or name not in WIDE_ONLY]
    for name in header:
        is_text = name in TEXTS
        longest = max(len(name), *(len(row[name]) for row in shown))
        table.add_column(
            name, justify="left" if is_text else "right", width=None if is_text else longest
        )
    for row in shown:
        table.add_row(*(Text(row[name], no_wrap=True, overflow="ellipsis") for name in header))
    return table


def _servers(body: Mapping[str, Any], height: int, trouble: str | None) -> Group:
    """As many servers as there is room for; those in trouble are red."""
    rows = list(server_rows(body))
    styles = ["bold", *("" if row[2] == "ready" else "red" for row in rows)]
    table = zip(table_lines([SERVERS, *rows], LOADS), styles, strict=True)
    lines = [
        (servers_line(body), "bold"),
        *([(trouble, "bold red")] if trouble else []),
        ("", ""),
        *table,
    ]
    return Group(
        *(Text(text, style, no_wrap=True, overflow="ellipsis") for text, style in lines[:height])
    )


def _adapters(body: Mapping[str, Any], height: int) -> Table:
    """The busiest adapters first, as many as there is room for."""
    table = Table(box=None, pad_edge=False, header_style="bold", expand=False)
    for name in HEADER:
        is_text = name in HEADER[:2]
        table.add_column(
            name, justify="left" if is_text else "right", no_wrap=True, overflow="ellipsis"
        )
    ranked = sorted(body["residents"], key=_rank)
    num_shown = len(ranked) if len(ranked) <= height else max(height - 1, 0)
    for resident in ranked[:num_shown]:
        counts = (f"{resident[name]:,}" for name in ("pages", "running", "holds", "uses", "loads"))
        cells = (
            adapter_name(resident),
            resident["tier"],
            *counts,
            seconds_text(resident["load_p95_s"]),
        )
        table.add_row(
            *(Text(cell) for cell in cells), style="" if resident["running"] else "bright_black"
        )
    if height > 0 and num_shown < len(ranked):
        table.add_row(Text(f"and {len(ranked) - num_shown:,} more", "italic"))
    return table


def _rank(resident: Mapping[str, Any]) -> tuple[int, int, int, int, str]:
    busy = -resident["running"], -resident["holds"]
    return *busy, TIERS.index(resident["tier"]), -resident["uses"], adapter_name(resident)
