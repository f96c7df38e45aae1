"""Layers in 8 and 4 bits as compiled for aarch64, which an emulator runs where both are there.

Debian has them: g++-aarch64-linux-gnu and qemu-user-static.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch

from implementations import BF16, F32
from manylora.kernels.native import quantised
from manylora.kernels.native.compilation import COMMON_FLAGS, SOURCES
from manylora.kernels.native.levels import LEVELS, Level
from manylora.kernels.native.quantised import QuantisedHead, QuantisedLinear
from manylora.kernels.plain.quantised import quantised_head, quantised_linear
from manylora.kernels.quantised import Int4Weight, Int8Weight

COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64-static"
LIBRARIES = "/usr/aarch64-linux-gnu"
COLUMNS_OF_REGISTERS = 16
"""Columns of a panel where registers are small."""
DRIVER = Path(__file__).parents[1] / "support" / "foreign_linear.cpp"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        shutil.which(COMPILER) is None or shutil.which(EMULATOR) is None,
        reason=f"needs {COMPILER} and {EMULATOR}",
    ),
]


@pytest.fixture(
    scope="module",
    params=[level for level in LEVELS if level.machine == "aarch64"],
    ids=lambda level: level.name,
)
def program(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The layers of a level with a program that calls them; all other kernels are compiled too."""
    level: Level = request.param
    folder = tmp_path_factory.mktemp(level.name)
    flags = (*COMMON_FLAGS, *level.flags)
    for source in sorted(SOURCES.glob("*.cpp")):
        compiled = [COMPILER, *flags, "-c", str(source), "-o", f"{folder}/{source.stem}.o"]
        subprocess.run(compiled, check=True, capture_output=True)
    linked = [COMPILER, *flags, str(DRIVER), f"{folder}/quantised.o", "-o", f"{folder}/program"]
    subprocess.run(linked, check=True, capture_output=True)
    return folder / "program"


def computed(program: Path, layer: QuantisedLinear, x: torch.Tensor) -> torch.Tensor:
    """Result of the program for x."""
    folder = program.parent
    rows = len(x)
    y = torch.empty(rows, layer.out_features, dtype=x.dtype if layer.parts == 1 else F32)
    room = (rows * layer.parts + 15) * layer._row_bytes
    sizes = [rows, layer.in_features, layer.out_features, y.nbytes, room]
    np.array(sizes, dtype=np.int64).tofile(folder / "sizes")
    operands = {"x": x, "panels": layer._panels, "scales": layer._scales, "bias": layer._bias}
    for name, operand in operands.items():
        (folder / name).write_bytes(operand.contiguous().view(torch.uint8).numpy().tobytes())
    function = f"{layer._name}_{'float32' if x.dtype == F32 else 'bfloat16'}"
    command = [EMULATOR, "-L", LIBRARIES, "-cpu", "max", str(program), function, str(folder)]
    subprocess.run(command, check=True, timeout=60, env={"OMP_NUM_THREADS": "1"})
    return torch.frombuffer(bytearray((folder / "y").read_bytes()), dtype=y.dtype).view_as(y)


@pytest.mark.parametrize("rows", [1, 2, 7, 13])
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("kind", ["int8", "int4", "head"])
def test_aarch64_computes_the_same(
    program: Path, kind: str, dtype: torch.dtype, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quantised, "panel_columns", lambda _: COLUMNS_OF_REGISTERS)
    random = torch.Generator().manual_seed(rows)
    weight = torch.randn(70, 100, generator=random)
    weight[:, ::7] *= 100  # codes at both ends
    x = torch.randn(rows, 100, generator=random).to(dtype)
    if kind == "head":
        rounded = Int8Weight.of(weight)
        found = computed(program, QuantisedHead(rounded), x)
        expected = quantised_head(rounded)(x)
    else:
        made = Int8Weight.of(weight) if kind == "int8" else Int4Weight.of(weight)
        bias = torch.randn(70, generator=random)
        found = computed(program, QuantisedLinear(made, bias), x)
        expected = quantised_linear(made, bias)(x)
    tolerance = 1e-2 if found.dtype == BF16 else 1e-5
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance * 100)
