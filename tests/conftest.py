"""Settings of the whole suite, and what several folders of tests share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from s3_server import S3Server

# The same examples in every run, and no judgement by the clock: test machines are shared and slow at times.
settings.register_profile(
    "weft", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.load_profile("weft")


@pytest.fixture(scope="session")
def s3() -> Iterator[S3Server]:
    """A server that speaks S3, started for the first test that wants one."""
    from s3_server import s3_server  # takes seconds to import

    with s3_server() as server:
        yield server
