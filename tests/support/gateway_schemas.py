"""Schemas of what `deploy/` uses of the Gateway API: by hand, of the fields used, since the CRDs are not on PyPI.

InferencePool is v1 of the Gateway API Inference Extension, HTTPRoute v1 of the Gateway API.
"""

from __future__ import annotations

from typing import Any


def _object(required: dict[str, Any], **optional: Any) -> dict[str, Any]:
    properties = {**required, **optional}
    return {"type": "object", "required": [*required], "properties": properties, "additionalProperties": False}


def _list(item: dict[str, Any], most: int) -> dict[str, Any]:
    return {"type": "array", "items": item, "minItems": 1, "maxItems": most}


NAME = {"type": "string", "pattern": "^[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?$"}
PORT = {"type": "integer", "minimum": 1, "maximum": 65535}
LABELS = {"type": "object", "minProperties": 1, "additionalProperties": {"type": "string", "maxLength": 63}}
PICKER = _object(
    {"name": NAME, "port": _object({"number": PORT})},
    group={"type": "string"},
    kind={"type": "string"},
    failureMode={"enum": ["FailOpen", "FailClose"]},
)
PATH = _object({"type": {"enum": ["Exact", "PathPrefix", "RegularExpression"]}, "value": {"type": "string"}})
BACKEND = _object({"name": NAME}, group={"type": "string"}, kind={"type": "string"}, port=PORT)
RULE = _object(
    {"backendRefs": _list(BACKEND, 16)},
    matches=_list(_object({"path": PATH}), 64),
    timeouts=_object({}, request={"type": "string", "pattern": "^([0-9]{1,5}(h|m|s|ms)){1,4}$"}),
)


def _resource(version: str, kind: str, spec: dict[str, Any]) -> dict[str, Any]:
    metadata = {"type": "object", "required": ["name"], "properties": {"name": NAME}}
    return _object({"apiVersion": {"const": version}, "kind": {"const": kind}, "metadata": metadata, "spec": spec})


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
