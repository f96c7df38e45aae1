"""Draw results of benchmarks as SVG, beside their JSON. usage: plot_results.py [name...].

Needs matplotlib, which `.[dev]` brings. Same JSON, same matplotlib, same bytes. Colours and the transparent
background can be read on light and on dark pages.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("svg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

RESULTS = Path(__file__).resolve().parent.parent / "benchmarks" / "results"
INK = "#79808a"
BLUE = "#3d8bfd"
ORANGE = "#e8710a"
GREEN = "#2aa876"
PINK = "#d6549a"
STYLE = {
    "axes.axisbelow": True,
    "axes.edgecolor": INK,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.labelcolor": INK,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlecolor": INK,
    "axes.titlelocation": "left",
    "axes.titlesize": 10,
    "font.family": "sans-serif",
    "font.size": 9,
    "grid.alpha": 0.25,
    "grid.color": INK,
    "legend.frameon": False,
    "legend.labelcolor": INK,
    "savefig.transparent": True,
    "svg.fonttype": "none",
    "svg.hashsalt": "manylora",
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
}


def step(result: dict[str, Any]) -> None:
    """Parts of each step, as multiples of its floor."""
    cases = result["cases"]
    _, axes = plt.subplots(figsize=(8, 0.5 * len(cases) + 1.2), layout="constrained")
    places = range(len(cases))
    starts = [0.0] * len(cases)
    for (label, parts), color in zip(
        result["groups"].items(), (BLUE, ORANGE, GREEN, PINK, INK), strict=True
    ):
        widths = [
            case["step / floor"] * sum(case["part_share"][part] for part in parts)
            for case in cases.values()
        ]
        axes.barh(places, widths, left=starts, color=color, label=label, height=0.6)
        starts = [start + width for start, width in zip(starts, widths, strict=True)]
    for place, end in zip(places, starts, strict=True):
        axes.annotate(
            f"{end:.2f}", (end, place), xytext=(4, 0), textcoords="offset points", va="center"
        )
    axes.axvline(1, color=INK, lw=1, ls=":")
    axes.set_yticks(places, list(cases))
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
    axes.grid(visible=True, axis="x")
    axes.set(title="Time of a step over its floor", xlim=(0, 1.1 * max(starts)))
    axes.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.4, -0.12), ncols=3)


def fairness(result: dict[str, Any]) -> None:
    """Quiet TTFT by arm beside its goal, and what the flood keeps."""
    _, (left, right) = plt.subplots(
        1, 2, figsize=(9, 3.2), width_ratios=(1.6, 1), layout="constrained"
    )
    arms = {name: arm for name, arm in result["arms"].items() if arm["requests"]}
    places = range(len(arms))
    for shift, key, color in ((-0.2, "p50", BLUE), (0.2, "p95", ORANGE)):
        values = [arm["ttft_ms"][key] for arm in arms.values()]
        left.bar([place + shift for place in places], values, color=color, width=0.36, label=key)
    limits = {
        each["goal"].split(":")[0]: each["limit"]
        for each in result["goals"]
        if "TTFT" in each["goal"]
    }
    for place, name in enumerate(arms):
        if name in limits:
            label = "most p95 should be" if name == "one" else None
            left.hlines(
                limits[name], place - 0.4, place + 0.4, color=INK, ls="--", lw=1, label=label
            )
    left.set(title="Quiet tenant's time to first token, ms", yscale="log")
    left.set_xticks(places, list(arms))
    left.legend(fontsize=8, loc="upper left")
    flooded = {name: arm["kept"] for name, arm in arms.items() if arm["kept"]}
    _bars(right, list(flooded), list(flooded.values()), GREEN)
    right.axhline(0.95, color=INK, lw=1, ls="--")
    right.set(title="Part of its tokens/s that the flood keeps")


def overload(result: dict[str, Any]) -> None:
    """Goodput and times by offered load."""
    _, (left, middle, right) = plt.subplots(1, 3, figsize=(10, 3), layout="constrained")
    phases = result["phases"]
    names = [f"{phase['times']:g}x" for phase in phases]
    left.bar(names, [phase["goodput"] for phase in phases], color=BLUE, width=0.6)
    left.axhline(0.9, color=INK, lw=1, ls="--")
    left.set(title="Goodput over capacity", xlabel="offered load")
    for key, label, color in (("ttft_ms", "all", ORANGE), ("quiet_ttft_ms", "quiet tenant", GREEN)):
        middle.plot(
            names, [phase[key]["p99"] for phase in phases], "o-", ms=4, color=color, label=label
        )
    middle.set(title="TTFT of who is served, p99, ms", xlabel="offered load", yscale="log")
    middle.legend(fontsize=8)
    refused = [phase["refusal_ms"] for phase in phases]
    for key, color in (("p50", BLUE), ("p99", PINK)):
        right.plot(
            names,
            [each[key] or float("nan") for each in refused],
            "o-",
            ms=4,
            color=color,
            label=key,
        )
    right.set(title="Time to a refusal, ms", xlabel="offered load", ylim=(0, None))
    right.legend(fontsize=8)


def adapters_http(result: dict[str, Any]) -> None:
    """Rest of the throughput with every adapter on the device beforehand."""
    _, axes = plt.subplots(figsize=(6, 3.2), layout="constrained")
    arms = result["arms"]
    names = {"tight": f"{arms['tight']['adapters']}, room for half"} if "tight" in arms else {}
    for shift, span, color in ((-0.2, "cold", ORANGE), (0.2, "warm", BLUE)):
        spreads = [arm["ratio"][span] for arm in arms.values()]
        places = [place + shift for place in range(len(arms))]
        _bars(axes, places, spreads, color, width=0.36, label=span)
    for limit in (0.85, 0.95):
        axes.axhline(limit, color=INK, lw=1, ls="--")
    axes.set_xticks(range(len(arms)), [names.get(name, name) for name in arms])
    axes.set(title="Tokens/s over those with all on the device", xlabel="adapters, Zipf's law")
    axes.legend(fontsize=8, loc="lower right", bbox_to_anchor=(1, 1), ncols=2)


PLOTS: dict[str, Callable[[dict[str, Any]], None]] = {
    "step-cpu": step,
    "fairness-cpu": fairness,
    "overload-cpu": overload,
    "adapters-http-cpu": adapters_http,
    "adapters-http-0.5b-cpu": adapters_http,
}


def draw(name: str, folder: Path = RESULTS) -> Path:
    """Draw one result; returns the SVG."""
    result = json.loads((folder / f"{name}.json").read_text())
    with mpl.rc_context(STYLE):
        PLOTS[name](result)
        path = folder / f"{name}.svg"
        plt.savefig(path, metadata={"Date": None})
        plt.close()
    return path


def main() -> int:
    """Draw what is named, or every result that is there."""
    for name in sys.argv[1:] or [name for name in PLOTS if (RESULTS / f"{name}.json").exists()]:
        print(draw(name))
    return 0


def _bars(
    axes: Axes,
    places: list[Any],
    spreads: list[dict[str, Any]],
    color: str,
    **options: Any,  # noqa: ANN401
) -> None:
    medians = [each["median"] for each in spreads]
    bounds = [
        [each["median"] - each["min"] for each in spreads],
        [each["max"] - each["median"] for each in spreads],
    ]
    axes.bar(
        places,
        medians,
        yerr=bounds,
        color=color,
        ecolor=INK,
        capsize=3,
        **{"width": 0.6, **options},
    )


if __name__ == "__main__":
    sys.exit(main())
