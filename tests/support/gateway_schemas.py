"""Schemas of what `deploy/` uses of custom resources: by hand, of the fields used, since the CRDs are not on PyPI.

InferencePool is v1 of the Gateway API Inference Extension, HTTPRoute v1 of the Gateway API, RayService v1 of KubeRay.
"""

from __future__ import annotations

from typing import Any


def _object(required: dict[str, Any], **optional: Any) -> dict[str, Any]:
    properties = {**required, **optional}
    return {
        "type": "object",
        "required": [*required],
        "properties": properties,
        "additionalProperties": False,
    }


def _list(item: dict[str, Any], most: int) -> dict[str, Any]:
    return {"type": "array", "items": item, "minItems": 1, "maxItems": most}


NAME = {"type": "string", "pattern": "^[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?$"}
PORT = {"type": "integer", "minimum": 1, "maximum": 65535}
LABELS = {
    "type": "object",
    "minProperties": 1,
    "additionalProperties": {"type": "string", "maxLength": 63},
}
PICKER = _object(
    {"name": NAME, "port": _object({"number": PORT})},
    group={"type": "string"},
    kind={"type": "string"},
    failureMode={"enum": ["FailOpen", "FailClose"]},
)
PATH = _object(
    {"type": {"enum": ["Exact", "PathPrefix", "RegularExpression"]}, "value": {"type": "string"}}
)
BACKEND = _object({"name": NAME}, group={"type": "string"}, kind={"type": "string"}, port=PORT)
RULE = _object(
    {"backendRefs": _list(BACKEND, 16)},
    matches=_list(_object({"path": PATH}), 64),
    timeouts=_object({}, request={"type": "string", "pattern": "^([0-9]{1,5}(h|m|s|ms)){1,4}$"}),
)


def _resource(version: str, kind: str, spec: dict[str, Any]) -> dict[str, Any]:
    metadata = {"type": "object", "required": ["name"], "properties": {"name": NAME}}
    return _object(
        {
            "apiVersion": {"const": version},
            "kind": {"const": kind},
            "metadata": metadata,
            "spec": spec,
        }
    )


SCHEMAS = {
    "InferencePool": _resource(
        "inference.networking.k8s.io/v1",
        "InferencePool",
        _object(
            {
                "selector": _object({"matchLabels": LABELS}),
                "targetPorts": _list(_object({"number": PORT}), 8),
                "endpointPickerRef": PICKER,
            }
        ),
    ),
    "HTTPRoute": _resource(
        "gateway.networking.k8s.io/v1",
        "HTTPRoute",
        _object({"parentRefs": _list(_object({"name": NAME}), 32), "rules": _list(RULE, 16)}),
    ),
}
COUNT = {"type": "integer", "minimum": 0}
RAY_PARAMS = {"type": "object", "additionalProperties": {"type": "string"}}
RAY_HEAD = _object(
    {"template": {"type": "object"}}, rayStartParams=RAY_PARAMS, serviceType={"type": "string"}
)
RAY_WORKERS = _object(
    {"groupName": NAME, "minReplicas": COUNT, "maxReplicas": COUNT, "template": {"type": "object"}},
    replicas=COUNT,
    rayStartParams=RAY_PARAMS,
)
RAY_SERVICE = _resource(
    "ray.io/v1",
    "RayService",
    _object(
        {
            "rayClusterConfig": _object(
                {"headGroupSpec": RAY_HEAD},
                workerGroupSpecs=_list(RAY_WORKERS, 64),
                rayVersion={"type": "string"},
                enableInTreeAutoscaling={"type": "boolean"},
                authOptions=_object(
                    {}, mode={"enum": ["disabled", "token"]}, secretName={"type": "string"}
                ),
            )
        },
        serveConfigV2={"type": "string"},
        upgradeStrategy=_object(
            {}, type={"enum": ["NewCluster", "NewClusterWithIncrementalUpgrade", "None"]}
        ),
    ),
)
