"""Which kernels a CPU gets: levels of CPUs, prebuilt kernels, and the order in which kernels are looked for."""

import json
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from implementations import copy_sources, needs_compiler
from manylora.config import environment
from manylora.kernels.native import compilation, levels, peaks
from manylora.kernels.native import library as native_library
from manylora.kernels.native.compilation import (
    COMMON_FLAGS,
    FLAGS,
    WITHOUT_BF16,
    NativeUnavailableError,
    build,
    compiler_command,
    cpu_features,
    flags_for,
)
from manylora.kernels.native.levels import (
    AVX2,
    AVX512,
    BF16,
    BF16_FEATURES,
    BF16_FLAGS,
    DOT_PRODUCT,
    LEVELS,
    TILES,
    level_for,
    usable_features,
)
from manylora.kernels.native.library import describe, find_library, load_library

on_x86_linux = pytest.mark.skipif(
    (platform.system(), platform.machine()) != ("Linux", "x86_64"), reason="needs Linux on x86-64"
)
SAPPHIRE_RAPIDS = frozenset({"fpu", "sse2", *BF16, "avx512_fp16", *TILES})


@pytest.mark.parametrize(
    ("machine", "features", "name"),
    [
        ("x86_64", SAPPHIRE_RAPIDS, "x86-64-v4-amx"),
        ("x86_64", SAPPHIRE_RAPIDS - {"amx_bf16"}, "x86-64-v4-bf16"),
        ("x86_64", SAPPHIRE_RAPIDS - {"avx512_bf16"}, "x86-64-v4-vnni"),
        ("x86_64", BF16, "x86-64-v4-bf16"),
        ("x86_64", BF16 - {"avx512_vnni"}, "x86-64-v4"),
        ("x86_64", AVX512, "x86-64-v4"),
        ("x86_64", AVX512 - {"avx512dq"}, "x86-64-v3"),
        ("x86_64", AVX2 | {"avx_vnni"}, "x86-64-v3-vnni"),
        ("x86_64", AVX2 | {"avx512_vnni"}, "x86-64-v3"),
        ("x86_64", AVX2 - {"fma"}, None),
        ("x86_64", frozenset({"asimd"}), None),
        ("aarch64", frozenset({"fp", "asimd", "bf16"}), "aarch64"),
        ("aarch64", DOT_PRODUCT, "aarch64-dotprod"),
        ("aarch64", DOT_PRODUCT | {"i8mm", "bf16", "sve"}, "aarch64-i8mm"),
        ("aarch64", frozenset({"fp"}), None),
        ("riscv64", SAPPHIRE_RAPIDS, None),
    ],
)
def test_a_cpu_gets_the_best_level_that_it_runs(
    machine: str, features: frozenset[str], name: str | None
) -> None:
    level = level_for(machine, features)
    assert (level and level.name) == name


@pytest.mark.parametrize("is_granted", [True, False])
def test_tiles_are_used_only_where_linux_grants_them(
    is_granted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    cpuinfo = f"processor : 0\nmodel name : avx\nflags\t\t: {' '.join(SAPPHIRE_RAPIDS)}\nbugs : spectre_v2\n"
    monkeypatch.setattr(levels, "_may_use_tiles", lambda: is_granted)
    features = usable_features(cpuinfo)
    assert features >= BF16
    assert (features & TILES == TILES) is is_granted
    assert not features & {"avx", "spectre_v2", "processor"}


@on_x86_linux
def test_linux_grants_no_tiles_that_the_cpu_does_not_have() -> None:
    cpuinfo = Path("/proc/cpuinfo").read_text()
    if "amx_tile" in usable_features(cpuinfo):
        pytest.skip("this CPU has tiles")
    assert "amx_tile" not in usable_features(f"flags : {' '.join(SAPPHIRE_RAPIDS)}\n")


@on_x86_linux
@needs_compiler
@pytest.mark.parametrize(
    "level", [level for level in LEVELS if level.machine == "x86_64"], ids=lambda level: level.name
)
def test_what_is_compiled_for_a_level_says_so(
    level: levels.Level, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy_sources(tmp_path / "sources", "level.cpp")
    monkeypatch.setattr(compilation, "SOURCES", tmp_path / "sources")
    library = load_library(
        (*COMMON_FLAGS, *level.flags), tmp_path
    )  # what it is called for runs on any CPU
    assert describe(library) == f"{level.name}, compiled for this CPU"


@on_x86_linux
@needs_compiler
@pytest.mark.parametrize(("narrow", "is_left_out"), [(0.74, True), (0.76, False), (2.0, False)])
def test_a_cpu_that_is_slow_at_bfloat16_does_without(
    narrow: float, is_left_out: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy_sources(tmp_path / "sources", "level.cpp")
    monkeypatch.setattr(compilation, "SOURCES", tmp_path / "sources")
    monkeypatch.setattr(compilation, "FLAGS", (*COMMON_FLAGS, *BF16_FLAGS))
    monkeypatch.setattr(native_library, "PREBUILT", tmp_path)
    monkeypatch.setattr(native_library, "cpu_features", lambda: BF16)
    rates = {"float32": 1.0, "bfloat16": narrow}
    monkeypatch.setattr(peaks, "product_rate", lambda _library, name, *_: rates[name])
    found = native_library.level_of(find_library())
    assert found == ("x86-64-v4-vnni" if is_left_out else "x86-64-v4-bf16")


def test_flags_name_what_a_cpu_does_without() -> None:
    assert WITHOUT_BF16 not in flags_for(BF16)
    assert WITHOUT_BF16 not in flags_for(AVX2)
    assert WITHOUT_BF16 in flags_for(BF16 - BF16_FEATURES)


@pytest.fixture(scope="module")
def prebuilt(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as a wheel has it, with a library of this CPU's level; of the operations it has those on rows."""
    level = level_for(platform.machine(), usable_features(Path("/proc/cpuinfo").read_text()))
    if level is None or native_library.native_library() is None:
        pytest.skip("needs a C++ compiler and a CPU of a level")
    folder = tmp_path_factory.mktemp("wheel")
    copy_sources(folder / "sources", "level.cpp", "peaks.cpp", "rows.cpp")
    target = folder / "prebuilt" / f"{level.name}.so"
    target.parent.mkdir()
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(compilation, "SOURCES", folder / "sources")
        build(compiler_command(), (*COMMON_FLAGS, *level.flags), target)
    return target.parent


COMPARE = """
import json, sys
from pathlib import Path
import torch
from manylora.kernels.dispatch import kernels_for, native_kernels, torch_kernels
from manylora.kernels.native import library
library.PREBUILT = Path(sys.argv[1])
x = torch.randn(40, 512, generator=torch.Generator().manual_seed(0))
results = []
for dtype in (torch.float32, torch.bfloat16):
    kernels = kernels_for(torch.device("cpu"), dtype)
    assert kernels is native_kernels()
    for kind in (kernels, torch_kernels()):
        _, normed = kind.fused_add_rms_norm(x.to(dtype), x.flip(0).to(dtype), torch.ones(512, dtype=dtype), 1e-6)
        results.append(kind.silu_and_mul(normed).float())
errors = [((a - b).abs().max() / b.abs().max()).item() for a, b in (results[:2], results[2:])]
runtimes = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "omp" in line.split()[-1]}
print(json.dumps([library.describe(library.native_library()), errors, len(runtimes)]))
"""


def test_without_a_compiler_prebuilt_kernels_run_on_torch_s_threads(
    prebuilt: Path, tmp_path: Path
) -> None:
    (library,) = prebuilt.iterdir()
    assert b"libgomp" not in library.read_bytes()
    env = {**environment(), "PATH": str(tmp_path), "CXX": "", "XDG_CACHE_HOME": str(tmp_path)}
    command = [sys.executable, "-P", "-c", COMPARE, str(prebuilt)]
    done = subprocess.run(
        command, env=env, capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
    description, (error_f32, error_bf16), num_runtimes = json.loads(done.stdout)
    assert description == f"{library.stem}, prebuilt"
    assert error_f32 < 1e-5
    assert error_bf16 < 1e-2
    assert num_runtimes == 1
    assert not list(tmp_path.rglob("*.so"))


def test_what_was_compiled_before_is_preferred_and_nothing_is_compiled_beside_prebuilt_kernels(
    prebuilt: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(native_library, "PREBUILT", prebuilt)
    assert describe(find_library()).endswith(", prebuilt")
    assert not list(tmp_path.rglob("*.so"))
    copy_sources(tmp_path / "sources", "level.cpp", "peaks.cpp")
    monkeypatch.setattr(compilation, "SOURCES", tmp_path / "sources")
    load_library(flags_for(cpu_features()))
    assert describe(find_library()).endswith(", compiled for this CPU")


def test_prebuilt_kernels_that_cannot_be_loaded_are_reported(
    prebuilt: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (library,) = prebuilt.iterdir()
    (tmp_path / library.name).write_text("not a library")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(native_library, "PREBUILT", tmp_path)
    with pytest.raises(
        NativeUnavailableError,
        match=rf"{library.name} cannot be loaded: .*; install Manylora again",
    ):
        find_library()


@needs_compiler
def test_kernels_of_another_level_than_this_cpu_s_are_not_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy_sources(tmp_path / "sources", "level.cpp", "peaks.cpp")
    monkeypatch.setattr(compilation, "SOURCES", tmp_path / "sources")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(native_library, "PREBUILT", tmp_path)
    (tmp_path / "no level.so").touch()
    assert describe(find_library()).endswith(", compiled for this CPU")


@needs_compiler
def test_calls_into_an_openmp_runtime_that_torch_does_not_use_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources = tmp_path / "sources"
    sources.mkdir()
    # What clang calls; torch's runtime is g++'s.
    (sources / "a.cpp").write_text(
        'extern "C" void __kmpc_nothing();\nvoid a() { __kmpc_nothing(); }\n'
    )
    monkeypatch.setattr(compilation, "SOURCES", sources)
    with pytest.raises(
        NativeUnavailableError, match=r"undefined symbol: __kmpc_nothing; .* or CXX to a g\+\+"
    ):
        load_library(FLAGS, tmp_path)
    assert not list(tmp_path.glob("*.so"))
