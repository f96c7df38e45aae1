from __future__ import annotations

from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

import pytest

from api_server import Api

if TYPE_CHECKING:
    import anthropic


@pytest.fixture
async def client(api: Api, url: str) -> AsyncIterator[anthropic.AsyncAnthropic]:
    """Anthropic's own client, over a socket. It sends its key as x-api-key."""
    import anthropic  # takes a second

    key = await api.key("acme")
    async with anthropic.AsyncAnthropic(base_url=url, api_key=key, max_retries=0) as opened:
        yield opened
