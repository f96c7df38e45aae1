"""What `deploy/` has for Prometheus and Grafana, read."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
RULES = ROOT / "deploy" / "prometheus" / "rules.yaml"
BOARDS = sorted((ROOT / "deploy" / "grafana" / "dashboards").glob("*.json"))


def rules() -> list[dict[str, Any]]:
    return [
        rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]
    ]


def alerts() -> dict[str, dict[str, Any]]:
    return {rule["alert"]: rule for rule in rules() if "alert" in rule}


def boards() -> dict[str, dict[str, Any]]:
    return {path.stem: json.loads(path.read_text()) for path in BOARDS}


def panels(board: dict[str, Any]) -> list[dict[str, Any]]:
    return [panel for panel in board["panels"] if panel["type"] != "row"]


def expressions() -> Iterator[tuple[str, str, set[str]]]:
    """Where it stands, the expression, and the labels that are shown of its result."""
    for rule in rules():
        notes = " ".join(rule.get("annotations", {}).values())
        yield (
            rule.get("alert") or rule["record"],
            rule["expr"],
            set(re.findall(r"\$labels\.(\w+)", notes)),
        )
    for name, board in boards().items():
        for panel in panels(board):
            for target in panel["targets"]:
                yield (
                    f"{name}: {panel['title']}",
                    target["expr"],
                    set(re.findall(r"{{(\w+)}}", target["legendFormat"])),
                )
        for variable in board["templating"]["list"][1:]:
            asked = re.fullmatch(r"label_values\((.*), (\w+)\)", variable["query"]["query"])
            assert asked, variable
            yield f"{name}: ${variable['name']}", asked[1], {asked[2]}
        for annotation in board["annotations"]["list"]:
            yield f"{name}: {annotation['name']}", annotation["expr"], set()
