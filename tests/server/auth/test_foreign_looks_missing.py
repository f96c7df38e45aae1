"""Another tenant's object and none at all are one answer, byte for byte, on every route that the OpenAPI page has."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from api_adapters import sound, upload
from api_server import Api

pytestmark = pytest.mark.anyio
OWNER, OTHER = "acme", "rival"
NAMES = ("mine", "acme/mine", "mine@1", "acme")
REFERRING = frozenset({"model", "adapter_id", "adapters", "tenant", "grantee", "base"})
"""Optional fields of bodies that name objects."""


OTHERS = str.maketrans(
    "abcdefghijklmnopqrstuvwxyz0123456789", "bcdefahijklmnopqrstuvwxyzg1234567890"
)
"""Letters to letters, digits to digits, and hexadecimal ones to such."""


def missing(name: str) -> str:
    """What nothing is called, as long as `name` and of its form."""
    prefix, separator, rest = name.rpartition("_")
    return prefix + separator + rest.translate(OTHERS)


def sample(schema: dict[str, Any], page: dict[str, Any], name: str) -> Any:
    """A value that the schema allows, with `name` wherever there is a choice."""
    if "$ref" in schema:
        return sample(page["components"]["schemas"][schema["$ref"].rsplit("/", 1)[1]], page, name)
    if "anyOf" in schema:
        return sample(schema["anyOf"][0], page, name)
    if "const" in schema or "enum" in schema:
        return schema.get("const", schema.get("enum", [None])[0])
    if schema.get("type") == "object" or "properties" in schema:
        wanted = {*schema.get("required", ()), *(REFERRING & set(schema.get("properties", {})))}
        return {field: sample(schema["properties"][field], page, name) for field in sorted(wanted)}
    if schema.get("type") == "array":
        return [sample(schema.get("items", {}), page, name)]
    return {"integer": 1, "number": 1.0, "boolean": False}.get(schema.get("type", ""), name)


def ids_within(body: Any) -> Iterator[str]:
    """Every value that is called an id."""
    if isinstance(body, dict):
        yield from (value for key, value in body.items() if key == "id" and isinstance(value, str))
        for value in body.values():
            yield from ids_within(value)
    elif isinstance(body, list):
        for value in body:
            yield from ids_within(value)


async def foreign_names(api: Api, page: dict[str, Any]) -> list[str]:
    """Names of the owner's things, with the ids that the server's lists give them."""
    found: set[str] = set()
    async with api.admin as admin:
        for path, operations in page["paths"].items():
            if "get" in operations and not path.endswith("/events"):
                answer = await admin.get(
                    re.sub(r"\{[^}]*\}", OWNER, path), params={"tenant": OWNER}
                )
                if (
                    answer.headers["content-type"] == "application/json"
                    and answer.status_code == 200
                ):
                    found |= set(ids_within(answer.json()))
    # What is as short as the number of an audit entry stands in many a text by chance.
    return [
        *NAMES,
        *sorted(name for name in found - {api.services.served_name, *NAMES} if len(name) > 8),
    ]


async def ask(
    client: httpx.AsyncClient, path: str, method: str, page: dict[str, Any], name: str
) -> tuple[Any, ...]:
    """What the route answers when everything it can be asked for is called `name`; the name itself is masked."""
    operation = page["paths"][path][method]
    contents = operation.get("requestBody", {}).get("content", {})
    if "multipart/form-data" in contents:
        answer = await upload(client, "new", sound(), tenant=name)
    else:
        body = (
            sample(contents["application/json"]["schema"], page, name)
            if "application/json" in contents
            else None
        )
        query = (
            {"tenant": name}
            if any(given["name"] == "tenant" for given in operation.get("parameters", ()))
            else {}
        )
        where = re.sub(r"\{[^}]*\}", name, path)
        answer = await client.request(
            method, where, json=body, params=query if "{" not in path else {}
        )
    if answer.status_code < 400:
        return (answer.status_code,)
    headers = [(key, value) for key, value in answer.headers.items() if key != "x-request-id"]
    return answer.status_code, headers, answer.text.replace(name, "*")


async def test_foreign_objects_look_like_missing_ones(api: Api) -> None:
    page = api.app.openapi()
    await api.key(OWNER)
    assert (await upload(await api.tenant(OWNER), "mine")).status_code == 201
    names = await foreign_names(api, page)
    assert len(names) >= len(NAMES) + 3, names  # the ids of tenant, key and adapter
    rival = await api.tenant(OTHER)
    compared, wrong = set(), []
    for path, operations in page["paths"].items():
        for method in operations:
            if path.endswith("/events"):
                continue  # for admins, and endless
            for name in names:
                foreign = await ask(rival, path, method, page, name)
                absent = await ask(rival, path, method, page, missing(name))
                if foreign != absent:
                    wrong.append((method, path, name, foreign, absent))
                if foreign[0] == 404:
                    compared.add((method, path))
    assert wrong == []
    assert {path for _, path in compared} >= {
        *(
            "/v1/completions",
            "/v1/chat/completions",
            "/v1/models/{model_id}",
            "/v1/adapters",
            "/v1/adapters/{name}",
        ),
        *(
            "/v1/adapters/{name}/versions",
            "/v1/adapters:fit",
            "/v1/usage",
            "/tokenize",
            "/detokenize",
        ),
    }
