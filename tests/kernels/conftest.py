import ctypes
from collections.abc import Callable, Iterator

import pytest

import poison
from cpu_kernels import BUILDS, can_run, flags_for
from weft.kernels.native import library as native_library
from weft.kernels.native.library import load_library


@pytest.fixture
def poisoned_memory() -> Iterator[None]:
    """Memory that torch hands out uninitialised holds NaN."""
    with poison.poisoned_memory():
        yield


@pytest.fixture(scope="session")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], ctypes.CDLL]:
    """The CPU kernels compiled for one of `BUILDS`."""
    folder = tmp_path_factory.mktemp("libraries")
    return lambda build: load_library(flags_for(build), folder)


@pytest.fixture(params=BUILDS)
def native_build(
    request: pytest.FixtureRequest, compiled: Callable[[str], ctypes.CDLL], monkeypatch: pytest.MonkeyPatch
) -> Iterator[str]:
    """The CPU kernels are, one after the other, those compiled for this CPU and for lesser ones."""
    build: str = request.param
    if native_library.native_library() is None:
        pytest.skip("needs a C++ compiler")
    if not can_run(build):
        pytest.skip(f"this CPU does not run what is compiled for {build}")
    if build != "native":
        library = compiled(build)
        monkeypatch.setattr(native_library, "native_library", lambda: library)
    native_library.native_function.cache_clear()
    yield build
    native_library.native_function.cache_clear()
