"""The option that writes the table of docs/clients.md."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--write-table", action="store_true", help="write what the clients do into docs/clients.md"
    )
