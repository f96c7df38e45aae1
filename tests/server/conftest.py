from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from api_server import Api, Client


@pytest.fixture
async def acme(api: Api) -> Client:
    """A tenant's client."""
    return await api.tenant("acme")


@pytest.fixture
async def rival(api: Api) -> Client:
    return await api.tenant("rival")


@pytest.fixture
async def url(api: Api) -> AsyncIterator[str]:
    """A real port of the API, for what only a socket shows."""
    async with api.listening() as address:
        yield address
