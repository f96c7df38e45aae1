import ctypes
import functools
from collections.abc import Callable, Iterator

import pytest
from filelock import FileLock  # torch brings it

from implementations import (
    IMPLEMENTATIONS,
    SOURCES_OF,
    Implementation,
    copy_sources,
    flags_for,
    marks,
    trap_tiles,
)
from manylora.kernels.native import compilation
from manylora.kernels.native import library as native_library
from manylora.kernels.native.library import load_library


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test that takes `impl` runs for every implementation; with `dtype` or `case`, for all that it can compute.

    The cases of an implementation are what `cases(impl)` of the test's module returns; a module with `IMPLEMENTATIONS`
    of its own is for these.
    """
    if "impl" not in metafunc.fixturenames:
        return
    found = getattr(metafunc.module, "IMPLEMENTATIONS", IMPLEMENTATIONS)
    for name in ("dtype", "case"):
        if name in metafunc.fixturenames:
            pairs = [
                pytest.param(
                    impl,
                    value,
                    id=f"{impl.name}-{str(value).removeprefix('torch.')}",
                    marks=marks(impl),
                )
                for impl in found
                for value in (impl.dtypes if name == "dtype" else metafunc.module.cases(impl))
                if name == "dtype" or value.dtype in impl.dtypes
            ]
            metafunc.parametrize(("impl", name), pairs, indirect=["impl"])
            return
    metafunc.parametrize(
        "impl",
        [pytest.param(impl, id=impl.name, marks=marks(impl)) for impl in found],
        indirect=True,
    )


@pytest.fixture(scope="session")
def compiled(
    tmp_path_factory: pytest.TempPathFactory, worker_id: str
) -> Callable[[str], ctypes.CDLL]:
    """The CPU kernels compiled for one of `BUILDS`: once, as their file is named after all that goes into it."""
    own = tmp_path_factory.getbasetemp()
    folder = (own if worker_id == "master" else own.parent) / "libraries"
    folder.mkdir(exist_ok=True)

    @functools.cache
    def library(build: str) -> ctypes.CDLL:
        with FileLock(folder / f"{build}.lock"), pytest.MonkeyPatch.context() as patch:
            if build == "x86-64-v4-amx":
                trap_tiles(folder)
            if build in SOURCES_OF:
                sources = folder / build
                if not sources.exists():
                    copy_sources(sources, *SOURCES_OF[build])
                patch.setattr(compilation, "SOURCES", sources)
            return load_library(flags_for(build))

    return library


@pytest.fixture
def impl(
    request: pytest.FixtureRequest,
    compiled: Callable[[str], ctypes.CDLL],
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Implementation]:
    """An implementation; one in C++ is that of its build until the test ends."""
    found: Implementation = request.param
    if found.build is not None and found.build != "native":
        library = compiled(found.build)
        monkeypatch.setattr(native_library, "native_library", lambda: library)
    native_library.native_function.cache_clear()
    yield found
    native_library.native_function.cache_clear()
