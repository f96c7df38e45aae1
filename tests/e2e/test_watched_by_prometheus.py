"""A real Prometheus with the files of `deploy/` scrapes a real server: every rule and panel is answered."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from idleness import wait_until
from manylora_server import ADMIN_KEY, ManyloraServer, free_port, manylora_server
from operations_files import RULES, expressions, rules
from system_tools import require

QUIET = {
    "manylora-service: Errors by tenant",
    "manylora-service: Refused by limits and by predicted wait",
    "manylora-service: Alerts",
    "manylora-pool: Alerts",
    *(
        f"manylora-service: {title}"
        for title in (
            *("Replicas ready", "Work that waits, by replica", "Answers of gateways by class"),
            *("Sent to a second replica", "Answers cut"),
        )
    ),
}
"""Panels that have nothing to show where nothing went wrong, and there is no gateway."""


@contextmanager
def prometheus(folder: Path, server: ManyloraServer, metrics_port: int) -> Iterator[httpx.Client]:
    """Prometheus as `deploy/` configures it, by the metrics' own port and once more with the admin's key."""
    program = require("prometheus", package="prometheus")
    text = RULES.with_name("prometheus.yaml").read_text()
    by_port = yaml.safe_load(text)
    by_key = yaml.safe_load(
        re.sub(r"^    # (authorization:|  credentials_file:)", r"    \1", text, flags=re.MULTILINE)
    )
    (job,), (keyed,) = by_port["scrape_configs"], by_key["scrape_configs"]
    job["static_configs"] = [{"targets": [f"127.0.0.1:{metrics_port}"]}]
    keyed["static_configs"] = [{"targets": [server.url.removeprefix("http://")]}]
    keyed["job_name"] = "by-key"
    key = folder / "key"
    key.write_text(f"{ADMIN_KEY}\n")
    keyed["authorization"]["credentials_file"] = str(key)
    config = {**by_port, "scrape_configs": [job, keyed], "rule_files": [str(RULES)]}
    config["global"] = dict.fromkeys(
        ("scrape_interval", "scrape_timeout", "evaluation_interval"), "1s"
    )
    (folder / "prometheus.yaml").write_text(yaml.safe_dump(config))
    address = f"127.0.0.1:{free_port()}"
    options = (
        "--config.file=prometheus.yaml",
        "--storage.tsdb.path=data",
        f"--web.listen-address={address}",
    )
    with (folder / "prometheus.log").open("wb") as log:
        process = subprocess.Popen(
            [program, *options], cwd=folder, stdout=log, stderr=subprocess.STDOUT
        )
    try:
        with httpx.Client(
            base_url=f"http://{address}/api/v1", timeout=10, trust_env=False
        ) as client:
            yield client
    finally:
        process.terminate()
        process.wait(timeout=30)


def answered(client: httpx.Client, expr: str) -> list[dict[str, Any]]:
    """What Prometheus says to an expression."""
    for variable, value in {
        "$__rate_interval": "1m",
        "$instance": ".*",
        "$tenant": ".*",
        "$adapter": ".*",
    }.items():
        expr = expr.replace(variable, value)
    answer = client.get("/query", params={"query": expr})
    assert answer.status_code == 200, (expr, answer.text)
    return list(answer.json()["data"]["result"])


def is_up(client: httpx.Client) -> bool:
    try:
        if (
            client.get("/query", params={"query": "1"}).status_code
            == httpx.codes.SERVICE_UNAVAILABLE
        ):
            return False  # it still starts
        found = answered(client, "up == 1 and on (job) count_over_time(up[1m]) >= 3")
    except httpx.TransportError:
        return False
    return {series["metric"]["job"] for series in found} == {"manylora", "by-key"}


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """Prometheus, after it has seen some requests."""
    folder, port = tmp_path_factory.mktemp("watched"), free_port()
    with manylora_server(folder / "manylora", "--metrics-port", str(port)) as server:
        server.publish("shop", "pirate")
        server.ask("shop", "pirate", "When are you open?")
        with prometheus(folder, server, port) as client:
            wait_until(lambda: is_up(client))
            for model in ("pirate", "manylora-demo"):
                server.ask("shop", model, "When are you open?")
            wait_until(lambda: answered(client, "job:manylora_ttft_slow:ratio_rate5m") != [])
            yield client


def test_every_panel_shows_something(watched: httpx.Client) -> None:
    asked = {where: expr for where, expr, _ in expressions() if where.startswith("manylora-")}
    wait_until(
        lambda: {where for where, expr in asked.items() if not answered(watched, expr)} == QUIET
    )


def test_every_rule_is_evaluated_and_no_alert_fires(watched: httpx.Client) -> None:
    def found() -> list[dict[str, Any]]:
        groups = watched.get("/rules").json()["data"]["groups"]
        return [rule for group in groups for rule in group["rules"]]

    wait_until(lambda: {rule["health"] for rule in found()} == {"ok"})
    assert len(found()) == len(rules())
    assert [rule["name"] for rule in found() if rule.get("alerts")] == []


def test_it_was_the_metrics_of_this_server(watched: httpx.Client) -> None:
    counts = 'sum by (job) (manylora_requests_total{tenant="shop"})'
    expected = {"manylora": "3", "by-key": "3"}
    wait_until(
        lambda: (
            {one["metric"]["job"]: one["value"][1] for one in answered(watched, counts)} == expected
        )
    )
