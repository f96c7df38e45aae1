"""The OpenAPI page: FastAPI's own page, plus the bodies that Manylora reads itself and the errors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

import manylora
from manylora.server.http.route_facts import PUBLIC_PATHS, ROUTES, error_shape

_REF = "#/components/schemas/{model}"
TEXT = {"type": "string"}
BINARY = {"type": "string", "format": "binary"}
OBJECT = {"type": "object"}
_bodies: dict[str, type[BaseModel]] = {}


def takes(model: type[BaseModel]) -> dict[str, Any]:
    """`openapi_extra` of a route that reads a JSON body of this model."""
    _bodies[model.__name__] = model
    return request_body("application/json", {"$ref": _REF.format(model=model.__name__)})


def takes_retries() -> dict[str, Any]:
    """`openapi_extra` of a route that may be called again under the same key."""
    schema = {
        "type": "string",
        "minLength": 1,
        "maxLength": 255,
        "pattern": "^[!-~]([ -~]*[!-~])?$",
    }
    about = "A request repeated with the same key within 24 hours is done once and gets the same answer."
    return _header("Idempotency-Key", schema, about)


def takes_bytes(header: str, about: str) -> dict[str, Any]:
    """`openapi_extra` of a route whose body is a file with this header."""
    return {**request_body("application/octet-stream", BINARY), **_header(header, TEXT, about)}


def sends(media_type: str, schema: Mapping[str, object]) -> dict[int | str, dict[str, Any]]:
    """`responses` of a route that answers with no model of ours."""
    return {200: {"content": {media_type: {"schema": schema}}}}


def openapi_page(app: FastAPI) -> dict[str, Any]:
    """The page of an app, with all bodies and errors."""
    page = get_openapi(
        title="Manylora", version=manylora.__version__, routes=app.routes, summary=app.summary
    )
    errors = dict.fromkeys(facts.errors.view for facts in ROUTES.values())
    models: list[type[BaseModel]] = [*_bodies.values(), *errors]
    _, definitions = models_json_schema(
        [(model, "validation") for model in models], ref_template=_REF
    )
    schemas = page.setdefault("components", {}).setdefault("schemas", {})
    schemas.update(definitions["$defs"])
    for name in ("HTTPValidationError", "ValidationError"):
        schemas.pop(name, None)
    header = {"type": "apiKey", "in": "header", "name": "x-api-key"}
    page["components"]["securitySchemes"] = {
        "key": {"type": "http", "scheme": "bearer"},
        "header": header,
    }
    page["security"] = [{"key": []}, {"header": []}]
    for path, operations in page["paths"].items():
        schema = {"$ref": _REF.format(model=error_shape(path).view.__name__)}
        error = {"description": "Error", "content": {"application/json": {"schema": schema}}}
        for operation in operations.values():
            operation["responses"].pop("422", None)  # FastAPI's own
            operation["responses"]["default"] = error
            if path in PUBLIC_PATHS:
                operation["security"] = []
    return page


def request_body(media_type: str, schema: dict[str, Any]) -> dict[str, Any]:
    """`openapi_extra` of a route whose body has this type and schema."""
    return {"requestBody": {"required": True, "content": {media_type: {"schema": schema}}}}


def _header(name: str, schema: dict[str, Any], about: str) -> dict[str, Any]:
    header = {
        "name": name,
        "in": "header",
        "required": False,
        "schema": schema,
        "description": about,
    }
    return {"parameters": [header]}
