"""The cost of many adapters, few of them popular, for a server over HTTP.

    manylora bench adapters-http [--counts 5,100,2000] [--shape demo] [--json benchmarks/results/adapters-http-cpu.json]

32 requests are in flight, for adapters drawn by Zipf's law with exponent 1. The server has computed nothing for them
yet: every adapter is loaded from the store. The control is a second server that gets the same requests with all
adapters on the device already. Both are loaded in turns of a few seconds: a slow minute of the machine hits both. Cold
is the first part of a server's load, warm the last. One more arm, tight, has a pool for half of its adapters beside the
KV cache. Prints tables and, last, one JSON line.
"""

from __future__ import annotations

import itertools
import statistics
import time
from argparse import Namespace
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace

from manylora.benchmarks.http.generator import Load, Target, check_replies
from manylora.benchmarks.http.own_server import DEMO, OwnServer, plain_server
from manylora.benchmarks.metrics import percentile, tokens_per_s
from manylora.benchmarks.qwen_shape import make_checkpoints, make_small_adapters
from manylora.benchmarks.report import (
    Figures,
    Options,
    counts,
    goal,
    make_row,
    ratios,
    spread,
    take_turns,
)
from manylora.errors import ManyloraError

MIN_RATIO = {"cold": 0.85, "warm": 0.95}
"""Least share of the control's tokens/s."""
MIN_TIGHT_RATIO = 0.8
MAX_TTFT_RATIO = 2.0
"""Warm TTFT p99 in the control's."""
MAX_COLD_TTFT_MS = 300.0
"""Demo model."""
TURN_S = 5.0
"""Time for which one server is loaded, before it is the other one's turn."""
TIERS = ("device", "host", "stored")
COLUMNS = {
    "adapters": "adapters",
    "": "span",
    "tokens/s": "served.tokens_per_s.median",
    "control": "control.tokens_per_s.median",
    "ratio": "ratio",
    "TTFT p99, ms": "served.ttft_p99_ms",
    "control's": "control.ttft_p99_ms",
}
"""Figures of a span in the table."""
Spans = dict[str, list[Figures]]
"""Figures of each turn of the cold and of the warm span."""
TENANT = "zipf"
NUM_WARM_UP = 128
"""Requests for the base before the load."""
_PASS_IN_FLIGHT = 8
_SAMPLE = 40
"""Adapters to ask for their number of pages; the copies repeat after a few."""


def measure(options: Namespace) -> Figures:
    """Measure all numbers of adapters, then the pool that is too small."""
    if options.shape == "0.5b":
        options.model = make_checkpoints()[0]
        options.adapters = make_small_adapters()
    arms = {str(count): measure_arm(options, count) for count in options.counts}
    if options.tight:
        arms["tight"] = measure_arm(options, options.tight, is_tight=True)
    table = []
    goals = []
    for (name, arm), span in itertools.product(arms.items(), MIN_RATIO):
        found = {kind: by_span[span] for kind, by_span in arm["runs"].items()}
        ratio = arm["ratio"][span]["median"]
        tiers = {tier: found["served"]["states"].get(tier, 0.0) for tier in TIERS}
        row = make_row({"adapters": name, "span": span, "ratio": ratio, **found}, COLUMNS)
        table.append({**row, **tiers})
        least = MIN_TIGHT_RATIO if name == "tight" else MIN_RATIO[span]
        goals.append(
            goal(f"{name}: tokens/s over the control's, {span}", ratio, least, is_least=True)
        )
        if name != "tight" and (span == "warm" or options.shape == "demo"):
            limit = MAX_COLD_TTFT_MS
            if span == "warm":
                limit = MAX_TTFT_RATIO * found["control"]["ttft_p99_ms"]
            ttft_ms = found["served"]["ttft_p99_ms"]
            goals.append(goal(f"{name}: TTFT p99, ms, {span}", ttft_ms, limit))
    return {"arms": arms, "table": table, "goals": goals}


def measure_arm(options: Namespace, count: int, *, is_tight: bool = False) -> Figures:
    """Measure one number of adapters, on two new servers in each repeat."""
    settings: dict[str, list[str]] = {"control": [], "served": []}
    runs = []
    for repeat in range(1, options.repeats + 1):
        with ExitStack() as stack:
            loads = {}
            for kind, own in settings.items():
                opened = plain_server(options.model, [*options.set, *own])
                server = stack.enter_context(opened)
                load = loads[kind] = _load(options, server, count, repeat)
                _warm_up(server, load)
                if kind == "control":
                    _fill_device(server, load.targets)
                    if is_tight:
                        settings["served"] = _half_of_pool(options, server, load.targets)
            runs.append(_load_in_turns(options, loads))
    merged = {
        kind: {span: _figures([each[kind][span] for each in runs]) for span in MIN_RATIO}
        for kind in settings
    }
    by_span = {
        span: ratios(
            *(merged[kind][span]["tokens_per_s"]["repeats"] for kind in ("served", "control"))
        )
        for span in MIN_RATIO
    }
    return {"adapters": count, "settings": settings, "runs": merged, "ratio": by_span}


def _load(options: Namespace, server: OwnServer, count: int, seed: int) -> Load:
    """Upload adapters for a new tenant, and make the load for them."""
    return Load(
        targets=server.adapters(TENANT, options.adapters, count),
        at_once=options.in_flight,
        prompt_tokens=options.input_tokens,
        output_tokens=options.output_tokens,
        popularity="zipf:1",
        seed=seed << 10,
    )


def _half_of_pool(options: Namespace, server: OwnServer, targets: Sequence[Target]) -> list[str]:
    """Make the setting of a pool that holds half of the adapters beside the KV cache of what is in flight."""
    geometry = server.ready["geometry"]
    with server.client(TENANT) as client:
        pages = [client.get_adapter(target.model)["pages"] for target in targets[:_SAMPLE]]
    blocks = -(-(options.input_tokens + options.output_tokens) // geometry["page_tokens"])
    needed = int(len(targets) / 2 * statistics.mean(pages))
    needed += options.in_flight * blocks * geometry["num_groups"]
    return [f"memory.gib={(needed + 1.5) * geometry['page_bytes'] / (1 << 30):.6f}"]


def _load_in_turns(options: Namespace, loads: dict[str, Load]) -> dict[str, Spans]:
    """Measure cold and warm spans of both servers, which get the same requests."""
    num_turns = max(round(options.seconds / TURN_S), 1)
    turn_s = options.seconds / num_turns

    def turn(kind: str, round_: int) -> Figures:
        load = replace(loads[kind], seed=loads[kind].seed | round_)
        end_s = time.perf_counter() + turn_s
        replies = load.run(end_s)
        check_replies(replies)
        return {
            "tokens_per_s": tokens_per_s(replies, end_s - turn_s, end_s),
            # The first requests of a turn come all at once, as they do in no other moment.
            "ttft_ms": [1e3 * reply.ttft_s for reply in replies[options.in_flight :]],
            "states": Counter(
                reply.headers.get(b"x-manylora-adapter-state", b"none").decode()
                for reply in replies
            ),
        }

    turns = take_turns(("served", "control"), num_turns, turn, first=1)
    count = min(max(round(options.span_s / turn_s), 1), num_turns)
    return {kind: {"cold": each[:count], "warm": each[-count:]} for kind, each in turns.items()}


def _warm_up(server: OwnServer, load: Load) -> None:
    """Ask for the base."""
    base = replace(load, targets=[server.target(TENANT)], count=NUM_WARM_UP, seed=0)
    check_replies(base.run())


def _fill_device(server: OwnServer, targets: Sequence[Target]) -> None:
    """Ask for each adapter once.

    Raises:
        ManyloraError: The device has no room for all adapters.
    """
    once = Load(
        targets=targets,
        at_once=_PASS_IN_FLIGHT,
        prompt_tokens=1,
        output_tokens=1,
        count=len(targets),
    )
    check_replies(once.run())
    found = sum(resident["tier"] == "device" for resident in server.admin.engine()["residents"])
    if found < len(targets):
        raise ManyloraError(
            f"The control needs all {len(targets)} adapters on the device, but {found} are there after a pass over "
            "them. Give it room, for example with --set memory.gib=8."
        )


def _figures(repeats: Sequence[Sequence[Figures]]) -> Figures:
    """Compute what the turns of one span show, from those of each repeat."""
    turns = list(itertools.chain(*repeats))
    states = sum((turn["states"] for turn in turns), Counter[str]())
    return {
        "requests": states.total(),
        "tokens_per_s": spread(
            [statistics.mean(turn["tokens_per_s"] for turn in each) for each in repeats]
        ),
        "ttft_p99_ms": percentile([value for turn in turns for value in turn["ttft_ms"]], 99),
        "states": {state: number / states.total() for state, number in states.items()},
    }


OPTIONS: Options = {
    **DEMO,
    "counts": ("5,100,2000", "registered adapters, comma-separated", counts),
    "shape": ("demo", "0.5b: random weights, adapters of rank 8 on q and v", ("demo", "0.5b")),
    "tight": (100, "adapters of the arm with a pool for half of them; 0 leaves the arm out", int),
    "in_flight": (32, ""),
    "seconds": (90.0, "of load of each server"),
    "span_s": (30.0, "of a load's begin and of its end"),
    "repeats": (1, ""),
    "input_tokens": (32, ""),
    "output_tokens": (32, ""),
}
