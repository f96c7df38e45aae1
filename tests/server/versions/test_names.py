"""An adapter may stand behind a name of the base and a colon, wherever a model is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from api_adapters import upload
from api_server import BASE, Api, Client

pytestmark = pytest.mark.anyio


@pytest.fixture
async def digest(acme: Client) -> str:
    """Of the adapter pirate, of the tenant acme."""
    return str((await upload(acme, "pirate")).json()["digest"])


async def test_the_base_may_stand_before_an_adapters_name(
    api: Api, acme: Client, digest: str
) -> None:
    own = Path(api.services.config.model.path).name
    assert own != BASE
    for selector in (
        "pirate",
        "pirate@1",
        "pirate@default",
        f"pirate@{digest}",
        "acme/pirate",
        "acme/pirate@1",
    ):
        for base in (BASE, own):
            name = f"{base}:{selector}"
            for fields in (
                {"model": name},
                {"adapter_id": name},
                {"model": BASE, "adapter_id": name},
            ):
                answer = await acme.post("/v1/completions", json={"prompt": "x", **fields})
                assert (answer.status_code, answer.json()["model"]) == (200, name), answer.text
                assert answer.headers["x-manylora-adapter-digest"] == digest
            assert (await acme.get(f"/v1/models/{name}")).json()["root"] == digest
            assert (
                await acme.post("/tokenize", json={"model": name, "prompt": "x"})
            ).status_code == 200
    as_admin = await api.admin.post(
        "/v1/completions", json={"model": f"{BASE}:acme/pirate", "prompt": "x"}
    )
    assert as_admin.headers["x-manylora-adapter-digest"] == digest
    assert {request.adapter.digest for request in api.engine.requests if request.adapter} == {
        digest
    }
    assert all(request.adapter for request in api.engine.requests)


async def test_what_stands_behind_the_base_is_never_taken_for_the_base(
    api: Api, acme: Client, rival: Client, digest: str
) -> None:
    names = [
        f"{BASE}:",
        f"{BASE}:{BASE}",
        f"{BASE}:pirat",
        f"{BASE}:{BASE}:pirate",
        "other:pirate",
        ":pirate",
        "pirate:",
    ]
    for client, named in ((acme, names), (rival, [f"{BASE}:pirate", f"{BASE}:acme/pirate"])):
        for name in named:
            answer = await client.post("/v1/completions", json={"model": name, "prompt": "x"})
            assert (answer.status_code, answer.json()["error"]["code"]) == (
                404,
                "model_not_found",
            ), name
    near = await acme.post("/v1/completions", json={"model": f"{BASE}:pirat", "prompt": "x"})
    assert "`pirate`" in near.json()["error"]["message"]
    assert api.engine.requests == []
