from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import structlog

from api_server import Api
from api_server import api as open_api

# As servers log them: a trace that shows every local of every frame takes seconds.
structlog.configure(processors=[structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback)])


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def database_url() -> str | None:
    """SQLite; files that hold for what only a database decides name PostgreSQL too."""
    return None


@pytest.fixture
async def api(tmp_path: Path, database_url: str | None) -> AsyncIterator[Api]:
    async with open_api(tmp_path, database_url=database_url) as opened:
        yield opened
