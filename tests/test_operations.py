"""Rules and dashboards ask for what Manylora's metrics page has, and every alert does what it says."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
from pathlib import Path

import pytest
import yaml

from api_adapters import upload
from api_server import BASE, api
from fake_cluster import gateway_before
from manylora.engine.request import ErrorInfo
from manylora.engine.status import ResidentAdapter
from metric_names import Series, families_of, question, series_of, wrong_with
from operations_files import BOARDS, ROOT, RULES, alerts, boards, expressions, panels, rules
from system_tools import require

NOT_SHOWN: set[str] = set()
"""Families of the page that no panel and no rule has use for."""


async def _page(folder: Path) -> str:
    async with api(folder) as opened:
        client = await opened.tenant("acme")
        digest = (await upload(client, "pirate")).json()["digest"]
        opened.engine.residents = [
            ResidentAdapter(digest=digest, tier=tier, pages=2, running=1)
            for tier in ("device", "host")
        ]
        for body in ({"model": BASE}, {"model": "pirate", "max_tokens": 90}):
            assert (
                await client.post("/v1/completions", json={"prompt": "x", **body})
            ).status_code == 200
        opened.engine.refusal = ErrorInfo(kind="capacity", code="engine_overloaded", message="full")
        assert (
            await client.post("/v1/completions", json={"model": BASE, "prompt": "x"})
        ).status_code == 503
        own = (await opened.admin.get("/metrics")).text
        async with gateway_before(opened) as (gateway, _):
            return own + await gateway.metrics_page()


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The metrics page of a server that had requests, good ones and bad, and that of a gateway before it."""
    return asyncio.run(_page(tmp_path_factory.mktemp("page")))


@pytest.fixture(scope="module")
def known(page: str) -> Series:
    """The page's series, and what rules make of them."""
    recorded = {
        rule["record"]: {label: set[str]() for label in question(rule["expr"]).grouped_by}
        for rule in rules()
        if "record" in rule
    }
    return {**series_of(page), **recorded}


def test_rules_and_panels_ask_for_what_there_is(known: Series) -> None:
    asked = list(expressions())
    assert len(asked) > 60
    wrong = {
        where: found
        for where, expr, shown in asked
        if (found := wrong_with(question(expr), known, shown))
    }
    assert wrong == {}


def test_every_metric_is_shown(page: str) -> None:
    asked = {name for _, expr, _ in expressions() for name in question(expr).names}
    forgotten = {family for family, samples in families_of(page).items() if not samples & asked}
    assert {family for family in forgotten if family.startswith("manylora_")} == NOT_SHOWN


@pytest.mark.parametrize(
    ("expr", "why"),
    [
        ("rate(manylora_request_total[5m])", "there is no manylora_request_total"),
        (
            "sum by (adaptor) (manylora_requests_total)",
            "manylora_requests_total has no label adaptor",
        ),
        ('manylora_requests_total{tier="device"}', "manylora_requests_total has no label tier"),
        ('manylora_pages{kind=~"kv|weights"}', "manylora_pages has no kind ['weights']"),
        (
            'manylora_ttft_seconds_bucket{le="3.0"}',
            "manylora_ttft_seconds_bucket has no le ['3.0']",
        ),
        ("sum by (kind) (manylora_pages)", "the legend shows tenant, which is not left"),
        ("instance:manylora_pages:ratio", "there is no instance:manylora_pages:ratio"),
        ("vector(1)", "it asks for nothing that is known"),
    ],
)
def test_a_wrong_expression_is_noticed(expr: str, why: str, known: Series) -> None:
    assert why in wrong_with(question(expr), known, {"tenant"} if "legend" in why else set())


def promtool(*arguments: object, folder: Path = RULES.parent) -> subprocess.CompletedProcess[str]:
    command = [require("promtool", package="prometheus"), *map(str, arguments)]
    return subprocess.run(command, cwd=folder, check=False, capture_output=True, text=True)


def test_prometheus_takes_configuration_and_rules() -> None:
    checked = promtool("check", "config", "prometheus.yaml")
    assert checked.returncode == 0, checked.stderr
    assert f"{len(rules())} rules found" in checked.stdout


def test_prometheus_takes_the_admins_key_where_there_is_no_port_for_metrics(tmp_path: Path) -> None:
    text = (RULES.parent / "prometheus.yaml").read_text()
    uncommented = re.sub(
        r"^    # (authorization:|  credentials_file:)", r"    \1", text, flags=re.MULTILINE
    )
    (job,) = yaml.safe_load(uncommented)["scrape_configs"]
    assert set(job["authorization"]) == {"credentials_file"}
    (tmp_path / "key").touch()
    (tmp_path / "prometheus.yaml").write_text(
        uncommented.replace("/etc/prometheus/manylora-admin.key", "key")
    )
    (tmp_path / "rules.yaml").write_text(RULES.read_text())
    checked = promtool("check", "config", "prometheus.yaml", folder=tmp_path)
    assert checked.returncode == 0, checked.stderr


def test_alerts_fire_and_stay_silent_as_their_cases_say() -> None:
    tested = promtool("test", "rules", "rules_test.yaml")
    assert tested.returncode == 0, tested.stdout + tested.stderr


@pytest.mark.parametrize("instead", ["vector(1) > 2", "vector(1)"], ids=["never", "always"])
def test_no_alert_can_be_changed_unnoticed(instead: str, tmp_path: Path) -> None:
    content = yaml.safe_load(RULES.read_text())
    for group in content["groups"]:
        for rule in group["rules"]:
            if "alert" in rule:
                rule["expr"] = instead
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump(content))
    cases = RULES.with_name("rules_test.yaml").read_text()
    (tmp_path / "rules_test.yaml").write_text(cases)
    tested = promtool("test", "rules", "rules_test.yaml", folder=tmp_path)
    assert tested.returncode == 1
    assert set(alerts()) == {
        name
        for name in alerts()
        if re.search(rf'alertname=\W*"{name}\W', tested.stderr + tested.stdout)
    }


def test_alerts_say_what_to_do() -> None:
    guide = (ROOT / "docs" / "operations.md").read_text()
    assert set(re.findall(r"^\| `(Manylora\w+)` ", guide, re.MULTILINE)) == set(alerts())
    for name, alert in alerts().items():
        assert alert["labels"]["severity"] in ("critical", "warning"), name
        assert set(alert["annotations"]) == {"summary", "description"}, name
        assert len(alert["annotations"]["description"]) > 80, name


def test_dashboards_can_be_imported_anywhere() -> None:
    assert {name: board["uid"] for name, board in boards().items()} == {
        "manylora-pool": "manylora-pool",
        "manylora-service": "manylora-service",
    }
    for board in boards().values():
        source, *variables = board["templating"]["list"]
        assert (source["name"], source["type"], source["query"]) == (
            "DS_PROMETHEUS",
            "datasource",
            "prometheus",
        )
        assert [variable["name"] for variable in variables] == ["instance", "tenant", "adapter"]
        assert all(variable["includeAll"] and variable["multi"] for variable in variables)
        text = json.dumps(board)
        chosen = '"datasource": {"type": "prometheus", "uid": "${DS_PROMETHEUS}"}'
        assert text.count('"datasource":') == text.count(chosen) > len(panels(board))
        assert board["schemaVersion"] == 39


def test_panels_are_explained_and_do_not_overlap() -> None:
    for name, board in boards().items():
        ids = [panel["id"] for panel in board["panels"]]
        assert len(set(ids)) == len(ids)
        taken: set[tuple[int, int]] = set()
        for panel in board["panels"]:
            place = panel["gridPos"]
            assert place["x"] + place["w"] <= 24
            cells = {
                (place["x"] + right, place["y"] + down)
                for right in range(place["w"])
                for down in range(place["h"])
            }
            assert not cells & taken, (name, panel["title"])
            taken |= cells
        for panel in panels(board):
            assert len(panel["description"]) > 40, (name, panel["title"])
            assert panel["targets"]


def test_panels_name_alerts_and_settings_that_exist() -> None:
    from manylora.server.settings import setting_names

    texts = " ".join(path.read_text() for path in (*BOARDS, RULES))
    assert set(re.findall(r"\bManylora[A-Z]\w+", texts)) <= set(alerts())
    sections = "|".join({name.partition(".")[0] for name in setting_names()})
    assert {
        found
        for found in re.findall(rf"\b(?:{sections})\.[a-z]\w+", texts)
        if found != "server.metrics"
    } <= set(setting_names())
