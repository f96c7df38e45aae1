"""The OpenAPI page: FastAPI's own page, plus the bodies that Manylora reads itself and the errors."""

from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

import manylora
from manylora.server.http.route_facts import PUBLIC_PATHS, ROUTES, error_shape

_REF = "#/components/schemas/{model}"
_FOREIGN = ("HTTPValidationError", "ValidationError")
IDEMPOTENCY_KEY = "Idempotency-Key"
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
    return _header(IDEMPOTENCY_KEY, schema, about)


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
    for name in _FOREIGN:
        schemas.pop(name, None)
    header = {"type": "apiKey", "in": "header", "name": "x-api-key"}
    page["components"]["securitySchemes"] = {
        "key": {"type": "http", "scheme": "bearer"},
        "header": header,
    }
    page["security"] = [{"key": []}, {"header": []}]
    for path, operations in page["paths"].items():
        for method, operation in operations.items():
            responses = operation["responses"]
            if _FOREIGN[0] in str(responses.get("422")):
                del responses["422"]
            for status in _errors(path, method, operation):
                responses[str(status)] = error_answer(status, path)
            if path in PUBLIC_PATHS:
                operation["security"] = []
    return page


def error_answer(status: int, path: str) -> dict[str, Any]:
    """Description of an error of this status for the page."""
    view = error_shape(path).view
    content = {"application/json": {"schema": {"$ref": _REF.format(model=view.__name__)}}}
    return {"description": HTTPStatus(status).phrase, "content": content}


def _errors(path: str, method: str, operation: dict[str, Any]) -> list[int]:
    """Statuses of the errors that an operation may answer with, besides those that its route names."""
    statuses = [400, 401, 405, 431, 503]
    if path not in PUBLIC_PATHS:
        statuses += [403, 404, 429]
    if method != "get":
        statuses += [409, 507]
    if "requestBody" in operation:
        statuses += [408, 413, 415]
    if any(parameter["name"] == IDEMPOTENCY_KEY for parameter in operation.get("parameters", ())):
        statuses.append(422)  # a key used for something else, and adapters that cannot be served
    return statuses


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
