"""Write the figures in documents from `benchmarks/results/`. usage: readme_speed.py [--check].

A document has a section between `<!-- NAME: scripts/readme_speed.py -->` and `<!-- end of NAME -->`, with a NAME of
`SECTIONS`. With --check nothing is written, and a section that differs from the results is an error.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = tuple(
    ROOT / path
    for path in (
        "README.md",
        "docs/benchmarks.md",
        "docs/cluster.md",
        "docs/fairness.md",
        "docs/quantisation.md",
    )
)
RESULTS = ROOT / "benchmarks" / "results"
SECTION = re.compile(
    r"(<!-- (\w+): scripts/readme_speed\.py -->\n).*?(<!-- end of \2 -->\n)", re.DOTALL
)


def result(name: str) -> dict[str, Any]:
    """One result of a benchmark."""
    return dict(json.loads((RESULTS / f"{name}.json").read_text()))


def asked(run: dict[str, Any]) -> dict[str, Any]:
    """Options and load of a benchmark."""
    return {**run.get("options", {}), **run.get("load", {})}


def machine(run: dict[str, Any]) -> str:
    """Place and day of a result."""
    hardware = run["hardware"]
    versions = run["versions"]
    return f"{hardware['cores']} cores of {hardware['cpu']}, torch {versions['torch']}, {run['at'][:10]}"


def offline_table(run: dict[str, Any]) -> list[str]:
    """Manylora against the reference in one process."""
    speed = run["output_tokens_per_s"]
    ratios = run["ratios"]
    load = asked(run)
    rows = [
        ("base", "transformers", "base", "base: manylora / transformers"),
        (
            "8 mixed adapters, ranks 8 to 64",
            "transformers + PEFT",
            "mixed",
            "mixed: manylora / transformers + PEFT",
        ),
        ("one request alone", "transformers", "single", "single: manylora / transformers"),
    ]
    lines = [
        f"{load['requests']} requests of {load['input_tokens']} + {load['output_tokens']} tokens at once,"
        f" {load['model']}; output tokens per second, medians of {load['repeats']} interleaved repeats"
        f" ({machine(run)}; `{run['command']}`):",
        "",
        "| | Manylora | reference | ratio |",
        "|---|---|---|---|",
    ]
    lines += [
        f"| {what} | {speed['manylora'][case]:.1f} | {speed[peer][case]:.1f} ({peer}) | **{ratios[ratio]:.2f}** |"
        for what, peer, case, ratio in rows
    ]
    lines += [
        "",
        f"8 mixed adapters run at {ratios['manylora: mixed / base']:.0%} of Manylora's own base speed.",
    ]
    return lines


def serving_line(run: dict[str, Any]) -> str:
    """One serving run of the demo model."""
    options = run["options"]
    summary = run["summary"]
    how = (
        f"{options['concurrency']} in flight"
        if options["rate"] is None
        else f"{options['rate']:g} arriving a second"
    )
    return (
        f"Demo model over HTTP, base and 5 adapters, {options['popularity']} popularity, {how}:"
        f" {summary['output_tokens_per_s']:.0f} tokens/s, TTFT p50 {summary['ttft_ms']['p50']:.0f} ms"
        f" and p99 {summary['ttft_ms']['p99']:.0f} ms, {summary['errors']} errors in {summary['requests']} requests."
    )


COMPARED = ["compare-vllm-base-cpu", "compare-vllm-single-cpu", "compare-vllm-mixed-cpu"]
"""Comparisons with other servers, in the order of the page."""
QUANTISED = [
    "compare-llama-int8-cpu",
    "compare-llama-int8-single-cpu",
    "compare-llama-int4-single-cpu",
    "compare-vllm-int8-cpu",
]
"""Comparisons with quantised weights."""
AVX2 = [
    "compare-llama-bf16-single-avx2-cpu",
    "compare-llama-int8-single-avx2-cpu",
    "compare-llama-int4-single-avx2-cpu",
    "compare-llama-int8-avx2-cpu",
]
"""Comparisons in which both do without AVX-512."""


def step_table(run: dict[str, Any]) -> list[str]:
    """Steps against their floor, and where their time goes."""
    lines = [
        f"Steps against their floor, the time that their bytes or their multiply-adds take at the rates of this CPU;"
        f" and shares of the step ({machine(run)}; `{run['command']}`). [Plot](benchmarks/results/step-cpu.svg).",
        "",
        "| step | of its floor | " + " | ".join(run["groups"]) + " |",
        "|---|---|" + "---|" * len(run["groups"]),
    ]
    for name, case in run["cases"].items():
        shares = (
            sum(case["part_share"][part] for part in parts) for parts in run["groups"].values()
        )
        cells = " | ".join(f"{share:.0%}" for share in shares)
        lines.append(f"| {name} | **{case['step / floor']:.2f}** | {cells} |")
    return lines


def load_of(run: dict[str, Any]) -> tuple[str, str]:
    """Models of a comparison, and requests at a time."""
    options = run["options"]
    adapters = len(options["models"].split(",")) - 1
    who = f"base and {adapters} mixed adapters" if adapters else "base"
    return who, f"{options['concurrency']} at once" if options[
        "concurrency"
    ] > 1 else "one at a time"


def compare_table(runs: list[dict[str, Any]]) -> list[str]:
    """Manylora and another server over HTTP."""
    peer = runs[0]["options"]["peer_name"]
    lines = [
        f"Manylora and {peer} ({runs[0]['options']['peer_about']}) over HTTP in turns; output tokens per second,"
        f" medians of rounds, and Manylora's times to the first token and per token as shares of {peer}'s"
        f" ({machine(runs[0])}; `manylora bench compare`, all of Manylora's options are in"
        " `benchmarks/results/compare-*.json`):",
        "",
        f"| load | Manylora | {peer} | ratio | TTFT | per token |",
        "|---|---|---|---|---|---|",
    ]
    for run in runs:
        options = run["options"]
        rates = {name: each["output tokens/s"] for name, each in run["figures"].items()}
        who, how = load_of(run)
        tokens = f"{options['input_tokens']} + {options['output_tokens']} tokens"
        ratio, ttft, tpot = (
            run["ratios"][name] for name in ("output tokens/s", "TTFT p50 ms", "TPOT p50 ms")
        )
        lines.append(
            f"| {who}, {how}, {tokens}, {options['repeats']} rounds"
            f" | {rates['Manylora']['median']:.1f} | {rates[peer]['median']:.1f}"
            f" | **{ratio['median']:.2f}** ({ratio['min']:.2f} to {ratio['max']:.2f})"
            f" | {ttft['median']:.2f} | {tpot['median']:.2f} |"
        )
    return lines


def overhead_line(run: dict[str, Any]) -> str:
    """Shares that are added to a step's arithmetic."""
    shares = run["share of a step"]
    return (
        f"Planning, messages between processes and HTTP take **{shares['all']['median']:.1%}** of a step of"
        f" {asked(run)['requests']} requests ({shares['all']['min']:.1%} to {shares['all']['max']:.1%};"
        f" `{run['command']}`)."
    )


def push_line(run: dict[str, Any]) -> str:
    """From a push to the first token of its version."""
    idle, loaded = (run["phases"][name] for name in ("idle", "loaded"))
    options = run["options"]
    first, last = run["sizes"]

    def spread(found: dict[str, float]) -> str:
        return f"**{found['median']:.0f} ms** ({found['min']:.0f} to {found['max']:.0f})"

    return (
        "From the push of a version of rank 16 (all linear layers, Qwen2-0.5B shape) to its first token: median"
        f" {spread(idle['total_ms'])} on an idle server, {spread(loaded['total_ms'])} beside {options['in_flight']}"
        f" running requests; of it the push itself {idle['push_ms']['median']:.0f} and"
        f" {loaded['push_ms']['median']:.0f} ms. Over {options['versions']} versions, the server's memory changed by"
        f" {last['rss_mib'] - first['rss_mib']:+.0f} MiB and its open files by"
        f" {last['open_files'] - first['open_files']:+}"
        f" ({machine(run)}; `{run['command']}`)."
    )


def speed_section() -> str:
    """The four rows of the README: the base and mixed adapters, in one process and over HTTP."""
    offline = result("offline-cpu")
    at_once = f"{asked(offline)['requests']} at once"
    speed = offline["output_tokens_per_s"]
    lines = [
        f"Output tokens per second; {offline['load']['model']}; {machine(offline)}."
        " [How to measure, and all other figures](docs/benchmarks.md).",
        "",
        "| | Manylora | reference | ratio |",
        "|---|---|---|---|",
    ]
    for what, case, peer in (
        ("base", "base", "transformers"),
        ("8 mixed adapters", "mixed", "transformers + PEFT"),
    ):
        rates = (speed["manylora"][case], speed[peer][case])
        ratio = offline["ratios"][f"{case}: manylora / {peer}"]
        lines.append(
            f"| {what}, {at_once} | {rates[0]:.1f} | {rates[1]:.1f} ({peer}) | **{ratio:.2f}** |"
        )
    for run in (result("compare-vllm-base-cpu"), result("compare-vllm-mixed-cpu")):
        who, how, peer = *load_of(run), run["options"]["peer_name"]
        manylora, other = (
            run["figures"][name]["output tokens/s"]["median"] for name in ("Manylora", peer)
        )
        ratio = run["ratios"]["output tokens/s"]["median"]
        lines.append(
            f"| {who}, {how}, over HTTP | {manylora:.1f} | {other:.1f} ({peer}) | **{ratio:.2f}** |"
        )
    return "\n".join(lines) + "\n"


def section() -> str:
    """All figures of docs/benchmarks.md."""
    parts: dict[str, list[str]] = {
        "In one process": offline_table(result("offline-cpu")),
        "Beside vLLM, over HTTP": compare_table([result(name) for name in COMPARED]),
        "A server alone": [
            *(f"- {serving_line(result(f'serve-demo-{kind}-cpu'))}" for kind in ("closed", "open")),
            f"- {overhead_line(result('overhead-cpu'))}",
            f"- {push_line(result('push-cpu'))}",
        ],
        "Steps": step_table(result("step-cpu")),
    }
    if (RESULTS / "promises-cpu.json").exists():
        run = result("promises-cpu")
        parts["Promises in seconds"] = [f"{machine(run)}; `scripts/promises`.", *goals_table(run)]
    return (
        "\n".join(
            line for title, lines in parts.items() for line in (f"### {title}", "", *lines, "")
        ).rstrip()
        + "\n"
    )


def figure(value: float | None) -> str:
    """A figure of a table; a dash where nothing was measured."""
    return "-" if value is None else f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def goals_table(run: dict[str, Any]) -> list[str]:
    """Figures beside what they should be."""
    lines = ["", "| | figure | goal | |", "|---|---|---|---|"]
    for each in run["goals"]:
        limit = f"at {each['should be']} {figure(each['limit'])}"
        lines.append(
            f"| {each['goal']} | {figure(each['figure'])} | {limit} | {'reached' if each['ok'] else 'missed'} |"
        )
    return lines


def fairness_lines(run: dict[str, Any]) -> list[str]:
    """Quiet requests beside a flood, by arm."""
    lines = [
        "| | TTFT p50 | p95 | longest | p95 over alone | the flood keeps |",
        "|---|---|---|---|---|---|",
    ]
    alone = run["arms"]["alone"]["ttft_ms"]["p95"]
    for name, arm in run["arms"].items():
        if arm["requests"]:
            times = " | ".join(f"{figure(arm['ttft_ms'][key])} ms" for key in ("p50", "p95", "max"))
            kept = f"{arm['kept']['median']:.1%}" if arm["kept"] else "-"
            lines.append(f"| {name} | {times} | {figure(arm['ttft_ms']['p95'] / alone)} | {kept} |")
    return [*lines, *goals_table(run)]


def table_lines(run: dict[str, Any]) -> list[str]:
    """A result's own table, and its goals."""
    rows = run["table"]
    lines = ["| " + " | ".join(rows[0]) + " |", "|---" * len(rows[0]) + "|"]
    for row in rows:
        cells = (
            figure(cell) if isinstance(cell, float | None) else str(cell) for cell in row.values()
        )
        lines.append("| " + " | ".join(cells) + " |")
    return [*lines, *(goals_table(run) if run["goals"] else [])]


FAIR: dict[str, tuple[str, Callable[[dict[str, Any]], list[str]]]] = {
    "fairness-before-cpu": ("Before fair steps: first come first served", fairness_lines),
    "fairness-cpu": ("A quiet tenant beside 200 streams of another", fairness_lines),
    "overload-cpu": ("Overload, demo model", table_lines),
    "overload-0.5b-cpu": ("Overload, 0.5B shape", table_lines),
    "adapters-http-cpu": ("Many adapters over HTTP, demo model", table_lines),
    "adapters-http-2000-cpu": ("2,000 adapters, four repeats", table_lines),
    "adapters-http-0.5b-cpu": ("Many adapters over HTTP, 0.5B shape", table_lines),
    "batches-cpu": ("Interactive requests beside a batch, 0.5B shape", table_lines),
    "batches-target-cpu": ("The same with a target for the time of a step", table_lines),
}
"""Title and text of each result in docs/fairness.md, in its order."""


def fairness_section() -> str:
    """The figures of docs/fairness.md."""
    lines = []
    for name, (title, text) in FAIR.items():
        run = result(name)
        lines += [f"### {title}", "", f"{machine(run)}; `{run['command']}`.", "", *text(run), ""]
        if (RESULTS / f"{name}.svg").exists():
            lines += [f"![{title}](benchmarks/results/{name}.svg)", ""]
    return "\n".join(lines)


def cases_by_step(run: dict[str, Any]) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Each step that was measured in all formats of weights, with its cases in the order of the formats."""
    cases = run["cases"]
    ends = ["" if name == "bf16" else f", {name}" for name in run["options"]["weights"]]
    for step in (name.removesuffix(ends[0]) for name in cases if name.endswith(ends[0])):
        if all(f"{step}{end}" in cases for end in ends):
            yield step, [cases[f"{step}{end}"] for end in ends]


def weights_table(run: dict[str, Any]) -> list[str]:
    """Milliseconds of steps by format of the weights, and how many times as fast as the first they are."""
    formats = run["options"]["weights"]
    lines = [
        f"Milliseconds of a step, medians, {run['load']['model']} ({machine(run)}; `{run['command']}`):",
        "",
        f"| step | {' | '.join(f'`{name}`' for name in formats)} |",
        "|---" * (1 + len(formats)) + "|",
    ]
    for step, cases in cases_by_step(run):
        first_ms, *others_ms = (case["step_ms"] for case in cases)
        cells = [
            f"{first_ms:,.1f}",
            *(f"{ms:,.1f} ({first_ms / ms:.2f} times as fast)" for ms in others_ms),
        ]
        lines.append(f"| {step} | {' | '.join(cells)} |")
    return lines


def avx2_section() -> str:
    """Steps on AVX2 against their floors, and Manylora beside llama.cpp there."""
    run = result("step-avx2-cpu")
    formats = run["options"]["weights"]
    lines = [
        f"Milliseconds of a step, and how many times its floor that is, {run['load']['model']} ({machine(run)};"
        f" `scripts/as_cpu x86-64-v3 {run['command']}`):",
        "",
        f"| step | {' | '.join(f'`{name}`' for name in formats)} |",
        "|---" * (1 + len(formats)) + "|",
    ]
    for step, cases in cases_by_step(run):
        cells = (f"{case['step_ms']:,.1f} ({case['step / floor']:.2f})" for case in cases)
        lines.append(f"| {step} | {' | '.join(cells)} |")
    return "\n".join([*lines, "", *peers_table([result(name) for name in AVX2]), ""])


def eight_line(run: dict[str, Any]) -> str:
    """Speed of a model of 8B for one person."""
    summary = run["summary"]
    return (
        f"The shape of Llama-3-8B in `int8` starts in 24 GB and gives one person {1e3 / summary['tpot_ms']['p50']:.1f}"
        f" tokens a second: {summary['tpot_ms']['p50']:.0f} ms each, {summary['ttft_ms']['p50']:.0f} ms to the first of"
        f" {asked(run)['input_tokens']} tokens ({machine(run)}; `scripts/zero_checkpoint.py FOLDER`, whose weights"
        f" are zeros, and `{run['command']}`)."
    )


def peers_table(runs: list[dict[str, Any]]) -> list[str]:
    """Manylora with quantised weights and other servers over HTTP."""
    lines = [
        f"Output tokens per second over HTTP, in turns, medians of rounds; the base of the Qwen2-0.5B shape"
        f" ({machine(runs[0])}; `manylora bench compare`, all options are in `benchmarks/results/compare-*.json`):",
        "",
        "| load | Manylora | peer | ratio |",
        "|---|---|---|---|",
    ]
    for run in runs:
        options = run["options"]
        ours, theirs = run["figures"].values()
        weights = next(
            each.split("=")[1] for each in options["set"] if each.startswith("model.weights=")
        )
        ratio = run["ratios"]["output tokens/s"]
        lines.append(
            f"| {load_of(run)[1]}, {options['input_tokens']} + {options['output_tokens']} tokens,"
            f" {options['repeats']} rounds | {ours['output tokens/s']['median']:.1f} (`{weights}`)"
            f" | {theirs['output tokens/s']['median']:.1f} ({options['peer_name']}: {options['peer_about']})"
            f" | **{ratio['median']:.2f}** ({ratio['min']:.2f} to {ratio['max']:.2f}) |"
        )
    return lines


def gateway_section() -> str:
    """The cost of a gateway, and the time until killed servers are noticed."""
    cost = result("gateway-cpu")
    promises = result("cluster-promises-cpu")
    options = cost["options"]
    lines = ["| | direct | through a gateway |", "|---|---|---|"]
    for name, part in GATEWAY_ROWS.items():
        cells = (figure(cost["paths"][way][part]["median"]) for way in ("direct", "gateway"))
        lines.append(f"| {name} | {' | '.join(cells)} |")
    alone = (figure(cost["ttft_alone_p50_ms"][way]) for way in ("direct", "gateway"))
    lines.append(f"| TTFT p50 of one request at a time, ms | {' | '.join(alone)} |")
    before = figure(cost["gateway_idle_mib"])
    after = figure(cost["paths"]["gateway"]["gateway_mib"]["median"])
    num_streams = promises["options"]["streams"]
    num_lost = promises["replica_killed"]["streams_lost"]
    return "\n".join(
        [
            f"{options['streams']} streams of {options['tokens']} tokens, medians of {options['repeats']} rounds"
            f" ({machine(cost)}, load average {cost['hardware']['load_average'][0]:.1f}; `{cost['command']}`):",
            "",
            *lines,
            "",
            f"The gateway's process has {before} MiB before the first request, and {after} MiB after a round.",
            *goals_table(cost),
            "",
            f"`scripts/cluster_promises.py`, {num_streams} streams, of which {num_lost} were on the killed replica"
            f" ({machine(promises)}):",
            *goals_table(promises),
            "",
        ]
    )


GATEWAY_ROWS = {
    "tokens/s": "tokens_per_s",
    "TTFT p50, ms": "ttft_p50_ms",
    "TTFT p99, ms": "ttft_p99_ms",
    "time between tokens p99, ms": "itl_p99_ms",
    "CPU of the gateway, us per token": "gateway_cpu_us",
    "CPU of the replicas without their engines, us per token": "replicas_cpu_us",
}
SECTIONS: dict[str, Callable[[], str]] = {
    "speed": speed_section,
    "figures": section,
    "fairness": fairness_section,
    "gateway": gateway_section,
    "weights": lambda: "\n".join([*weights_table(result("step-weights-cpu")), ""]),
    "avx2": avx2_section,
    "eight": lambda: eight_line(result("serve-8b-cpu")) + "\n",
    "kv": lambda: "\n".join([*weights_table(result("step-kv-cpu")), ""]),
    "peers": lambda: "\n".join([*peers_table([result(name) for name in QUANTISED]), ""]),
}


def with_figures(path: Path) -> str:
    """The text of a document with its sections as the results are now; their links begin at the repository."""
    above = "../" * len(path.parent.relative_to(ROOT).parts)

    def written(found: re.Match[str]) -> str:
        return (
            found[1]
            + SECTIONS[found[2]]().replace("](benchmarks/", f"]({above}benchmarks/")
            + found[3]
        )

    return SECTION.sub(written, path.read_text())


def main() -> int:
    """Write the sections, or with --check say which are not current."""
    stale = [path for path in DOCUMENTS if with_figures(path) != path.read_text()]
    for path in stale:
        if "--check" in sys.argv[1:]:
            print(
                f"{path.name} does not show the figures of benchmarks/results/; run scripts/readme_speed.py"
            )
        else:
            path.write_text(with_figures(path))
    return int(bool(stale) and "--check" in sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
