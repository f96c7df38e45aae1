from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from api_server import Api
from fake_cluster import behind_a_gateway


@pytest.fixture(params=["all", "gateway"])
async def api(api: Api, request: pytest.FixtureRequest) -> AsyncIterator[Api]:
    """The API over a fake engine, asked by clients or through a gateway: a limit is the same for both."""
    if request.param == "all":
        yield api
        return
    async with behind_a_gateway(api):
        yield api
