"""Write the README's figures from `benchmarks/results/`, between two marks. usage: readme_speed.py [--check]."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
BEGIN, END = "<!-- figures: scripts/readme_speed.py -->\n", "<!-- end of figures -->\n"


def result(name: str) -> dict[str, Any]:
    """One result of a benchmark."""
    return dict(json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text()))


def machine(run: dict[str, Any]) -> str:
    """Where and when a result was measured."""
    hardware, versions = run["hardware"], run["versions"]
    return f"{hardware['cores']} cores of {hardware['cpu']}, torch {versions['torch']}, {run['at'][:10]}"


def offline_table(run: dict[str, Any]) -> list[str]:
    """Weft against the reference in one process."""
    speed, ratios, load = run["output_tokens_per_s"], run["ratios"], run["load"]
    rows = [
        ("base", "transformers", "base", "base: weft / transformers"),
        ("8 mixed adapters, ranks 8 to 64", "transformers + PEFT", "mixed", "mixed: weft / transformers + PEFT"),
        ("one request alone", "transformers", "single", "single: weft / transformers"),
    ]
    lines = [
        f"{load['requests']} requests of {load['input_tokens']} + {load['output_tokens']} tokens at once,"
        f" {load['model']}; output tokens per second, medians of {load['repeats']} interleaved repeats"
        f" ({machine(run)}; `{run['command']}`):",
        "",
        "| | Weft | reference | ratio |",
        "|---|---|---|---|",
    ]
    lines += [
        f"| {what} | {speed['weft'][case]:.1f} | {speed[peer][case]:.1f} ({peer}) | **{ratios[ratio]:.2f}** |"
        for what, peer, case, ratio in rows
    ]
    lines += ["", f"8 mixed adapters run at {ratios['weft: mixed / base']:.0%} of Weft's own base speed."]
    return lines


def serving_line(run: dict[str, Any]) -> str:
    """One serving run of the demo model."""
    options, summary = run["options"], run["summary"]
    how = f"{options['concurrency']} in flight" if options["rate"] is None else f"{options['rate']:g} arriving a second"
    return (
        f"Demo model over HTTP, base and 5 adapters, {options['popularity']} popularity, {how}:"
        f" {summary['output_tokens_per_s']:.0f} tokens/s, TTFT p50 {summary['ttft_ms']['p50']:.0f} ms"
        f" and p99 {summary['ttft_ms']['p99']:.0f} ms, {summary['errors']} errors in {summary['requests']} requests."
    )


def section() -> str:
    """The text between the marks."""
    lines = offline_table(result("offline-cpu"))
    lines += ["", serving_line(result("serve-demo-closed-cpu")), "", serving_line(result("serve-demo-open-cpu"))]
    return "\n".join(lines) + "\n"


def main() -> int:
    """Write the section, or with --check say whether it is current."""
    text = README.read_text()
    head, rest = text.split(BEGIN)
    tail = rest.split(END)[1]
    wanted = head + BEGIN + section() + END + tail
    if "--check" in sys.argv[1:]:
        if wanted != text:
            print("README.md does not show the figures of benchmarks/results/; run scripts/readme_speed.py")
        return int(wanted != text)
    README.write_text(wanted)
    return 0


if __name__ == "__main__":
    sys.exit(main())
