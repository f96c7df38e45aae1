"""Levels of CPUs that the kernels in C++ are compiled for, and the features of the CPU at hand."""

from __future__ import annotations

import ctypes
from collections.abc import Set
from dataclasses import dataclass

ARCH_PRCTL = 158
"""System call of Linux on x86-64."""
REQUEST_TILES = 0x1023
"""Request of `ARCH_PRCTL` for the use of a part of the CPU's state."""
TILE_DATA = 18
"""Part of the CPU's state with AMX's tiles."""
AVX2 = frozenset({"avx2", "bmi1", "bmi2", "f16c", "fma", "movbe"})
AVX512 = frozenset({*AVX2, "avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"})
VNNI = frozenset({*AVX512, "avx512_vnni"})
BF16_FEATURES = frozenset({"avx512_bf16"})
BF16 = VNNI | BF16_FEATURES
TILES = frozenset({"amx_tile", "amx_bf16", "amx_int8"})
DOT_PRODUCT = frozenset({"asimd", "asimdrdm", "asimddp", "atomics", "crc32"})
BF16_LEVEL = "x86-64-v4-bf16"
VNNI_LEVEL = "x86-64-v4-vnni"
BF16_FLAGS = ("-march=x86-64-v4", "-mavx512bf16", "-mavx512vnni")


@dataclass(frozen=True, slots=True)
class Level:
    """A kind of CPU."""

    name: str
    """As `native/level.cpp` tells it."""
    machine: str
    """As `platform.machine()` tells it."""
    features: frozenset[str]
    """Features that the CPU must have, as /proc/cpuinfo names them."""
    flags: tuple[str, ...]
    """For the compiler."""
    is_emulated: bool = False
    """True if none of its kernels ran on such a CPU."""


LEVELS = (
    Level(
        "x86-64-v4-amx",
        "x86_64",
        BF16 | TILES,
        (*BF16_FLAGS, "-mamx-tile", "-mamx-bf16", "-mamx-int8"),
    ),
    Level(BF16_LEVEL, "x86_64", BF16, BF16_FLAGS),
    Level(VNNI_LEVEL, "x86_64", VNNI, ("-march=x86-64-v4", "-mavx512vnni")),
    Level("x86-64-v4", "x86_64", AVX512, ("-march=x86-64-v4",)),
    Level("x86-64-v3-vnni", "x86_64", AVX2 | {"avx_vnni"}, ("-march=x86-64-v3", "-mavxvnni")),
    Level("x86-64-v3", "x86_64", AVX2, ("-march=x86-64-v3",)),
    Level(
        "aarch64-i8mm", "aarch64", DOT_PRODUCT | {"i8mm"}, ("-march=armv8.2-a+dotprod+i8mm",), True
    ),
    Level("aarch64-dotprod", "aarch64", DOT_PRODUCT, ("-march=armv8.2-a+dotprod",), True),
    Level("aarch64", "aarch64", frozenset({"asimd"}), ("-march=armv8-a",), True),
)
"""The best first."""
EMULATED_LEVELS = frozenset(level.name for level in LEVELS if level.is_emulated)
BF16_LEVELS = frozenset(level.name for level in LEVELS if level.features >= BF16)
"""Levels with an instruction that multiplies bfloat16."""


def level_for(machine: str, features: Set[str]) -> Level | None:
    """The best level that a CPU runs; None where it runs none of them.

    Args:
        machine: As `platform.machine()` tells it.
        features: What it can do, in the words of /proc/cpuinfo.
    """
    return next(
        (level for level in LEVELS if level.machine == machine and level.features <= features), None
    )


def usable_features(cpuinfo: str) -> frozenset[str]:
    """Features of the CPU that Linux lets this process use. Asks Linux for AMX's tiles where the CPU has them.

    Args:
        cpuinfo: Content of /proc/cpuinfo.
    """
    lines = cpuinfo.splitlines()
    features = frozenset(
        word for line in lines if line.startswith(("flags", "Features")) for word in line.split()
    )
    return features if "amx_tile" not in features or _may_use_tiles() else features - TILES


def _may_use_tiles() -> bool:
    """Ask for tiles in all threads of this process; without that their use is a fault."""
    return bool(ctypes.CDLL(None).syscall(ARCH_PRCTL, REQUEST_TILES, TILE_DATA) == 0)
