from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from api_server import Api
from api_server import api as open_api


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
async def api(tmp_path: Path) -> AsyncIterator[Api]:
    async with open_api(tmp_path) as opened:
        yield opened
