from __future__ import annotations

import json

import pytest

from api_server import Api
from manylora.server.adapters import schemas as adapters
from manylora.server.generation import chat_schemas, tokens
from manylora.server.generation import schemas as generation
from manylora.server.http.bodies import Body
from manylora.server.tenants import schemas as tenants

pytestmark = pytest.mark.anyio


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


async def test_every_operation_describes_its_errors(api: Api) -> None:
    for path, operations in api.app.openapi()["paths"].items():
        view = "AnthropicErrorView" if path.startswith("/v1/messages") else "ErrorView"
        for method, operation in operations.items():
            responses = operation["responses"]
            assert set(responses) - {"200", "201", "204"} == {"default"}, (method, path)
            schema = responses["default"]["content"]["application/json"]["schema"]
            assert schema == {"$ref": f"#/components/schemas/{view}"}, (method, path)


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
