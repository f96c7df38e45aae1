"""The manifest of an inference pool is what Kubernetes takes, and agrees with Manylora and with itself."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from api_server import Api
from gateway_schemas import SCHEMAS
from manylora.server.http.listen import STOP_S
from manylora.server.process.drain import SETTLE_S
from manylora.server.settings import load_config
from system_tools import require_module

pytestmark = pytest.mark.anyio
ROOT = Path(__file__).parents[1]
FILE = ROOT / "deploy" / "kubernetes" / "inference-pool.yaml"
KUBERNETES = "1.33"


def resources() -> dict[str, dict[str, Any]]:
    """By kind: there is one of each."""
    found = list(yaml.safe_load_all(FILE.read_text()))
    by_kind = {resource["kind"]: resource for resource in found}
    assert len(by_kind) == len(found)
    return by_kind


def check(resource: dict[str, Any]) -> None:
    if resource["kind"] in SCHEMAS:
        jsonschema.validate(resource, SCHEMAS[resource["kind"]])
    else:
        kubernetes().validate(resource, KUBERNETES, strict=True)


def kubernetes() -> Any:
    return require_module("kubernetes_validate", package="kubernetes-validate")


def container() -> dict[str, Any]:
    (only,) = resources()["Deployment"]["spec"]["template"]["spec"]["containers"]
    return dict(only)


def test_kubernetes_takes_every_resource() -> None:
    kinds = (
        "Deployment",
        "Service",
        "NetworkPolicy",
        "PodDisruptionBudget",
        "InferencePool",
        "HTTPRoute",
    )
    assert set(resources()) == set(kinds)
    for resource in resources().values():
        check(resource)


@pytest.mark.parametrize(
    ("kind", "path", "wrong"),
    [
        ("Deployment", ("spec", "replicas"), "two"),
        ("Deployment", ("spec", "template", "spec", "terminationGracePeriod"), 60),
        ("Service", ("spec", "ports"), {"port": 80}),
        ("NetworkPolicy", ("spec", "policyType"), ["Ingress"]),
        ("InferencePool", ("spec", "targetPortNumber"), 8000),
        ("InferencePool", ("spec", "endpointPickerRef", "failureMode"), "Fail"),
        ("InferencePool", ("apiVersion",), "inference.networking.x-k8s.io/v1alpha2"),
        ("HTTPRoute", ("spec", "rules"), []),
    ],
)
def test_a_wrong_field_is_noticed(kind: str, path: tuple[str, ...], wrong: object) -> None:
    resource = copy.deepcopy(resources()[kind])
    parent = resource
    for name in path[:-1]:
        parent = parent[name]
    parent[path[-1]] = wrong
    with pytest.raises((jsonschema.ValidationError, kubernetes().ValidationError)):
        check(resource)


def test_manylora_starts_with_settings_that_exist_and_shows_vllms_metrics() -> None:
    given = {entry["name"]: entry["value"] for entry in container()["env"]}
    settings = {name: value for name, value in given.items() if name.startswith("MANYLORA_")}
    config = load_config({}, settings)
    assert config.server.metrics_aliases == "vllm"
    assert config.registry.s3_place == ("manylora", "adapters")
    mounts = {mount["mountPath"]: mount["name"] for mount in container()["volumeMounts"]}
    assert {config.model.path, "/data", "/tmp"} <= set(mounts)
    volumes = {
        volume["name"]
        for volume in resources()["Deployment"]["spec"]["template"]["spec"]["volumes"]
    }
    assert set(mounts.values()) == volumes
    ports = {port["name"]: port["containerPort"] for port in container()["ports"]}
    assert ports == {"http": 8000, "metrics": config.server.metrics_port}
    image = (ROOT / "deploy" / "Dockerfile").read_text()
    user = resources()["Deployment"]["spec"]["template"]["spec"]["securityContext"]["runAsUser"]
    assert f"--uid {user} manylora" in image
    assert f"EXPOSE {ports['http']}" in image
    assert (
        f"--model-server-metrics-port={ports['metrics']}"
        in (ROOT / "docs" / "inference-pool.md").read_text()
    )
    assert config.memory.gib is not None
    assert config.memory.host_gib is not None
    limit = container()["resources"]["limits"]["memory"]
    assert config.memory.gib + config.memory.host_gib + 2 < int(limit.removesuffix("Gi"))


def test_every_secret_comes_from_the_secret_that_the_first_lines_make() -> None:
    text = FILE.read_text()
    made = set(re.findall(r"--from-literal=(\w+)=", text))
    assert made >= {
        "MANYLORA_ADMIN_KEY",
        "MANYLORA_PEPPER",
        "MANYLORA_REGISTRY__DATABASE_URL",
        "AWS_SECRET_ACCESS_KEY",
    }
    assert not made & {entry["name"] for entry in container()["env"]}
    assert container()["envFrom"] == [{"secretRef": {"name": "manylora"}}]
    assert "kubectl create secret generic manylora " in text


def test_everything_means_the_same_pods_and_ports() -> None:
    found = resources()
    labels = found["Deployment"]["spec"]["template"]["metadata"]["labels"]
    for selected in (
        found["Deployment"]["spec"]["selector"]["matchLabels"],
        found["Service"]["spec"]["selector"],
        found["NetworkPolicy"]["spec"]["podSelector"]["matchLabels"],
        found["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"],
        found["InferencePool"]["spec"]["selector"]["matchLabels"],
    ):
        assert selected == labels
    ports = {port["name"]: port["containerPort"] for port in container()["ports"]}
    assert found["InferencePool"]["spec"]["targetPorts"] == [{"number": ports["http"]}]
    assert {port["targetPort"] for port in found["Service"]["spec"]["ports"]} <= set(ports)
    named = {
        port["port"] for rule in found["NetworkPolicy"]["spec"]["ingress"] for port in rule["ports"]
    }
    assert named == set(ports)
    backends = [
        backend for rule in found["HTTPRoute"]["spec"]["rules"] for backend in rule["backendRefs"]
    ]
    service_port = found["Service"]["spec"]["ports"][0]["port"]
    assert [
        (backend.get("kind", "Service"), backend["name"], backend.get("port"))
        for backend in backends
    ] == [
        ("InferencePool", found["InferencePool"]["metadata"]["name"], None),
        ("Service", found["Service"]["metadata"]["name"], service_port),
    ]
    assert backends[0]["group"] == found["InferencePool"]["apiVersion"].partition("/")[0]
    picker = found["InferencePool"]["spec"]["endpointPickerRef"]["name"]
    (_, metrics) = found["NetworkPolicy"]["spec"]["ingress"]
    assert metrics["from"][0]["podSelector"]["matchLabels"] == {"inferencepool": picker}


def test_requests_have_their_time_to_finish() -> None:
    settings = load_config({}, {"MANYLORA_MODEL__PATH": "/models/base"})
    grace = resources()["Deployment"]["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
    assert grace > settings.server.drain_s + SETTLE_S + STOP_S + 10  # the engine ends after that


async def test_probes_and_routes_name_what_the_server_has(api: Api) -> None:
    paths = {path for path in api.app.openapi()["paths"] if path.startswith("/v1/")}
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert (await api.client().get(container()[probe]["httpGet"]["path"])).status_code == 200
    pooled, rest = resources()["HTTPRoute"]["spec"]["rules"]
    assert rest["matches"] == [{"path": {"type": "PathPrefix", "value": "/"}}]
    asked = {match["path"]["value"] for match in pooled["matches"]}
    assert asked >= {"/v1/completions", "/v1/chat/completions"}
    assert asked - paths <= {"/v1/responses", "/v1/messages"}
