"""The goals of fairness under load, each with a number, by what the virtual engine does under a workload.

A run is played once per policy and kept, since several goals read it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from itertools import takewhile
from statistics import fmean
from typing import Any

from fairness.calls import Call
from fairness.device import CostModel
from fairness.engine import EngineSettings, VirtualEngine
from fairness.service import jain_index, max_min_shares
from fairness.workloads import Client, among, base, fixed, lognormal, many_adapters, mixed, together

CAPACITY = 144.0
"""Requests of the default sizes that an engine of 64 rows and 512 tokens a step ends in a second, with the base."""
UNITS = 60_000.0
"""Service units of such a second."""
EQUAL = {"a": 1.0, "b": 1.0}


@dataclass(frozen=True)
class Goal:
    """One number and its bound."""

    name: str
    measure: Callable[[str], float]
    """By the policy of the scheduler."""
    at_most: float = float("inf")
    at_least: float = -float("inf")

    def holds(self, value: float) -> bool:
        """Whether a measured value is inside the bound."""
        return self.at_least <= value <= self.at_most

    @property
    def bound(self) -> str:
        """For a table."""
        return f"<= {self.at_most:g}" if self.at_most < float("inf") else f">= {self.at_least:g}"


def _play(policy: str, calls: Iterable[Call], until_s: float, **settings: Any) -> VirtualEngine:
    return VirtualEngine(EngineSettings(policy=policy, **settings)).play(calls, until_s=until_s)


def _ttft_p95(
    engine: VirtualEngine, *tenants: str, start_s: float = 0.0, end_s: float = float("inf")
) -> float:
    return engine.records.of(*tenants).between(start_s, end_s).ttft_s(0.95, engine.time.now_s)


# Two tenants that always have more to ask than there are rows.


@cache
def backlogged(policy: str, weight_of_a: float, has_many_adapters: bool) -> VirtualEngine:
    """10 seconds; `has_many_adapters` gives a hundred to a and one to b."""
    adapters = (among(range(100)), among([100])) if has_many_adapters else (base, base)
    calls = together(
        Client(tenant="a", weight=lambda _: weight_of_a, adapters=adapters[0]).always(96),
        Client(tenant="b", adapters=adapters[1]).always(96),
    )
    on_device = range(101) if has_many_adapters else ()
    return _play(policy, calls, 10, num_pages=18_000, ranks=(16,) * 101, on_device=on_device)


@cache
def backlogged_for_long(policy: str) -> VirtualEngine:
    """200 seconds of a device that is four times slower, with few rows, so that they are soon played."""
    slow = CostModel(
        weights_s=14e-3, token_s=76e-6, context_s=120e-9, rank_s=4.88e-6, launch_s=2e-3
    )
    calls = together(
        *(Client(tenant=tenant, sizes=lognormal(256, 8)).always(32) for tenant in "ab")
    )
    return _play(policy, calls, 200, rows=16, is_caching=False, costs=slow)


def gap_over_200_s(policy: str) -> float:
    """Largest gap of service over any window of 200 seconds."""
    return backlogged_for_long(policy).service.max_gap("a", "b", EQUAL, 1, 200)


def growth_of_gap(policy: str) -> float:
    """The gap over 200 seconds by the largest one inside ten parts of it: 1 where nothing adds up over time."""
    service = backlogged_for_long(policy).service
    parts = [
        service.max_gap("a", "b", EQUAL, max(start_s, 1), start_s + 20)
        for start_s in range(0, 200, 20)
    ]
    return gap_over_200_s(policy) / max(parts)


def error_of_shares(
    policy: str, weight_of_a: float = 1.0, has_many_adapters: bool = False
) -> float:
    """How far the shares of two backlogged tenants are from their weights, as a part of the share."""
    shares = backlogged(policy, weight_of_a, has_many_adapters).service.shares(1, 10)
    weights = {"a": weight_of_a, "b": 1.0}
    return max(
        abs(shares[tenant] * sum(weights.values()) / weights[tenant] - 1) for tenant in weights
    )


def error_of_long_prompts(policy: str) -> float:
    """The error of the shares where one tenant has prompts of 4,096 tokens and the other of 256."""
    calls = together(
        Client(tenant="a", sizes=fixed(4_096, 16)).always(32),
        Client(tenant="b", sizes=fixed(256, 16)).always(96),
    )
    return abs(_play(policy, calls, 16, is_caching=False).service.shares(2, 16)["a"] / 0.5 - 1)


def error_of_changed_weights(policy: str) -> float:
    """How far the share of a is from 3/4 before its weight changes at second 5, and from 1/2 two seconds after."""
    calls = together(
        Client(tenant="a", weight=lambda at_s: 3.0 if at_s < 5 else 1.0).always(96),
        Client(tenant="b").always(96),
    )
    service = _play(policy, calls, 11).service
    return max(abs(service.shares(1, 5)["a"] / 0.75 - 1), abs(service.shares(7, 11)["a"] / 0.5 - 1))


# A flood beside a quiet tenant.


def quiet_beside_flood(policy: str) -> float:
    """TTFT p95 of a tenant with one adapter, beside twice the capacity for a hundred others."""
    calls = together(
        Client(tenant="flood", adapters=among(range(100))).poisson(2 * CAPACITY),
        Client(tenant="quiet", adapters=among([100])).poisson(4.0),
    )
    return _ttft_p95(
        _play(policy, calls, 10, num_pages=20_000, ranks=(16,) * 101, on_device=range(101)), "quiet"
    )


@cache
def streams(policy: str, has_flood: bool, has_quiet: bool) -> VirtualEngine:
    """200 streams of 400 tokens at a time, and a tenant that asks four times a second."""
    calls = together(
        Client(tenant="flood", sizes=fixed(64, 400)).always(200 * has_flood),
        Client(tenant="quiet", sizes=fixed(64, 32)).poisson(4.0) if has_quiet else (),
    )
    return _play(policy, calls, 10)


def quiet_beside_streams(policy: str) -> float:
    """TTFT p95 of the quiet tenant, by three times that of alone or five steps of the flood, whichever is more."""
    both, alone = streams(policy, True, True), streams(policy, False, True)
    step_s = both.time.now_s / both.runner.num_steps
    return _ttft_p95(both, "quiet") / max(3 * _ttft_p95(alone, "quiet"), 5 * step_s)


def flood_beside_quiet(policy: str) -> float:
    """Service of the 200 streams, by what is left beside the quiet tenant's."""
    served, alone = streams(policy, True, True).service, streams(policy, True, False).service
    return served.served("flood", 2, 10) / (
        alone.served("flood", 2, 10) - served.served("quiet", 2, 10)
    )


# Ten tenants of Zipf demand at one and a half times what the engine can do.


@cache
def ten_tenants(policy: str) -> VirtualEngine:
    parts = [1 / (index + 1) for index in range(10)]
    rates = [1.5 * CAPACITY * part / sum(parts) for part in parts]
    return _play(
        policy,
        together(*(Client(tenant=f"t{i}").poisson(rate) for i, rate in enumerate(rates))),
        10,
    )


def fairness_of_ten(policy: str) -> float:
    """Jain's index of each tenant's service by its max-min share."""
    engine = ten_tenants(policy)
    prices = engine.service.prices
    demands: defaultdict[str, float] = defaultdict(float)
    for record in engine.records.all:
        call = record.call
        mean_context = call.num_prompt + call.num_output / 2
        output = (call.num_output - 1) * (prices.output + prices.context * mean_context)
        demands[call.tenant] += call.num_prompt * prices.prompt + output
    served = {tenant: engine.service.served(tenant, 0, 10) for tenant in demands}
    shares = max_min_shares(demands, sum(served.values()), dict.fromkeys(demands, 1.0))
    return jain_index([served[tenant] / shares[tenant] for tenant in demands])


# Idle time is no credit: a tenant asks steadily, another comes from nowhere with all its calls at once.


@cache
def idle_credit(policy: str) -> VirtualEngine:
    steady = Client(tenant="a").poisson(0.4 * CAPACITY)
    return _play(policy, together(steady, Client(tenant="b").burst(1_500, at_s=3)), 10)


# Two thousand adapters.

NUM_ADAPTERS = 2_000
KV_PAGES = 2_400


@cache
def thousands(
    policy: str, num_on_device: int | None, rate: float = 0.5 * CAPACITY
) -> VirtualEngine:
    """Ten seconds with room for so many adapters beside the KV cache; None has room for all that are asked for.

    The most popular adapters have been asked before: the host slab has images of 1,600, and the device has what fits.
    """
    calls = list(takewhile(lambda call: call.at_s < 10, many_adapters(rate, NUM_ADAPTERS)))
    asked = {call.adapter for call in calls if call.adapter is not None}
    on_device = sorted(asked) if num_on_device is None else range(num_on_device)
    return _play(
        policy,
        calls,
        10,
        num_pages=len(on_device) * 40 + KV_PAGES,
        host_pages=NUM_ADAPTERS * 40,
        slots=len(on_device) + 64,
        load_threads=8,
        ranks=(16,) * NUM_ADAPTERS,
        on_host=range(1_600),
        on_device=on_device,
    )


def ttft_of_thousands(policy: str, share: float) -> float:
    """Percentile of the TTFT with room for 130 adapters."""
    engine = thousands(policy, 130)
    return engine.records.ttft_s(share, engine.time.now_s)


# Long prompts, and demand that changes, beside a tenant under its share.


@cache
def long_prompts(policy: str) -> VirtualEngine:
    """Chat of one tenant beside prompts of 20,000 tokens of another, which alone would wait 0.45 s."""
    long = Client(tenant="long", sizes=fixed(20_000, 64)).poisson(0.2)
    return _play(policy, together(Client(tenant="chat").poisson(0.4 * CAPACITY), long), 10)


def steady_beside(policy: str, rate_at: Callable[[float], float]) -> float:
    """TTFT p95 of a tenant at 0.4 of the capacity beside one whose rate changes, up to twice the capacity."""
    other = Client(tenant="a").varying(rate_at, 2 * CAPACITY)
    return _ttft_p95(
        _play(policy, together(other, Client(tenant="b").poisson(0.4 * CAPACITY)), 8), "b"
    )


# Short and long outputs of one tenant: 80 % of its calls are short.


@cache
def short_and_long(policy: str, inner: str) -> VirtualEngine:
    calls = Client(tenant="a", sizes=mixed(0.8, fixed(64, 32), fixed(512, 1_024))).poisson(60.0)
    return _play(policy, calls, 16, inner=inner, num_pages=40_000, is_caching=False)


def short_with_mlfq(policy: str) -> float:
    """Mean seconds of short calls from asking to the end under the multi-level feedback queue, by those of FCFS.

    A call that has not ended counts with its time so far.
    """
    mlfq, fcfs = (
        fmean(
            (record.ended_s or 16) - record.call.at_s
            for record in run.records.all
            if record.call.num_output == 32
        )
        for run in (short_and_long(policy, "mlfq"), short_and_long("fcfs", "fifo"))
    )
    return mlfq / fcfs


def pause_with_mlfq(policy: str) -> float:
    """Worst pause inside a stream, less the longest step."""
    engine = short_and_long(policy, "mlfq")
    return engine.records.itl_s(1.0) - engine.runner.longest_step_s


# A target for the time between two tokens.


@cache
def with_target(policy: str, itl_target_ms: float | None) -> VirtualEngine:
    """Six seconds of always 96 streams, whose prompts come in at any time."""
    return _play(policy, Client(tenant="t").always(96), 6, itl_target_ms=itl_target_ms)


def itl_by_target(policy: str, itl_target_ms: float) -> float:
    """The time between two tokens, p99, by its target."""
    return with_target(policy, itl_target_ms).records.itl_s(0.99) / (itl_target_ms / 1e3)


def tokens_with_target(policy: str, itl_target_ms: float) -> float:
    """Tokens computed, by those without a target."""
    return (
        with_target(policy, itl_target_ms).runner.num_tokens
        / with_target(policy, None).runner.num_tokens
    )


# The batch lane beside interactive requests.


@cache
def chats(policy: str, load: float, has_batch: bool) -> VirtualEngine:
    """Chats at a share of the capacity, alone or beside 96 streams in the batch lane."""
    batch = Client(tenant="batch", lane=1).always(96 * has_batch)
    return _play(policy, together(Client(tenant="chat").poisson(load * CAPACITY), batch), 8)


def steps_added_by_batch(policy: str) -> float:
    """TTFT p95 of chats beside a batch less that of chats alone, in steps of the chats alone."""
    alone, beside = chats(policy, 0.5, False), chats(policy, 0.5, True)
    return (_ttft_p95(beside, "chat") - _ttft_p95(alone, "chat")) / alone.records.of("chat").itl_s(
        0.5
    )


def stretch_by_batch(policy: str) -> float:
    """The median time between two tokens of chats beside a batch, by that of chats alone."""
    beside, alone = (
        chats(policy, 0.5, has_batch).records.of("chat").itl_s(0.5) for has_batch in (True, False)
    )
    return beside / alone


def service_of_batch(policy: str, load: float) -> float:
    """Units per second of the batch, by those of an engine that has nothing else to do."""
    return chats(policy, load, True).service.served("batch", 2, 8) / 6 / UNITS


GOALS: tuple[Goal, ...] = (
    Goal(
        "A-1 gap, units",
        lambda policy: backlogged(policy, 1.0, False).service.max_gap("a", "b", EQUAL, 1, 10),
        10_000,
    ),
    Goal(
        "A-1 gap with 100 adapters against 1, units",
        lambda policy: backlogged(policy, 1.0, True).service.max_gap("a", "b", EQUAL, 1, 10),
        10_000,
    ),
    Goal("A-1 gap over 200 s, units", gap_over_200_s, 10_000),
    Goal("A-1 gap over 200 s by the largest over 20 s", growth_of_gap, 1.3),
    Goal("A-1 shares, 1:1", error_of_shares, 0.02),
    Goal("A-1 shares, 3:1", lambda policy: error_of_shares(policy, 3.0), 0.02),
    Goal(
        "A-1 shares, 100 adapters against 1",
        lambda policy: error_of_shares(policy, 1.0, True),
        0.02,
    ),
    Goal("A-1 shares, long prompts against short", error_of_long_prompts, 0.02),
    Goal("A-2 TTFT p95 beside a flood, s", quiet_beside_flood, 0.06),
    Goal("A-2 TTFT p95 beside 200 streams of 400, by the bound", quiet_beside_streams, 1.0),
    Goal("A-2 service of the flood beside the quiet one", flood_beside_quiet, at_least=0.95),
    Goal("A-3 Jain's index of ten tenants", fairness_of_ten, at_least=0.97),
    Goal(
        "A-3 TTFT p95 of the smallest five, s",
        lambda policy: _ttft_p95(ten_tenants(policy), *(f"t{index}" for index in range(5, 10))),
        0.1,
    ),
    Goal(
        "A-3 tokens/s by those of FCFS",
        lambda policy: ten_tenants(policy).tokens_per_s / ten_tenants("fcfs").tokens_per_s,
        at_least=0.98,
    ),
    Goal(
        "A-4 least share of the incumbent in any second",
        lambda policy: idle_credit(policy).service.least_share("a", 1, 3, 9),
        at_least=0.1,
    ),
    Goal(
        "A-4 TTFT p95 of the incumbent, s",
        lambda policy: _ttft_p95(idle_credit(policy), "a", start_s=3, end_s=9),
        0.15,
    ),
    Goal(
        "A-5 tokens/s by those with all on the device",
        lambda policy: thousands(policy, 130).tokens_per_s / thousands(policy, None).tokens_per_s,
        at_least=0.95,
    ),
    Goal("A-5 TTFT p50, s", lambda policy: ttft_of_thousands(policy, 0.5), 0.03),
    Goal("A-5 TTFT p99, s", lambda policy: ttft_of_thousands(policy, 0.99), 0.35),
    Goal(
        "A-6 loads per load that was of use",
        lambda policy: thousands(policy, 40, 0.25 * CAPACITY).loads_per_use,
        1.05,
    ),
    Goal(
        "W5 TTFT p95 of chats beside 20,000-token prompts, s",
        lambda policy: _ttft_p95(long_prompts(policy), "chat"),
        0.1,
    ),
    Goal(
        "W5 TTFT p95 of 20,000-token prompts, s",
        lambda policy: _ttft_p95(long_prompts(policy), "long"),
        1.2,
    ),
    Goal(
        "W8 TTFT p95 beside on and off, s",
        lambda policy: steady_beside(policy, lambda at_s: 2 * CAPACITY * (at_s % 4 >= 2)),
        0.15,
    ),
    Goal(
        "W8 TTFT p95 beside an increasing tenant, s",
        lambda policy: steady_beside(policy, lambda at_s: 2 * CAPACITY * min(at_s / 8, 1.0)),
        0.15,
    ),
    Goal("W9 shares before and after weights change", error_of_changed_weights, 0.03),
    Goal("A-9 ITL p99 by a target of 7 ms", lambda policy: itl_by_target(policy, 7.0), 1.0),
    Goal(
        "A-9 tokens with a target of 7 ms",
        lambda policy: tokens_with_target(policy, 7.0),
        at_least=0.8,
    ),
    Goal("A-12 mean time of short calls with MLFQ, by FCFS", short_with_mlfq, 0.1),
    Goal("A-12 worst pause with MLFQ less a step, s", pause_with_mlfq, 0.5),
    Goal("TTFT p95 beside a batch, steps more", steps_added_by_batch, 2),
    Goal("time per token beside a batch, by alone", stretch_by_batch, 1.3),
    Goal(
        "service of a batch beside half a load",
        lambda policy: service_of_batch(policy, 0.5),
        at_least=0.1,
    ),
    Goal(
        "service of a batch beside a full load",
        lambda policy: service_of_batch(policy, 2.0),
        at_least=0.04,
    ),
)
