from collections.abc import Iterator

import pytest

import poison


@pytest.fixture
def poisoned_memory() -> Iterator[None]:
    """Memory that torch hands out uninitialised holds NaN."""
    with poison.poisoned_memory():
        yield
