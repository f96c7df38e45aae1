"""Compiling the CPU kernels: what is kept, what is said where it is not possible, and who may write to the folder."""

import ctypes
import logging
import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from implementations import copy_sources, needs_compiler
from manylora.config import environment
from manylora.kernels.dispatch import kernels_for, torch_kernels
from manylora.kernels.kv_layer import KvLayer
from manylora.kernels.native import compilation
from manylora.kernels.native import library as native_library
from manylora.kernels.native import rows as rows_native
from manylora.kernels.native.attention import ARGUMENTS
from manylora.kernels.native.compilation import FLAGS, NativeUnavailableError
from manylora.kernels.native.library import load_library, native_function

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.skipif(
    platform.system() != "Linux", reason="the CPU kernels are compiled on Linux only"
)


@pytest.fixture
def forgotten_library() -> Iterator[None]:
    """The library of this process is looked for again, in the test and after it."""
    looks_for_it = native_library.native_library
    looks_for_it.cache_clear()
    native_function.cache_clear()
    yield
    looks_for_it.cache_clear()
    native_function.cache_clear()


@pytest.fixture
def little_sources(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Path:
    """Sources that are compiled in no time, for tests that do not compute; skipped where nothing can be compiled."""
    if native_library.native_library() is None:
        pytest.skip("needs a C++ compiler")
    folder = tmp_path_factory.mktemp("native")
    (folder / "nothing.h").write_text("// nothing\n")
    (folder / "nothing.cpp").write_text(
        '#include <omp.h>\n#include "nothing.h"\nint n() { return omp_get_num_threads(); }\n'
    )
    monkeypatch.setattr(compilation, "SOURCES", folder)
    return folder


def test_what_was_compiled_is_kept_for_the_same_flags_cpu_and_sources(
    little_sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def compiled() -> set[tuple[str, int]]:
        return {(path.name, path.stat().st_ino) for path in tmp_path.iterdir()}

    load_library(FLAGS, tmp_path)
    ((name, _),) = kept = compiled()
    assert name.endswith(".so")
    load_library(FLAGS, tmp_path)
    assert compiled() == kept
    load_library((*FLAGS, "-g"), tmp_path)
    assert len(compiled()) == 2
    with monkeypatch.context() as changed:
        changed.setattr(platform, "machine", lambda: "another")
        load_library(FLAGS, tmp_path)
    assert len(compiled()) == 3
    (little_sources / "nothing.h").write_text("// nothing else\n")
    load_library(FLAGS, tmp_path)
    assert len(compiled()) == 4
    monkeypatch.setenv("CXX", "env c++")  # a command of two words
    load_library(FLAGS, tmp_path)
    assert len(compiled()) == 5
    assert kept < compiled()


@needs_compiler
def test_threads_are_those_of_torch() -> None:
    assert native_library.native_library() is not None
    lines = Path("/proc/self/maps").read_text().splitlines()
    assert (
        len(
            {
                line.split()[-1]
                for line in lines
                if "libgomp" in line or "libomp" in line or "libiomp" in line
            }
        )
        == 1
    )


@pytest.mark.usefixtures("forgotten_library")
def test_without_a_compiler_torch_operators_serve_and_that_is_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(
        NativeUnavailableError, match=r"no C\+\+ compiler; install g\+\+, or set CXX"
    ):
        load_library(FLAGS)
    with caplog.at_level(logging.WARNING):
        assert native_library.native_library() is None
        assert native_library.native_library() is None
        assert kernels_for(torch.device("cpu"), torch.float32) is torch_kernels()
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert "torch operators, which is slower" in record.getMessage()
    assert "install g++, or set CXX" in record.getMessage()
    with pytest.raises(NativeUnavailableError, match=r"no CPU kernels in C\+\+"):
        rows_native.silu_and_mul(torch.ones(1, 2))


@pytest.mark.usefixtures("forgotten_library")
@pytest.mark.parametrize(
    ("compiler", "reason"),
    [
        ("/nowhere/compiler", "CXX=/nowhere/compiler is no program"),
        ("/bin/false", "/bin/false failed"),
        ("'g++", "is no command: No closing quotation"),
    ],
)
def test_a_compiler_that_the_user_names_and_that_fails_is_reported(
    compiler: str,
    reason: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("CXX", compiler)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(NativeUnavailableError, match=reason):
        load_library(FLAGS)
    assert native_library.native_library() is None
    assert reason in caplog.text
    assert not list(tmp_path.rglob("*.so"))


@needs_compiler
@pytest.mark.usefixtures("forgotten_library")
@pytest.mark.parametrize(("mode", "other_user"), [(0o770, 0), (0o702, 0), (0o777, 0), (0o700, 1)])
def test_a_folder_of_others_or_that_others_write_to_is_refused(
    mode: int,
    other_user: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    user = os.geteuid()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(os, "geteuid", lambda: user + other_user)
    folder = tmp_path / "manylora" / "kernels"
    folder.mkdir(parents=True)
    folder.chmod(mode)
    assert native_library.native_library() is None
    assert f"{folder} is another user's or can be written by others" in caplog.text
    assert not list(folder.iterdir())


@pytest.mark.usefixtures("little_sources")
def test_a_folder_that_is_made_is_for_this_user_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    before = os.umask(0o002)
    try:
        load_library(FLAGS)
    finally:
        os.umask(before)
    assert (tmp_path / "manylora" / "kernels").stat().st_mode & 0o777 == 0o700
    assert len(list((tmp_path / "manylora" / "kernels").iterdir())) == 1


@pytest.mark.usefixtures("little_sources")
def test_a_folder_that_cannot_be_written_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    with pytest.raises(
        NativeUnavailableError,
        match=r"missing/manylora-\w+\.so cannot be written: .*; set XDG_CACHE_HOME",
    ):
        load_library(FLAGS, tmp_path / "missing")
    (tmp_path / "file").touch()
    monkeypatch.setattr(Path, "home", homeless)
    for cache in (str(tmp_path / "file"), ""):
        monkeypatch.setenv("XDG_CACHE_HOME", cache)
        with pytest.raises(
            NativeUnavailableError, match=r"no folder to keep them in: .*; set XDG_CACHE_HOME"
        ):
            load_library(FLAGS)


# Notes that it was called, and compiles once the other process has asked for its version too.
PATIENT_COMPILER = """#!/bin/sh
[ "$1" = --version ] && touch "$0.asked.$$" && exec c++ --version
echo "$@" >>"$0.calls"
for _ in $(seq 200); do
  [ "$(ls "$0".asked.* | wc -l)" -ge 2 ] && exec c++ "$@"
  sleep 0.05
done
exit 1
"""
# Writes what it is asked for.
HASTY_COMPILER = """#!/bin/sh
[ "$1" = --version ] && exit 0
while [ "$1" != -o ]; do shift; done
echo nothing >"$2"
"""
COMPILE_AND_COMPUTE = """
import sys
from pathlib import Path
import torch
from manylora.kernels.native import compilation, library as native_library
from manylora.kernels.native import rows as rows_native
compilation.SOURCES = Path(sys.argv[2])
library = native_library.load_library(tuple(sys.argv[3:]), Path(sys.argv[1]))
native_library.native_library = lambda: library
print(rows_native.silu_and_mul(torch.tensor([[50.0, 3.0]])).tolist())
"""


@needs_compiler
def test_of_two_processes_that_need_a_library_one_compiles_and_the_other_waits(
    tmp_path: Path,
) -> None:
    compiler, folder = tmp_path / "compiler", tmp_path / "libraries"
    compiler.write_text(PATIENT_COMPILER)
    compiler.chmod(0o700)
    folder.mkdir()
    copy_sources(tmp_path / "sources", "rows.cpp")
    processes = [
        subprocess.Popen(
            [
                sys.executable,
                "-P",
                "-c",
                COMPILE_AND_COMPUTE,
                str(folder),
                str(tmp_path / "sources"),
                *FLAGS,
                "-O0",
            ],
            env={**environment(), "CXX": str(compiler)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    for process in processes:
        out, err = process.communicate(timeout=120)
        assert process.returncode == 0, err
        assert out == "[[150.0]]\n"
    (kept,) = folder.iterdir()
    assert kept.suffix == ".so"
    assert len(Path(f"{compiler}.calls").read_text().splitlines()) == 2, (
        "one source, and the library"
    )


@needs_compiler
def test_kernels_are_compiled_where_no_package_is_installed(tmp_path: Path) -> None:
    """`scripts/setup` does that, while torch is installed."""
    compiler = tmp_path / "compiler"
    compiler.write_text(HASTY_COMPILER)
    compiler.chmod(0o700)
    command = [sys.executable, "-S", "-P", "-m", "manylora.kernels.native.compilation"]
    env = {
        "PATH": environment()["PATH"],
        "CXX": str(compiler),
        "XDG_CACHE_HOME": str(tmp_path),
        "PYTHONPATH": str(ROOT),
    }
    for _ in range(2):
        result = subprocess.run(
            command, env=env, capture_output=True, text=True, check=False, timeout=60
        )
        assert result.returncode == 0, result.stderr
    (kept,) = (tmp_path / "manylora" / "kernels").iterdir()
    assert kept.suffix == ".so"
    result = subprocess.run(
        command, env={**env, "CXX": "nowhere"}, capture_output=True, text=True, check=False
    )
    assert (result.returncode, result.stderr) == (
        1,
        "the CPU kernels cannot be compiled: CXX=nowhere is no program; set CXX to a compiler\n",
    )


@needs_compiler
def test_other_dtypes_are_refused() -> None:
    with pytest.raises(
        ValueError, match=r"expected one of torch\.float32, torch\.bfloat16, got torch\.float64"
    ):
        native_function("rms_norm", torch.float64, "i")


@needs_compiler
def test_too_little_memory_is_an_error_and_not_the_end_of_the_process() -> None:
    task = torch.tensor([0, 1, 0, 0], dtype=torch.int32)
    kv = KvLayer(torch.zeros(1, 1, 1, 1), torch.zeros(1, 1, 1, 1))
    attend = native_function("attend", torch.float32, ARGUMENTS, ctypes.c_bool)
    no_rows, head_dim = (0, 0, 0, 0.0, 0, 0, 0), 1 << 50
    assert attend(0, 0, 0, *no_rows, kv.address, 0, task.data_ptr(), 1, 1, 1, head_dim, 1.0, 0, 0)


@pytest.mark.usefixtures("little_sources")
def test_an_error_of_a_compilation_is_reported(tmp_path: Path) -> None:
    with pytest.raises(NativeUnavailableError, match=r"failed: .*-fno-such-flag"):
        load_library((*FLAGS, "-fno-such-flag"), tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("little_sources")
def test_a_damaged_library_is_compiled_again(tmp_path: Path) -> None:
    (tmp_path / "sound").mkdir()
    load_library(FLAGS, tmp_path / "sound")
    (sound,) = (tmp_path / "sound").iterdir()
    damaged = tmp_path / sound.name
    damaged.touch(mode=0o700)
    with pytest.raises(NativeUnavailableError, match=r"cannot be loaded.*set XDG_CACHE_HOME"):
        load_library(FLAGS, tmp_path)
    load_library(FLAGS, tmp_path)
    assert damaged.stat().st_size > 0


@pytest.mark.usefixtures("little_sources")
def test_a_library_that_others_can_write_to_is_not_loaded(tmp_path: Path) -> None:
    load_library(FLAGS, tmp_path)
    (kept,) = tmp_path.iterdir()
    kept.chmod(0o777)
    with pytest.raises(NativeUnavailableError, match="can be written by others"):
        load_library(FLAGS, tmp_path)


@pytest.mark.usefixtures("little_sources")
def test_a_cache_folder_that_depends_on_where_one_stands_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", "here")
    monkeypatch.setattr(Path, "home", lambda: tmp_path / "home")
    load_library(FLAGS)
    assert [path.name for path in tmp_path.iterdir()] == ["home"]
