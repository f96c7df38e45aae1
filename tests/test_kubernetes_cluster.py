"""The manifests of many servers are what Kubernetes takes, and agree with Manylora and with each other."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from gateway_schemas import RAY_SERVICE
from manylora.config import GatewayConfig
from manylora.launch.up import SECRETS
from manylora.server.cluster.membership import NOTICE_S
from manylora.server.http.listen import STOP_S
from manylora.server.process.drain import SETTLE_S
from manylora.server.settings import load_config
from system_tools import require_module

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "deploy" / "kubernetes"
KUBERNETES = "1.33"
Resource = dict[str, Any]


def identity(resource: Resource) -> tuple[str, str]:
    return resource["kind"], resource["metadata"]["name"]


def render(name: str) -> dict[tuple[str, str], Resource]:
    """What Kustomize makes of a folder, as far as these use it: resources, images, and patches that delete."""
    settings = yaml.safe_load((FOLDER / name / "kustomization.yaml").read_text())
    found: dict[tuple[str, str], Resource] = {}
    for path in settings["resources"]:
        if path.endswith(".yaml"):
            found |= {
                identity(each): each
                for each in yaml.safe_load_all((FOLDER / name / path).read_text())
            }
        else:
            found |= render(str((FOLDER / name / path).resolve().relative_to(FOLDER)))
    images = {
        each["name"]: f"{each['newName']}:{each['newTag']}" for each in settings.get("images", ())
    }
    for resource in found.values():
        if resource["kind"] in ("Deployment", "StatefulSet"):
            for container in resource["spec"]["template"]["spec"]["containers"]:
                container["image"] = images.get(container["image"], container["image"])
    for each in settings.get("patches", ()):
        patch = yaml.safe_load(each["patch"])
        assert patch.pop("$patch") == "delete"
        assert found.pop(identity(patch))["apiVersion"] == patch["apiVersion"]
    return found


def check(resource: Resource) -> None:
    if resource["kind"] == "RayService":
        jsonschema.validate(resource, RAY_SERVICE)
        for template in ray_templates(resource).values():
            check({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"}, **template})
    else:
        require_module("kubernetes_validate", package="kubernetes-validate").validate(
            resource, KUBERNETES, strict=True
        )


def ray_templates(resource: Resource) -> dict[str, Resource]:
    cluster = resource["spec"]["rayClusterConfig"]
    (workers,) = cluster["workerGroupSpecs"]
    return {"head": cluster["headGroupSpec"]["template"], "worker": workers["template"]}


def pod(name: str) -> Resource:
    kind = "Deployment" if name == "manylora-gateway" else "StatefulSet"
    return dict(render("cluster")[kind, name]["spec"]["template"]["spec"])


def settings() -> dict[str, str]:
    return dict(render("cluster")["ConfigMap", "manylora"]["data"])


@pytest.mark.parametrize("name", ["cluster", "kuberay"])
def test_kubernetes_takes_every_resource(name: str) -> None:
    found = render(name)
    assert len(found) >= 6
    for resource in found.values():
        check(resource)


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is missing")
@pytest.mark.parametrize("name", ["cluster", "kuberay"])
def test_kustomize_makes_the_same(name: str) -> None:
    made = subprocess.run(
        ["kubectl", "kustomize", str(FOLDER / name)], capture_output=True, text=True, check=True
    )
    assert {identity(each): each for each in yaml.safe_load_all(made.stdout)} == render(name)


@pytest.mark.parametrize(
    "wrong", [{"authOptions": {"mode": "tokens"}}, {"auth": {}}, {"headGroupSpec": {}}]
)
def test_a_wrong_field_of_ray_is_noticed(wrong: Resource) -> None:
    resource = render("kuberay")["RayService", "manylora"]
    resource["spec"]["rayClusterConfig"] |= wrong
    with pytest.raises(jsonschema.ValidationError):
        check(resource)


@pytest.mark.parametrize("role", ["gateway", "replica"])
def test_servers_start_with_settings_that_exist(role: str) -> None:
    name = f"manylora-{role}"
    (container,) = pod(name)["containers"]
    assert container["args"] == ["serve", "--role", role]
    own = {entry["name"]: entry["value"] for entry in container["env"] if "value" in entry}
    given = {**settings(), **own, "MANYLORA_SERVER__ROLE": role}
    given["MANYLORA_SERVER__ADVERTISED_URL"] = given["MANYLORA_SERVER__ADVERTISED_URL"].replace(
        "$(POD_IP)", "10.0.0.7"
    )
    config = load_config({}, {n: v for n, v in given.items() if n.startswith("MANYLORA_")})
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert ports == {"http": config.server.port, "metrics": config.server.metrics_port}
    assert config.server.advertised_url == f"http://10.0.0.7:{ports['http']}"
    assert [entry["name"] for entry in container["env"]].index(
        "POD_IP"
    ) == 0  # before what is made of it
    assert container["envFrom"] == [
        {"configMapRef": {"name": "manylora"}},
        {"secretRef": {"name": "manylora"}},
    ]
    mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
    assert {str(config.server.data_dir), "/tmp"} <= set(mounts)
    claims = (
        render("cluster")["StatefulSet", "manylora-replica"]["spec"]["volumeClaimTemplates"]
        if role == "replica"
        else []
    )
    volumes = {volume["name"] for volume in pod(name)["volumes"]} | {
        claim["metadata"]["name"] for claim in claims
    }
    assert set(mounts.values()) == volumes
    assert (config.model.path in mounts) == (role == "replica")
    user = pod(name)["securityContext"]["runAsUser"]
    assert f"--uid {user} manylora" in (ROOT / "deploy" / "Dockerfile").read_text()
    limit = float(container["resources"]["limits"]["memory"].removesuffix("Gi"))
    if role == "replica":
        assert (config.memory.gib or 0) + (config.memory.host_gib or 0) + 2 < limit


def test_a_gateway_reads_its_part_of_the_settings() -> None:
    config = load_config(
        {}, {n: v for n, v in settings().items() if n.startswith("MANYLORA_")}, kind=GatewayConfig
    )
    assert config.registry.s3_place == ("manylora", "adapters")


def test_every_secret_comes_from_the_secret_that_the_first_lines_make() -> None:
    text = (FOLDER / "cluster" / "kustomization.yaml").read_text()
    made = set(re.findall(r"--from-literal=(\w+)=", text))
    assert made >= {*SECRETS, "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"}
    assert not made & set(settings())


def test_everything_means_the_same_pods() -> None:
    found = render("cluster")
    for kind, name in (("Deployment", "manylora-gateway"), ("StatefulSet", "manylora-replica")):
        spec = found[kind, name]["spec"]
        labels, wanted = spec["template"]["metadata"]["labels"], spec["selector"]["matchLabels"]
        assert wanted.items() <= labels.items()
        assert found["PodDisruptionBudget", name]["spec"]["selector"]["matchLabels"] == wanted
        policy = found["NetworkPolicy", "manylora"]["spec"]["podSelector"]["matchLabels"]
        assert policy.items() <= labels.items()
        port = spec["template"]["metadata"]["annotations"]["prometheus.io/port"]
        assert port == settings()["MANYLORA_SERVER__METRICS_PORT"]
    assert found["Service", "manylora"]["spec"]["selector"] == {"app": "manylora-gateway"}
    headless = found["Service", "manylora-replica"]["spec"]
    assert (headless["clusterIP"], headless["selector"]) == ("None", {"app": "manylora-replica"})
    assert found["StatefulSet", "manylora-replica"]["spec"]["serviceName"] == "manylora-replica"


def test_clients_reach_gateways_alone_and_prometheus_all_metrics() -> None:
    found = render("cluster")
    pods = [
        found[of]["spec"]["template"]
        for of in (("Deployment", "manylora-gateway"), ("StatefulSet", "manylora-replica"))
    ]
    policies = [policy["spec"] for (kind, _), policy in found.items() if kind == "NetworkPolicy"]
    rules = [
        {
            rule["ports"][0]["port"]: [
                peer["podSelector"]["matchLabels"] for peer in rule.get("from", ())
            ]
            for policy in policies
            if policy["podSelector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
            for rule in policy["ingress"]
        }
        for pod in pods
    ]
    prometheus, gateway = {"app.kubernetes.io/name": "prometheus"}, {"app": "manylora-gateway"}
    assert gateway.items() <= pods[0]["metadata"]["labels"].items()
    assert rules == [
        {"metrics": [prometheus], "http": []},
        {"metrics": [prometheus], "http": [gateway]},
    ]


def test_the_form_of_addresses_that_settings_name_for_ipv6_is_good() -> None:
    text = (FOLDER / "cluster" / "settings.yaml").read_text()
    url = re.findall(r"http://\S+", text)[0].replace("$(POD_IP)", "fd00::7")
    assert load_config(
        {"server": {"host": "::", "role": "replica", "advertised_url": url}}, settings()
    )


def test_requests_have_their_time_to_finish() -> None:
    drain_s = load_config({}, {"MANYLORA_MODEL__PATH": "x"}).server.drain_s
    worker = ray_templates(render("kuberay")["RayService", "manylora"])["worker"]["spec"]
    for spec in (pod("manylora-gateway"), pod("manylora-replica"), worker):
        assert (
            spec["terminationGracePeriodSeconds"]
            > drain_s + NOTICE_S["gateway"] + SETTLE_S + STOP_S + 10
        )  # for the engine


def test_gateways_are_probed_without_replicas_and_replicas_have_time_to_load() -> None:
    for name in ("manylora-gateway", "manylora-replica"):
        (container,) = pod(name)["containers"]
        assert container["livenessProbe"]["httpGet"]["path"] == "/health"
        assert container["readinessProbe"]["httpGet"]["path"] == "/ready"
    assert (
        container["startupProbe"]["failureThreshold"] * container["startupProbe"]["periodSeconds"]
        >= 600
    )


def test_ray_keeps_the_replicas_and_no_proxy_of_its_own() -> None:
    found = render("kuberay")
    assert ("StatefulSet", "manylora-replica") not in found
    assert ("Deployment", "manylora-gateway") in found
    resource = found["RayService", "manylora"]
    serve = yaml.safe_load(resource["spec"]["serveConfigV2"])
    assert serve["proxy_location"] == "Disabled"
    (application,) = serve["applications"]
    module, _, function = application["import_path"].partition(":")
    source = (ROOT / Path(*module.split("."))).with_suffix(".py").read_text()
    assert f"def {function}(plan" in source
    assert {f'plan.get("{name}")' for name in application["args"]} <= set(
        re.findall(r'plan\.get\("\w+"\)', source)
    )
    (workers,) = resource["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    assert application["args"]["max_replicas"] == workers["maxReplicas"]
    assert workers["rayStartParams"]["num-cpus"] == str(application["args"]["cpus"])
    image = found["Deployment", "manylora-gateway"]["spec"]["template"]["spec"]["containers"][0][
        "image"
    ]
    for template in ray_templates(resource).values():
        (container,) = template["spec"]["containers"]
        assert container["image"] == image
        # KubeRay's own probes may need wget, and on workers the proxy; these paths need no token.
        for probe in ("readinessProbe", "livenessProbe"):
            assert container[probe]["httpGet"]["path"] in (
                "/api/healthz",
                "/api/local_raylet_healthz",
            )


@pytest.mark.ray
@pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason="docs/cluster.md says how to install Ray"
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_ray_understands_its_part(monkeypatch: pytest.MonkeyPatch) -> None:
    from ray.serve.schema import ServeDeploySchema

    from manylora.launch.ray_serve import app

    serve = yaml.safe_load(render("kuberay")["RayService", "manylora"]["spec"]["serveConfigV2"])
    ServeDeploySchema.model_validate(serve)
    for name, value in settings().items():
        monkeypatch.setenv(name, value)
    deployment = app(serve["applications"][0]["args"])._bound_deployment
    scaling = deployment._deployment_config.autoscaling_config
    assert (scaling.min_replicas, scaling.max_replicas, scaling.downscale_delay_s) == (2, 4, 60)
    assert deployment._deployment_config.max_ongoing_requests == 10_000
    assert deployment._deployment_config.graceful_shutdown_timeout_s >= 60
    assert json.loads(json.dumps(deployment.ray_actor_options))["num_cpus"] == 8
