"""What a metrics page has, and what PromQL expressions ask of it: names, labels, values of labels."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from prometheus_client.parser import text_string_to_metric_families

SCRAPE_LABELS = {"job", "instance"}
"""What Prometheus adds to everything it scrapes."""
FOREIGN = {
    "up": SCRAPE_LABELS,
    "ALERTS": {*SCRAPE_LABELS, "alertname", "alertstate", "severity", "tenant"},
}
"""Series that Prometheus makes itself."""
_SELECTOR = re.compile(r"\b([a-z_]+:\w+(?::\w+)?|manylora_\w+|up|ALERTS)\b\s*(\{[^{}]*\})?")
_MATCHER = re.compile(r'(\w+)\s*(?:=~|!~|!=|=)\s*"([^"]*)"')
_GROUPING = re.compile(r"\bby\s*\(([^()]*)\)")

Series = Mapping[str, Mapping[str, set[str]]]
"""Values by label by name of a sample."""


@dataclass(frozen=True, slots=True)
class Question:
    """What one expression asks for."""

    expr: str
    names: dict[str, dict[str, set[str]]] = field(default_factory=dict)
    """By name, the labels that are matched and the values they are matched with, without variables."""
    grouped_by: set[str] = field(default_factory=set)


def series_of(page: str) -> dict[str, dict[str, set[str]]]:
    """The samples of a page."""
    series: dict[str, dict[str, set[str]]] = {}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            labels = series.setdefault(sample.name, defaultdict(set))
            for label, value in sample.labels.items():
                labels[label].add(value)
    return series


def families_of(page: str) -> dict[str, set[str]]:
    """Names of samples by family: a histogram's three are one family."""
    return {
        family.name: {sample.name for sample in family.samples}
        for family in text_string_to_metric_families(page)
    }


def question(expr: str) -> Question:
    """Read an expression. Knows as much of PromQL as Manylora's own expressions use."""
    asked = Question(expr)
    for group in _GROUPING.findall(expr):
        asked.grouped_by.update(label.strip() for label in group.split(","))
    for name, matchers in _SELECTOR.findall(_GROUPING.sub("", expr)):
        labels = asked.names.setdefault(name, {})
        for label, value in _MATCHER.findall(matchers):
            values = value.split("|") if value and "$" not in value and ".*" not in value else []
            labels.setdefault(label, set()).update(values)
    return asked


def wrong_with(asked: Question, known: Series, shown: Iterable[str] = ()) -> list[str]:
    """Why the expression finds nothing, or shows a label that is not there; empty when it is right.

    Args:
        asked: The expression.
        known: All that there is.
        shown: Labels in the legend.
    """
    if not asked.names:
        return ["it asks for nothing that is known"]
    wrong = []
    for name, matched in asked.names.items():
        if name not in known and name not in FOREIGN:
            wrong.append(f"there is no {name}")
            continue
        labels = {
            **{label: set() for label in FOREIGN.get(name, SCRAPE_LABELS)},
            **known.get(name, {}),
        }
        wrong += [
            f"{name} has no label {label}" for label in {*matched, *asked.grouped_by} - set(labels)
        ]
        for label, values in matched.items():
            if (
                missing := values - labels.get(label, set())
                if label not in SCRAPE_LABELS and name in known
                else set()
            ):
                wrong.append(f"{name} has no {label} {sorted(missing)}")
        left = asked.grouped_by or set(labels)
        wrong += [f"the legend shows {label}, which is not left" for label in set(shown) - left]
    return wrong
