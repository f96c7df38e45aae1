"""Uploads of tenants are validated in turns."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from api_adapters import sound, upload
from api_server import Api, eventually
from manylora.server.process.threads import acting
from manylora.server.uploads.validation import CHILDREN

pytestmark = pytest.mark.anyio


async def test_an_upload_is_validated_beside_those_of_another(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    validator = api.services.uploads.validator
    order = list[str]()
    all_wait = asyncio.Event()
    in_child = validator.in_child

    async def counted(job: dict[str, str], cpu_s: float) -> dict[str, Any]:
        order.append(acting.get().tenant)
        if len(order) <= CHILDREN:
            await all_wait.wait()
        return await in_child(job, cpu_s)

    monkeypatch.setattr(validator, "in_child", counted)
    flood, quiet = await api.tenant("flood"), await api.tenant("quiet")
    sending = [
        asyncio.create_task(upload(flood, f"a{number}", sound(alpha=number + 1)))
        for number in range(6)
    ]
    await eventually(
        lambda: len(order) == CHILDREN and validator.places.num_waiting(order[0]) == 6 - CHILDREN
    )
    assert (await upload(quiet, "b")).status_code == 201
    assert len(order) == CHILDREN + 1
    all_wait.set()
    assert {(await each).status_code for each in sending} == {201}
