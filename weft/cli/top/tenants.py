"""The tenants in `weft top`: who is served, who waits and why. Knows nothing of terminals."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from weft.cli.table import REASONS, REFUSALS, counts_text, in_words

TEXTS = ("TENANT", "WHY", "REFUSED")
WIDE_ONLY = ("WEIGHT", "WHY")
"""Left out on a terminal of fewer than `MIN_WIDE` columns."""
MIN_WIDE = 100


@dataclass(slots=True)
class TenantRow:
    """What one tenant, or several together, have in the engine."""

    name: str
    weight: float = 0.0
    rate: float = 0.0
    in_step: int = 0
    paused: int = 0
    waiting: int = 0
    wait_s: float | None = None
    reasons: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)

    def add(self, other: TenantRow) -> None:
        """Count another row in; of the waits the longest is kept."""
        self.weight += other.weight
        self.rate += other.rate
        self.in_step += other.in_step
        self.paused += other.paused
        self.waiting += other.waiting
        self.wait_s = max((wait for wait in (self.wait_s, other.wait_s) if wait is not None), default=None)
        self.reasons += other.reasons
        self.refused += other.refused


def tenant_rows(body: Mapping[str, Any]) -> list[TenantRow]:
    """Tenants with requests in the engine, and those with refusals; the most served first."""
    admission, rows = body["admission"], []
    for name in body["tenants"].keys() | {name for name, gate in admission.items() if gate["refused"]}:
        load, gate = body["tenants"].get(name, {}), admission.get(name, {})
        paused = load.get("paused", 0)
        rows.append(
            TenantRow(
                name=name,
                weight=load.get("weight", 0.0),
                rate=load.get("rate", 0.0),
                in_step=load.get("running", 0) - paused,
                paused=paused,
                waiting=load.get("waiting", 0),
                wait_s=gate.get("wait_s"),
                reasons=Counter(load.get("reasons", {})),
                refused=Counter(gate.get("refused", {})),
            )
        )
    return sorted(rows, key=lambda row: (-row.rate, -row.in_step, -row.waiting, -row.refused.total(), row.name))


def cells(rows: Sequence[TenantRow], num_shown: int) -> Iterator[dict[str, str]]:
    """The first `num_shown` rows as texts by column, and one for the sum of the others.

    DUE is the share of the service that the weight gives, SERVED the share of the last seconds, WAIT what a new request
    is predicted to wait.
    """
    weight, rate = (sum(getattr(row, name) for row in rows) for name in ("weight", "rate"))
    shown = list(rows[:num_shown])
    if len(rows) > num_shown:
        others = TenantRow(f"{len(rows) - num_shown:,} others")
        for row in rows[num_shown:]:
            others.add(row)
        shown.append(others)
    for row in shown:
        yield {
            "TENANT": row.name,
            "WEIGHT": f"{row.weight:g}" if row.weight else "-",
            "DUE": _share(row.weight, weight),
            "SERVED": _share(row.rate, rate),
            "IN STEP": f"{row.in_step:,}",
            "PAUSED": f"{row.paused:,}",
            "WAITING": f"{row.waiting:,}",
            "WAIT": wait_text(row.wait_s),
            "WHY": counts_text(in_words(row.reasons, REASONS)) if row.waiting else "",
            "REFUSED": counts_text(in_words(row.refused, REFUSALS)),
        }


def wait_text(seconds: float | None) -> str:
    """A predicted wait; "-" where none is known."""
    if seconds is None:
        return "-"
    return "none" if seconds < 0.05 else f"{seconds:,.1f} s"


def _share(part: float, whole: float) -> str:
    if not whole:
        return "-"
    return "<1%" if 0 < part / whole < 0.005 else f"{part / whole:.0%}"
