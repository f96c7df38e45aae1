"""Settings of the whole suite, and what several folders of tests share."""

from __future__ import annotations

import atexit
import gc
import logging
import os
import sys
from collections import Counter
from collections.abc import AsyncIterator, Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from coverage import Coverage
from hypothesis import HealthCheck, settings

from time_by_file import TimeByFile

if TYPE_CHECKING:
    from api_server import Api
    from s3_server import S3Server

COVERED_PARAMETERS = 1
COVERAGE_OF_PROCESSES = "COVERAGE_PROCESS_CONFIG"
"""Variable by which coverage measures the processes that are started."""

# The same examples in every run, and no judgement by the clock: test machines are shared and slow at times.
settings.register_profile(
    "manylora",
    derandomize=True,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    print_blob=True,
)
settings.load_profile("manylora")

# Collecting makes a million objects that stay. The garbage collector looks at none of them, here or in the tests,
# but at the end: nanobind reports what is left then.
gc.disable()
atexit.register(gc.unfreeze)


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(TimeByFile())
    if hasattr(config, "workerinput") and (first := Coverage.current()) is not None:
        first.stop()  # pytest-cov starts another one in a process of xdist, and pauses only that


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes() -> None:
    """Let each test process start coverage itself, and pause it: a second one from the variable would never pause."""
    os.environ.pop(COVERAGE_OF_PROCESSES, None)  # noqa: TID251 - it is no setting of the product


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Order the files, and choose what runs under coverage.

    Files with slow tests go first: otherwise one process works on the last of them while the others are done. Coverage
    takes longer than what it measures, so it measures no slow tests, and each function with its first parameters alone.
    """
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)
    counts: Counter[str] = Counter()
    for item in items:
        function = item.nodeid.partition("[")[0]
        counts[function] += 1
        if item.get_closest_marker("slow") or counts[function] > COVERED_PARAMETERS:
            item.add_marker(pytest.mark.no_cover)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Run the processes of a test without coverage where the test runs without it."""
    with pytest.MonkeyPatch.context() as patch:
        if item.get_closest_marker("no_cover"):
            patch.delenv(COVERAGE_OF_PROCESSES, raising=False)
        return (yield)


@pytest.fixture(autouse=True)
def process_is_left_as_it_was() -> Iterator[None]:
    """Fail a test that configures the logs of the test process or hides torch from it, as a server's start does."""
    level = logging.getLogger().level
    yield
    assert logging.getLogger().level == level
    assert sys.modules.get("torch", True) is not None


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Let what a file of tests leaves open fail there, and not in the file during which it happens to be collected."""
    if nextitem is None or nextitem.path != item.path:
        gc.collect()


@pytest.fixture(scope="session")
def s3() -> Iterator[S3Server]:
    """A server that speaks S3, started for the first test that wants one."""
    from s3_server import s3_server  # takes seconds to import

    with s3_server() as server:
        yield server


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def database_url() -> str | None:
    """SQLite; files that hold for what only a database decides name PostgreSQL too."""
    return None


@pytest.fixture
async def api(tmp_path: Path, database_url: str | None) -> AsyncIterator[Api]:
    """The API over a fake engine."""
    from api_server import api as open_api  # takes seconds to import

    async with open_api(tmp_path, database_url=database_url) as opened:
        yield opened
