"""What `deploy/` says about Weft is true: every variable is a setting, every path is where the image has it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from weft.config import Config
from weft.server.settings import load_config

DEPLOY = Path(__file__).parents[1] / "deploy"


def service() -> dict[str, Any]:
    return dict(yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]["weft"])


def settings_of_compose() -> Config:
    return load_config({}, {name: str(value) for name, value in service()["environment"].items()})


def test_compose_starts_weft_with_settings_that_exist() -> None:
    registry = settings_of_compose().registry
    assert str(registry.database_url).startswith("postgresql://weft:")
    assert registry.s3_place == ("weft", "adapters")


def test_compose_mounts_what_the_settings_name() -> None:
    compose, image = service(), (DEPLOY / "Dockerfile").read_text()
    mounts = [str(volume).removesuffix(":ro").rpartition(":")[2] for volume in compose["volumes"]]
    assert settings_of_compose().model.path in mounts
    assert "/data" in mounts
    assert '"--data-dir", "/data"' in image
    assert f":{re.findall(r'EXPOSE ([0-9]+)', image)[0]}" in compose["ports"][0]


def test_every_secret_of_compose_comes_from_outside() -> None:
    text = (DEPLOY / "compose.yaml").read_text()
    for name in ("WEFT_ADMIN_KEY", "WEFT_PEPPER", "POSTGRES_PASSWORD", "AWS_SECRET_ACCESS_KEY", "MINIO_ROOT_PASSWORD"):
        for value in re.findall(rf"^ +{name}: (.*)$", text, re.MULTILINE):
            assert value.startswith("${"), name


def test_compose_gives_requests_their_time_to_finish() -> None:
    assert int(service()["stop_grace_period"].removesuffix("s")) > settings_of_compose().server.drain_s


def test_the_image_installs_the_extras_that_compose_needs() -> None:
    assert "[postgres,s3]" in (DEPLOY / "Dockerfile").read_text()
