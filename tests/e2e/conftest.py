"""One server on the demo model for the tests that leave it as they found it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from manylora_server import DEMO_NAMES, ManyloraServer, manylora_server


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Whatever starts servers or runs whole models takes seconds."""
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ManyloraServer]:
    with manylora_server(tmp_path_factory.mktemp("manylora")) as running:
        yield running


@pytest.fixture(scope="session")
def shop(server: ManyloraServer) -> ManyloraServer:
    """The server with tenant `shop`, who has all demo adapters."""
    server.publish("shop", *DEMO_NAMES)
    return server
