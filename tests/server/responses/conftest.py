from __future__ import annotations

from collections.abc import AsyncIterator

import openai
import pytest

from api_server import Api


@pytest.fixture
async def client(api: Api, url: str) -> AsyncIterator[openai.AsyncOpenAI]:
    """OpenAI's own client, over a socket."""
    key = await api.key("acme")
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0) as opened:
        yield opened
