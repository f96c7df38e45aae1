from __future__ import annotations

import json

import pytest

from api_server import Api
from manylora.server.adapters import schemas as adapters
from manylora.server.generation import chat_schemas, tokens
from manylora.server.generation import schemas as generation
from manylora.server.http.bodies import Body
from manylora.server.http.openapi import IDEMPOTENCY_KEY
from manylora.server.http.route_facts import PUBLIC_PATHS
from manylora.server.tenants import schemas as tenants

pytestmark = pytest.mark.anyio
VALIDATING = ("/v1/adapters/{name}/versions:push", "/v1/load_lora_adapter")
"""Routes that answer 422 to an adapter that is not served, and take no Idempotency-Key."""


async def test_the_page_is_public_and_complete(api: Api) -> None:
    async with api.client() as client:
        page = (await client.get("/openapi.json")).json()
    text = json.dumps(page)
    for name in page["components"]["schemas"]:
        assert f'"{name}"' in text
    referred = {part.split('"')[0] for part in text.split("#/components/schemas/")[1:]}
    assert referred <= set(page["components"]["schemas"])
    assert "HTTPValidationError" not in text
    bodies = {
        cls.__name__
        for module in (adapters, chat_schemas, generation, tenants, tokens)
        for cls in vars(module).values()
        if isinstance(cls, type) and issubclass(cls, Body)
    }
    bases = {"Body", "StoredBody", "GenerationBody", "ToolsBody", "VersionBody"}
    assert {name for name in bodies if name.endswith("Body")} - bases <= referred
    assert page["paths"]["/v1/completions"]["post"]["requestBody"]["content"]["application/json"]


async def test_every_operation_names_its_errors(api: Api) -> None:
    for path, operations in api.app.openapi()["paths"].items():
        for method, operation in operations.items():
            responses = operation["responses"]
            expected = {"400", "401", "405", "503"}
            expected |= set() if path in PUBLIC_PATHS else {"403", "404", "429"}
            expected |= {"408", "413", "415"} if "requestBody" in operation else set()
            assert expected <= set(responses), (method, path)
            keys = [
                given
                for given in operation.get("parameters", ())
                if given["name"] == IDEMPOTENCY_KEY
            ]
            assert ("422" in responses) == (bool(keys) or path in VALIDATING), (method, path)
            for status in set(responses) - {"200", "201", "204"}:
                schema = responses[status]["content"]["application/json"]["schema"]
                view = "AnthropicErrorView" if path.startswith("/v1/messages") else "ErrorView"
                assert schema == {"$ref": f"#/components/schemas/{view}"}, (method, path, status)


async def test_fields_that_pass_and_those_of_beam_search_are_described(api: Api) -> None:
    for name in ("CompletionBody", "ChatBody"):
        fields = api.app.openapi()["components"]["schemas"][name]["properties"]
        assert fields["spaces_between_special_tokens"]["enum"] == [True, None]
        assert "no end-of-sequence token" in fields["min_tokens"]["description"]
        assert "ignored" in fields["metadata"]["description"]
        assert {"type": "null"} in fields["temperature"]["anyOf"]
        assert "all are billed" in fields["best_of"]["description"]
        assert {"type": "boolean"} in fields["use_beam_search"]["anyOf"]
        assert {"type": "number", "minimum": -10.0, "maximum": 10.0} in fields["length_penalty"][
            "anyOf"
        ]
        assert "never" in str(fields["early_stopping"]["anyOf"])
