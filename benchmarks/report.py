"""Parts of all benchmarks: options of command lines, runs in turns, and results with their provenance."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import math
import os
import platform
import statistics
import subprocess
import sys
from argparse import ArgumentParser, ArgumentTypeError, Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console
from rich.table import Column, Table

from manylora.config import usable_cores
from manylora.errors import ConfigError, ManyloraError

FILE_WIDTH = 240
"""Columns of a table that is not printed on a terminal."""
SHOWN = ("median", "min", "max")
"""The figures of a spread that tables show."""
_PACKAGES = ("manylora", "torch", "triton", "transformers", "peft", "numpy")
_ROOT = Path(__file__).resolve().parents[1]
Figures = dict[str, Any]
"""Figures of a run or a case, as JSON holds them."""
Options = Mapping[str, tuple[Any, ...]]
"""Options of a command line by name: default, help and, where the default does not say it, how its text is read."""
N = TypeVar("N")
R = TypeVar("R")


def positive(text: str) -> int:
    """Read a whole number from 1 on a command line.

    Raises:
        ArgumentTypeError: It is not.
    """
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise ArgumentTypeError(f"expected a whole number from 1, got {text!r}")
    return int(text)


def counts(text: str) -> list[int]:
    """Read whole numbers from 1, comma-separated; an empty text is none.

    Raises:
        ArgumentTypeError: They are not.
    """
    return [positive(each) for each in text.split(",")] if text else []


SETTINGS: Options = {"set": ([], "setting of the server, NAME=VALUE; may be repeated")}
"""Settings of a server that a benchmark starts."""
_READ: Mapping[type, Figures] = {
    bool: {"action": "store_true"},
    int: {"type": positive},
    float: {"type": float},
    list: {"action": "append"},
    type(...): {"required": True},
}
"""Arguments of `add_argument` by the type of an option's default; `...` makes it required."""


def make_parser(name: str, about: str | None, options: Options) -> ArgumentParser:
    """Make a parser of these options; an option that is read by a tuple has its values as choices."""
    parser = ArgumentParser(name, description=about, formatter_class=RawDescriptionHelpFormatter)
    for option, (default, text, *reads) in options.items():
        kind = dict(_READ.get(type(default), {}))
        for read in reads:
            kind["choices" if isinstance(read, tuple) else "type"] = read
        parser.add_argument("--" + option.replace("_", "-"), default=default, help=text, **kind)
    return parser


def take_turns(
    names: Iterable[N], repeats: int, run: Callable[[N, int], R], first: int = 0
) -> dict[N, list[R]]:
    """Run all contenders in each round, in reverse order in every second: a slow minute of the machine hits all.

    Args:
        names: What takes turns.
        repeats: Rounds that count: 1 to `repeats`.
        run: Runs one of them; gets its name and the round.
        first: The round to begin with. Round 0 is run to warm up; 1 leaves it out.

    Returns:
        What `run` returned in the rounds that count, by name.
    """
    runs: dict[N, list[R]] = {name: [] for name in names}
    for round_ in range(first, repeats + 1):
        for name in runs if round_ % 2 else reversed(runs):
            found = run(name, round_)
            print(f"round {round_} of {repeats}: {name}", file=sys.stderr, flush=True)
            if round_:
                runs[name].append(found)
    return runs


def provenance() -> Figures:
    """Command, commit, time, hardware and versions of this measurement."""
    return {
        "command": " ".join([*_program(), *sys.argv[1:]]),
        "commit": _commit(),
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "hardware": {
            "cpu": _cpu_model(),
            "cores": usable_cores(),
            "memory_gib": round(
                os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / (1 << 30), 1
            ),
            "load_average": list(os.getloadavg()),
        },
        "versions": {"python": platform.python_version(), **_versions()},
    }


def write_result(path: Path, result: Mapping[str, Any]) -> None:
    """Write a result as JSON, with the folders above it.

    Raises:
        ManyloraError: The file cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(result, indent=2) + "\n")
    except OSError as error:
        raise ManyloraError(f"cannot write the result to {path}: {error.strerror}") from error


def spread(values: Sequence[float]) -> Figures:
    """Median, smallest and largest of repeats, and all of them in order."""
    return {
        "median": statistics.median(values),
        "min": min(values),
        "max": max(values),
        "repeats": list(values),
    }


def spreads(
    runs: Mapping[str, Sequence[Mapping[str, float]]],
) -> dict[str, dict[str, Figures]]:
    """Spreads of the figures of each contender, from its runs."""
    return {
        name: {figure: spread([run[figure] for run in each]) for figure in each[0]}
        for name, each in runs.items()
    }


def ratios(over: Sequence[float], under: Sequence[float]) -> Figures:
    """The spread of the ratios of each round; NaN for a round without one."""
    return spread([one / two if two else math.nan for one, two in zip(over, under, strict=True)])


def goal(name: str, figure: float, limit: float, *, is_least: bool = False) -> Figures:
    """A figure and the most, or least, that it should be. NaN means not measured, and misses the goal."""
    reached = figure >= limit if is_least else figure <= limit
    return {
        "goal": name,
        "figure": figure,
        "should be": "least" if is_least else "most",
        "limit": limit,
        "ok": reached,
    }


def pick(figures: Any, path: str) -> Any:  # noqa: ANN401 - JSON
    """The figure at a path such as `ttft_ms.p99`; None where a part of it was not measured."""
    for name in path.split("."):
        figures = None if figures is None else figures[name]
    return figures


def make_row(figures: Figures, columns: Mapping[str, str]) -> Figures:
    """A row of a table: the figure at each path, by the title of its column."""
    return {title: pick(figures, path) for title, path in columns.items()}


def print_rows(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print a table of rows that have the same columns; in a file or a pipe nothing of it is cut."""
    first, *others = rows[0]
    table = Table(first, *(Column(name, justify="right") for name in others))
    for row in rows:
        table.add_row(
            *(f"{cell:,.4g}" if isinstance(cell, float) else str(cell) for cell in row.values())
        )
    Console(width=None if sys.stdout.isatty() else FILE_WIDTH).print(table)


def tell(
    name: str,
    about: str | None,
    options: Options,
    measure: Callable[[Namespace], Figures],
    arguments: Sequence[str] | None = None,
) -> int:
    """Measure, write the result as JSON, and print it: tables for people, and all of it as one JSON line.

    Args:
        name: Of the command; its last word is the name of the benchmark in its result.
        about: Its method, for `--help`.
        options: Its own; `--json` is one of every benchmark.
        measure: Returns the result. Its `table`, `ratios` and `goals` are printed as tables; its `failures` are
            sentences for stderr.
        arguments: The command line; that of this process when None.

    Returns:
        The exit status: 0, 1 for failures and errors, 2 for options that make no sense.
    """
    parser = make_parser(name, about, {**options, "json": (None, "write the result here", Path)})
    asked = parser.parse_args(arguments)
    command = name.split()[-1]
    try:
        measured = measure(asked)
        given = vars(asked)
        keys = [option for option in given if option.endswith("key")]
        shown = {option: value for option, value in given.items() if option not in keys}
        result = without_nan({"benchmark": command, **provenance(), "options": shown, **measured})
        for key in filter(None, map(given.get, keys)):
            result["command"] = result["command"].replace(key, "KEY")
        if asked.json:
            write_result(asked.json, result)
    except ManyloraError as error:
        print(f"{command}: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    for rows in (result["table"], _ratio_rows(result.get("ratios", {})), result.get("goals")):
        if rows:
            print_rows(rows)
    failures = result.get("failures", [])
    for failure in failures:
        print(f"{command}: {failure}", file=sys.stderr)
    print(json.dumps(result))
    return 1 if failures else 0


def without_nan(value: Any) -> Any:  # noqa: ANN401 - JSON in, JSON out
    """Copy JSON, with NaN and infinities as null, floats of six digits, and paths as text."""
    if isinstance(value, Mapping):
        return {key: without_nan(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [without_nan(item) for item in value]
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    if isinstance(value, Path):
        return str(value)
    return value


def spread_rows(figures: Mapping[str, Mapping[str, Figures]]) -> list[Figures]:
    """Rows of a table of spreads, which come by group and by name."""
    return [
        {"": group, "figure": name, **_shown(found)}
        for group, by_name in figures.items()
        for name, found in by_name.items()
    ]


def _ratio_rows(ratios: Mapping[str, Any]) -> list[Figures]:
    """Rows of single ratios and of spreads."""
    return [{"ratio": name, **_shown(found)} for name, found in ratios.items()]


def _shown(found: Any) -> Figures:  # noqa: ANN401 - a figure or a spread
    return {key: found[key] for key in SHOWN} if isinstance(found, Mapping) else {"": found}


def _program() -> list[str]:
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    return ["python -P -m", spec.name] if spec else [Path(sys.argv[0]).name]


def _commit() -> str | None:
    """The commit, with `+changes` if files were changed since; None outside of a repository."""
    command = [
        "git",
        "-C",
        str(_ROOT),
        "describe",
        "--always",
        "--exclude=*",
        "--abbrev=12",
        "--dirty=+changes",
    ]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")), ""
    )


def _versions() -> dict[str, str]:
    versions = {}
    for package in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    return versions
