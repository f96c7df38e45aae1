"""What `deploy/` says about Manylora is true: every variable is a setting, every path is where the image has it."""

from __future__ import annotations

import configparser
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import typer.main
import yaml

from manylora.cli import make_app
from manylora.config import Config
from manylora.errors import ConfigError
from manylora.server.auth.admin_key import admin_key
from manylora.server.http.listen import STOP_S
from manylora.server.process.drain import SETTLE_S
from manylora.server.settings import load_config

DEPLOY = Path(__file__).parents[1] / "deploy"


def services() -> dict[str, dict[str, Any]]:
    return dict(yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"])


def service() -> dict[str, Any]:
    return services()["manylora"]


def settings_of_compose() -> Config:
    return load_config({}, {name: str(value) for name, value in service()["environment"].items()})


def test_compose_starts_manylora_with_settings_that_exist() -> None:
    registry = settings_of_compose().registry
    assert str(registry.database_url).startswith("postgresql://manylora:")
    assert registry.s3_place == ("manylora", "adapters")


def test_compose_and_the_image_have_what_the_settings_name() -> None:
    compose, image = service(), (DEPLOY / "Dockerfile").read_text()
    mounts = [str(volume).removesuffix(":ro").rpartition(":")[2] for volume in compose["volumes"]]
    assert settings_of_compose().model.path in mounts
    assert "/data" in mounts
    assert '"--data-dir", "/data"' in image
    assert "ARG EXTRAS=cluster,postgres,s3" in image
    assert "/src[${EXTRAS}]" in image
    assert f":{re.findall(r'EXPOSE ([0-9]+)', image)[0]}" in compose["ports"][0]


def test_every_secret_of_compose_comes_from_outside() -> None:
    text = (DEPLOY / "compose.yaml").read_text()
    secrets = re.findall(r"^ +(\w*(?:KEY|PEPPER|PASSWORD)): (.*)$", text, re.MULTILINE)
    assert len(secrets) == 7
    assert [name for name, value in secrets if not value.startswith("${")] == []


def test_compose_gives_requests_their_time_to_finish() -> None:
    assert (
        int(service()["stop_grace_period"].removesuffix("s")) > settings_of_compose().server.drain_s
    )


class Override(yaml.SafeLoader):
    """YAML with Compose's tag for what is not taken over."""


Override.add_constructor("!reset", lambda _loader, _node: None)


def cluster_services() -> dict[str, dict[str, Any]]:
    """What Compose makes of both files, in the parts that the second one uses."""
    first = services()
    text = (DEPLOY / "compose.cluster.yaml").read_text()
    second = yaml.load(text, Override)
    assert set(yaml.load(text, Override)["volumes"]) == {"replica-0", "replica-1"}
    for name, changes in second["services"].items():
        extended = changes.pop("extends", {"file": "compose.yaml", "service": name})
        assert extended["file"] == "compose.yaml"
        base = dict(services()[extended["service"]])
        targets = {
            str(volume).removesuffix(":ro").rpartition(":")[2]: volume for volume in base["volumes"]
        }
        for volume in changes.pop("volumes", ()):
            targets[volume.rpartition(":")[2]] = volume
        base["volumes"] = list(targets.values())
        base["environment"] = {**base["environment"], **changes.pop("environment")}
        first[name] = {**base, **changes}
    return first


def test_compose_starts_a_gateway_and_replicas_that_find_each_other() -> None:
    found = cluster_services()
    command = typer.main.get_command(make_app()).commands["serve"]  # type: ignore[attr-defined]
    roles = {
        name: each["command"]
        for name, each in found.items()
        if each.get("command", ["", ""])[0] == "serve"
    }
    assert {name: words[words.index("--role") + 1] for name, words in roles.items()} == {
        "manylora": "gateway",
        "replica-0": "replica",
        "replica-1": "replica",
    }
    for name, words in roles.items():
        with command.make_context("serve", words[1:]) as context:
            assert str(context.params["data_dir"]) == "/data"
        config = load_config(
            {}, {key: str(value) for key, value in found[name]["environment"].items()}
        )
        assert config.server.advertised_url == f"http://{name}:8000"
        assert (found[name].get("ports") is not None) == (name == "manylora")
    places = [
        volume for name in roles for volume in found[name]["volumes"] if volume.endswith(":/data")
    ]
    assert len(set(places)) == 3
    assert "cluster" in re.findall(r"ARG EXTRAS=(\S+)", (DEPLOY / "Dockerfile").read_text())[
        0
    ].split(",")


def mounted(name: str) -> dict[str, Path]:
    """Files of this repository by their path in the service's container."""
    parts = [
        str(volume).split(":")
        for volume in services()[name]["volumes"]
        if str(volume).startswith("./")
    ]
    return {target: DEPLOY / source for source, target, mode in parts if mode == "ro"}


def test_monitoring_runs_only_where_it_is_asked_for() -> None:
    monitoring = {
        name for name, found in services().items() if found.get("profiles") == ["monitoring"]
    }
    assert monitoring == {"prometheus", "grafana"}
    others = {name: found for name, found in services().items() if name not in monitoring}
    assert not any("profiles" in found for found in others.values())
    assert not any(monitoring & set(found.get("depends_on", ())) for found in others.values())
    assert all(
        port.startswith("127.0.0.1:")
        for found in services().values()
        for port in found.get("ports", ())
    )
    # Compose reads all variables in any case: one that monitoring alone needs must not be demanded of everybody.
    assert not any(
        ":?" in value
        for name in monitoring
        for value in services()[name].get("environment", {}).values()
    )


def test_prometheus_scrapes_the_port_that_manylora_has_for_it() -> None:
    (folder,) = mounted("prometheus").values()
    assert "--config.file=/etc/prometheus/prometheus.yaml" in services()["prometheus"]["command"]
    config = yaml.safe_load((folder / "prometheus.yaml").read_text())
    (job,) = config["scrape_configs"]
    assert job["static_configs"] == [
        {"targets": [f"manylora:{settings_of_compose().server.metrics_port}"]}
    ]
    assert all((folder / name).is_file() for name in config["rule_files"])


def test_grafana_finds_its_data_and_its_dashboards() -> None:
    folders = mounted("grafana")
    provisioning = folders["/etc/grafana/provisioning"]
    (source,) = yaml.safe_load((provisioning / "datasources" / "prometheus.yaml").read_text())[
        "datasources"
    ]
    assert (source["url"], source["isDefault"]) == ("http://prometheus:9090", True)
    (provider,) = yaml.safe_load((provisioning / "dashboards" / "manylora.yaml").read_text())[
        "providers"
    ]
    assert len(list(folders[provider["options"]["path"]].glob("*.json"))) == 2


class Unit(configparser.RawConfigParser):
    """A unit of systemd, where a name may come more than once and its case counts."""

    def __init__(self) -> None:
        super().__init__(strict=False, delimiters="=", comment_prefixes="#")
        self.optionxform = str  # type: ignore[assignment,method-assign]
        self.read(DEPLOY / "systemd" / "manylora.service")


def example_environment() -> dict[str, str]:
    """What the example sets, with the lines it offers."""
    text = (DEPLOY / "systemd" / "manylora.env.example").read_text()
    return dict(re.findall(r"^#?([A-Z][A-Z0-9_]*)=(.*)$", text, re.MULTILINE))


def test_systemd_starts_manylora_with_options_and_settings_that_exist() -> None:
    unit = Unit()["Service"]
    _, command, *words = shlex.split(unit["ExecStart"])
    serve = typer.main.get_command(make_app()).commands[command]  # type: ignore[attr-defined]
    known = {option for parameter in serve.params for option in parameter.opts}
    assert {word for word in words if word.startswith("--")} <= known
    assert words[words.index("--data-dir") + 1] == f"/var/lib/{unit['StateDirectory']}"
    assert f"XDG_CACHE_HOME=/var/cache/{unit['CacheDirectory']}" in unit["Environment"].split()
    found = load_config({}, example_environment())
    assert found.server.metrics_port is not None
    assert found.model.path == "/srv/models/base"


def test_systemd_gives_requests_their_time_to_finish() -> None:
    unit = Unit()["Service"]
    assert (unit["KillMode"], unit["KillSignal"]) == ("mixed", "SIGTERM")
    longest = load_config({}, example_environment()).server.drain_s + SETTLE_S + STOP_S
    assert int(unit["TimeoutStopSec"]) > longest + 10  # the engine ends after that
    assert "MemoryDenyWriteExecute" not in unit


def test_the_example_of_systemd_does_not_start_without_a_key(tmp_path: Path) -> None:
    given = example_environment()
    assert given["MANYLORA_ADMIN_KEY"] == ""
    with pytest.raises(ConfigError, match="at least 16"):
        admin_key(tmp_path, given)


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is missing")
def test_systemd_understands_the_unit(tmp_path: Path) -> None:
    text = (DEPLOY / "systemd" / "manylora.service").read_text()
    copy = tmp_path / "manylora.service"
    copy.write_text(text.replace("/opt/manylora/bin/manylora", "/bin/true"))
    verified = subprocess.run(
        ["systemd-analyze", "verify", str(copy)], check=False, capture_output=True, text=True
    )
    assert (verified.returncode, verified.stderr) == (0, "")
