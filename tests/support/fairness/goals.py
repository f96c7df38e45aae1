"""The goals of fairness under load, each with a number, by what the virtual engine does under a workload.

A run is played once per policy and kept, since several goals read it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from itertools import takewhile
from statistics import fmean

from fairness import workloads as load
from fairness.calls import Records
from fairness.device import CostModel
from fairness.engine import EngineSettings, VirtualEngine
from fairness.service import jain_index, max_min_shares

CAPACITY = 144.0
"""Requests of `load.DEFAULT_SIZES` that an engine of 64 rows and 512 tokens a step ends in a second, with the base."""
UNITS = 60_000.0
"""Service units of such a second."""
SEED = 1
TTFT_SLO_S = 1.0
TPOT_SLO_S = 0.05
EQUAL = {"a": 1.0, "b": 1.0}


@dataclass(frozen=True)
class Goal:
    """One number and its bound."""

    name: str
    measure: Callable[[str], float]
    """By the policy of the scheduler."""
    at_most: float | None = None
    at_least: float | None = None

    def holds(self, value: float) -> bool:
        """Whether a measured value is inside the bound."""
        return (self.at_most is None or value <= self.at_most) and (self.at_least is None or value >= self.at_least)

    @property
    def bound(self) -> str:
        """For a table."""
        return f"<= {self.at_most:g}" if self.at_most is not None else f">= {self.at_least:g}"


# W1: two tenants, both always backlogged.


@cache
def _backlogged(policy: str, weights: tuple[float, float], has_many_adapters: bool) -> VirtualEngine:
    """10 seconds; `has_many_adapters` gives a hundred to a and one to b."""
    adapters = (load.among(range(100)), load.among([100])) if has_many_adapters else (load.base, load.base)
    settings = EngineSettings(
        policy=policy, num_pages=18_000, ranks=(16,) * 101, on_device=range(101) if has_many_adapters else ()
    )
    return VirtualEngine(settings).play(load.two_backlogged(SEED, weights=weights, adapters=adapters), until_s=10)


@cache
def _backlogged_for_long(policy: str) -> VirtualEngine:
    """200 seconds of a device that is four times slower, with few rows, so that they are soon played."""
    slow = CostModel(weights_s=14e-3, token_s=76e-6, context_s=120e-9, rank_s=4.88e-6, launch_s=2e-3)
    settings = EngineSettings(policy=policy, rows=16, is_caching=False, costs=slow)
    calls = load.two_backlogged(SEED, streams=32, sizes=load.lognormal(256, 8))
    return VirtualEngine(settings).play(calls, until_s=200)


def gap(policy: str) -> float:
    """Largest gap of service over any window, one kind of adapter each."""
    return _backlogged(policy, (1.0, 1.0), False).service.max_gap("a", "b", EQUAL, 1, 10)


def gap_with_many_adapters(policy: str) -> float:
    """The same where one tenant has a hundred adapters and the other one."""
    return _backlogged(policy, (1.0, 1.0), True).service.max_gap("a", "b", EQUAL, 1, 10)


def gap_over_200_s(policy: str) -> float:
    """Largest gap over any window of 200 seconds."""
    return _backlogged_for_long(policy).service.max_gap("a", "b", EQUAL, 1, 200)


def growth_of_gap(policy: str) -> float:
    """The gap over 200 seconds by the largest one inside ten parts of it: 1 where nothing adds up over time."""
    service = _backlogged_for_long(policy).service
    parts = [service.max_gap("a", "b", EQUAL, max(start_s, 1), start_s + 20) for start_s in range(0, 200, 20)]
    return gap_over_200_s(policy) / max(parts)


def error_of_shares(policy: str, weights: tuple[float, float], has_many_adapters: bool = False) -> float:
    """How far the shares of two backlogged tenants are from their weights, as a part of the share."""
    shares = _backlogged(policy, weights, has_many_adapters).service.shares(1, 10)
    return max(abs(shares[tenant] * sum(weights) / weight - 1) for tenant, weight in zip("ab", weights, strict=True))


@cache
def _long_against_short(policy: str) -> VirtualEngine:
    calls = load.together(
        load.Client(tenant="a", sizes=load.fixed(4_096, 16)).always(32, SEED),
        load.Client(tenant="b", sizes=load.fixed(256, 16)).always(96, SEED),
    )
    return VirtualEngine(EngineSettings(policy=policy, is_caching=False)).play(calls, until_s=16)


def error_of_long_prompts(policy: str) -> float:
    """The error of the shares where one tenant has prompts of 4,096 tokens and the other of 256."""
    return abs(_long_against_short(policy).service.shares(2, 16)["a"] / 0.5 - 1)


# W2: a flood beside a quiet tenant.


def _ttft_p95(engine: VirtualEngine, tenant: str, start_s: float = 0.0, end_s: float = float("inf")) -> float:
    return engine.records.of(tenant).between(start_s, end_s).ttft_s(0.95, engine.time.now_s)


@cache
def _flooded(policy: str) -> VirtualEngine:
    settings = EngineSettings(policy=policy, num_pages=20_000, ranks=(16,) * 101, on_device=range(101))
    calls = load.flood_and_quiet(
        SEED, 2 * CAPACITY, quiet_rate=4.0, flood_adapters=load.among(range(100)), quiet_adapters=load.among([100])
    )
    return VirtualEngine(settings).play(calls, until_s=10)


def quiet_beside_flood(policy: str) -> float:
    """TTFT p95 of the quiet tenant in seconds."""
    return _ttft_p95(_flooded(policy), "quiet")


@cache
def _streams(policy: str) -> VirtualEngine:
    """200 streams of 400 tokens at a time, and a tenant that asks twice a second."""
    calls = load.together(
        load.Client(tenant="flood", sizes=load.fixed(64, 400)).always(200, SEED),
        load.Client(tenant="quiet", sizes=load.fixed(64, 32)).poisson(4.0, SEED),
    )
    return VirtualEngine(EngineSettings(policy=policy)).play(calls, until_s=10)


@cache
def _alone(policy: str) -> VirtualEngine:
    calls = load.Client(tenant="quiet", sizes=load.fixed(64, 32)).poisson(4.0, SEED)
    return VirtualEngine(EngineSettings(policy=policy)).play(calls, until_s=10)


def quiet_beside_streams(policy: str) -> float:
    """TTFT p95 of the quiet tenant, by three times that of alone or five steps of the flood, whichever is more."""
    streams = _streams(policy)
    step_s = streams.time.now_s / streams.runner.num_steps
    return _ttft_p95(streams, "quiet") / max(3 * _ttft_p95(_alone(policy), "quiet"), 5 * step_s)


def flood_beside_quiet(policy: str) -> float:
    """Service of the 200 streams, by what is left beside the quiet tenant's."""
    served = _streams(policy).service
    alone = _streams_alone(policy).service
    return served.served("flood", 2, 10) / (alone.served("flood", 2, 10) - served.served("quiet", 2, 10))


@cache
def _streams_alone(policy: str) -> VirtualEngine:
    calls = load.Client(tenant="flood", sizes=load.fixed(64, 400)).always(200, SEED)
    return VirtualEngine(EngineSettings(policy=policy)).play(calls, until_s=10)


# Ten tenants of Zipf demand at one and a half times what the engine can do.


@cache
def _ten_tenants(policy: str) -> VirtualEngine:
    return VirtualEngine(EngineSettings(policy=policy)).play(load.zipf_tenants(SEED, 1.5 * CAPACITY), until_s=10)


def fairness_of_ten(policy: str) -> float:
    """Jain's index of each tenant's service by its max-min share."""
    engine = _ten_tenants(policy)
    prices = engine.service.prices
    demands: dict[str, float] = {}
    for record in engine.records.all:
        call = record.call
        mean_context = call.num_prompt + call.num_output / 2
        output = (call.num_output - 1) * (prices.output + prices.context * mean_context)
        demands[call.tenant] = demands.get(call.tenant, 0.0) + call.num_prompt * prices.prompt + output
    served = {tenant: engine.service.served(tenant, 0, 10) for tenant in demands}
    shares = max_min_shares(demands, sum(served.values()), dict.fromkeys(demands, 1.0))
    return jain_index([served[tenant] / shares[tenant] for tenant in demands])


def smallest_of_ten(policy: str) -> float:
    """TTFT p95 of the five smallest tenants together."""
    engine = _ten_tenants(policy)
    records = [record for tenant in range(5, 10) for record in engine.records.of(f"t{tenant}").all]
    return Records(records).ttft_s(0.95, engine.time.now_s)


def tokens_of_ten(policy: str) -> float:
    """Tokens per second by those of first come, first served."""
    return _ten_tenants(policy).tokens_per_s / _ten_tenants("fcfs").tokens_per_s


# W3: idle time is no credit.


@cache
def _idle_credit(policy: str) -> VirtualEngine:
    calls = load.idle_credit(SEED, 0.4 * CAPACITY, burst=1_500, at_s=3)
    return VirtualEngine(EngineSettings(policy=policy)).play(calls, until_s=10)


def least_share_of_incumbent(policy: str) -> float:
    """Smallest share of the steady tenant in any second after the other one came."""
    return _idle_credit(policy).service.least_share("a", 1, 3, 9)


def ttft_of_incumbent(policy: str) -> float:
    """TTFT p95 of the steady tenant while the other one's calls wait."""
    return _ttft_p95(_idle_credit(policy), "a", 3, 9)


# W4: two thousand adapters.

NUM_ADAPTERS = 2_000
KV_PAGES = 2_400


@cache
def _thousands(policy: str, num_on_device: int | None, rate: float = 0.5 * CAPACITY) -> VirtualEngine:
    """Ten seconds with room for so many adapters beside the KV cache; None has room for all that are asked for.

    The most popular adapters have been asked before: the host slab has images of 1,600, and the device has what fits.
    """
    calls = list(takewhile(lambda call: call.at_s < 10, load.many_adapters(SEED, rate)))
    asked = {call.adapter for call in calls if call.adapter is not None}
    on_device = sorted(asked) if num_on_device is None else range(num_on_device)
    settings = EngineSettings(
        policy=policy,
        num_pages=len(on_device) * 40 + KV_PAGES,
        host_pages=NUM_ADAPTERS * 40,
        slots=len(on_device) + 64,
        load_threads=8,
        ranks=(16,) * NUM_ADAPTERS,
        on_host=range(1_600),
        on_device=on_device,
    )
    return VirtualEngine(settings).play(calls, until_s=10)


def tokens_of_thousands(policy: str) -> float:
    """Tokens per second with room for 130 adapters, by those with all of them on the device."""
    return _thousands(policy, 130).tokens_per_s / _thousands(policy, None).tokens_per_s


def ttft_of_thousands(policy: str, share: float) -> float:
    """Percentile of the TTFT with room for 130 adapters."""
    engine = _thousands(policy, 130)
    return engine.records.ttft_s(share, engine.time.now_s)


def loads_of_forty(policy: str) -> float:
    """Loads for each load that a step then computed with, with room for 40 adapters."""
    return _thousands(policy, 40, 0.25 * CAPACITY).loads_per_use


# W5, W8, W9: long prompts, demand that changes, weights that change.


@cache
def _long_prompts(policy: str) -> VirtualEngine:
    return VirtualEngine(EngineSettings(policy=policy)).play(load.long_among_short(SEED, 0.4 * CAPACITY), until_s=10)


def chat_beside_long_prompts(policy: str) -> float:
    """TTFT p95 of chats beside prompts of 20,000 tokens of another tenant."""
    return _ttft_p95(_long_prompts(policy), "chat")


def long_prompts_beside_chat(policy: str) -> float:
    """TTFT p95 of those prompts, whose tenant asks for less than its share; alone it is 0.45 s."""
    return _ttft_p95(_long_prompts(policy), "long")


@cache
def _on_and_off(policy: str) -> VirtualEngine:
    return VirtualEngine(EngineSettings(policy=policy)).play(load.on_and_off(SEED, CAPACITY, others=0.4), until_s=8)


def steady_beside_on_and_off(policy: str) -> float:
    """TTFT p95 of a tenant under its share beside one that floods every other two seconds."""
    return _ttft_p95(_on_and_off(policy), "b")


@cache
def _increasing(policy: str) -> VirtualEngine:
    return VirtualEngine(EngineSettings(policy=policy)).play(load.increasing(SEED, CAPACITY, 8, others=0.4), until_s=8)


def steady_beside_increasing(policy: str) -> float:
    """TTFT p95 of a tenant under its share beside one that asks for more and more."""
    return _ttft_p95(_increasing(policy), "b")


@cache
def _changing_weights(policy: str) -> VirtualEngine:
    return VirtualEngine(EngineSettings(policy=policy)).play(load.changing_weights(SEED, 5), until_s=11)


def error_of_changed_weights(policy: str) -> float:
    """How far the share of a is from 3/4 before its weight changes and from 1/2 two seconds after."""
    service = _changing_weights(policy).service
    return max(abs(service.shares(1, 5)["a"] / 0.75 - 1), abs(service.shares(7, 11)["a"] / 0.5 - 1))


# W6: short and long outputs of one tenant.


@cache
def _short_and_long(policy: str, inner: str) -> VirtualEngine:
    settings = EngineSettings(policy=policy, inner=inner, num_pages=40_000, is_caching=False)
    return VirtualEngine(settings).play(load.short_and_long_outputs(SEED, 60.0), until_s=16)


def short_with_mlfq(policy: str) -> float:
    """Mean seconds of short calls from asking to the end under the multi-level feedback queue, by those of FCFS."""
    return _short_e2e_s(_short_and_long(policy, "mlfq")) / _short_e2e_s(_short_and_long("fcfs", "fifo"))


def pause_with_mlfq(policy: str) -> float:
    """Worst pause inside a stream, less the longest step."""
    engine = _short_and_long(policy, "mlfq")
    return engine.records.worst_pause_s - engine.runner.longest_step_s


def _short_e2e_s(engine: VirtualEngine) -> float:
    """Of short calls; one that has not ended counts with its time so far."""
    now_s = engine.time.now_s
    return fmean(
        (record.ended_s or now_s) - record.call.at_s for record in engine.records.all if record.call.num_output == 32
    )


# A target for the time between two tokens.


@cache
def _with_target(policy: str, itl_target_ms: float | None) -> VirtualEngine:
    """Always 96 streams, whose prompts come in at any time."""
    calls = load.Client(tenant="t").always(96, SEED)
    return VirtualEngine(EngineSettings(policy=policy, itl_target_ms=itl_target_ms)).play(calls, until_s=20)


def itl_by_target(policy: str, itl_target_ms: float) -> float:
    """The time between two tokens, p99, by its target."""
    return _with_target(policy, itl_target_ms).records.itl_s(0.99) / (itl_target_ms / 1e3)


def tokens_with_target(policy: str, itl_target_ms: float) -> float:
    """Tokens computed, by those without a target."""
    return _with_target(policy, itl_target_ms).runner.num_tokens / _with_target(policy, None).runner.num_tokens


# The batch lane beside interactive requests.


@cache
def _chats(policy: str, load_share: float, has_batch: bool) -> VirtualEngine:
    """Chats at a share of the capacity, alone or beside 96 streams in the batch lane."""
    chats = load.Client(tenant="chat").poisson(load_share * CAPACITY, SEED)
    batch = load.Client(tenant="batch", lane=1).always(96 * has_batch, SEED)
    return VirtualEngine(EngineSettings(policy=policy)).play(load.together(chats, batch), until_s=20)


def steps_added_by_batch(policy: str, load_share: float) -> float:
    """TTFT p95 of chats beside a batch less that of chats alone, in steps of the chats alone."""
    alone, beside = (_chats(policy, load_share, has_batch) for has_batch in (False, True))
    return (_ttft_p95(beside, "chat") - _ttft_p95(alone, "chat")) / alone.records.of("chat").itl_s(0.5)


def stretch_by_batch(policy: str, load_share: float) -> float:
    """The median time between two tokens of chats beside a batch, by that of chats alone."""
    beside, alone = (_chats(policy, load_share, has_batch).records.of("chat").itl_s(0.5) for has_batch in (True, False))
    return beside / alone


def service_of_batch(policy: str, load_share: float) -> float:
    """Units per second of the batch, by those of an engine that has nothing else to do."""
    return _chats(policy, load_share, True).service.served("batch", 2, 20) / 18 / UNITS


GOALS: tuple[Goal, ...] = (
    Goal("A-1 gap, units", gap, at_most=10_000),
    Goal("A-1 gap with 100 adapters against 1, units", gap_with_many_adapters, at_most=10_000),
    Goal("A-1 gap over 200 s, units", gap_over_200_s, at_most=10_000),
    Goal("A-1 gap over 200 s by the largest over 20 s", growth_of_gap, at_most=1.3),
    Goal("A-1 shares, 1:1", lambda policy: error_of_shares(policy, (1, 1)), at_most=0.02),
    Goal("A-1 shares, 3:1", lambda policy: error_of_shares(policy, (3, 1)), at_most=0.02),
    Goal("A-1 shares, 100 adapters against 1", lambda policy: error_of_shares(policy, (1, 1), True), at_most=0.02),
    Goal("A-1 shares, long prompts against short", error_of_long_prompts, at_most=0.02),
    Goal("A-2 TTFT p95 beside a flood, s", quiet_beside_flood, at_most=0.06),
    Goal("A-2 TTFT p95 beside 200 streams of 400, by the bound", quiet_beside_streams, at_most=1.0),
    Goal("A-2 service of the flood beside the quiet one", flood_beside_quiet, at_least=0.95),
    Goal("A-3 Jain's index of ten tenants", fairness_of_ten, at_least=0.97),
    Goal("A-3 TTFT p95 of the smallest five, s", smallest_of_ten, at_most=0.1),
    Goal("A-3 tokens/s by those of FCFS", tokens_of_ten, at_least=0.98),
    Goal("A-4 least share of the incumbent in any second", least_share_of_incumbent, at_least=0.1),
    Goal("A-4 TTFT p95 of the incumbent, s", ttft_of_incumbent, at_most=0.15),
    Goal("A-5 tokens/s by those with all on the device", tokens_of_thousands, at_least=0.95),
    Goal("A-5 TTFT p50, s", lambda policy: ttft_of_thousands(policy, 0.5), at_most=0.03),
    Goal("A-5 TTFT p99, s", lambda policy: ttft_of_thousands(policy, 0.99), at_most=0.35),
    Goal("A-6 loads per load that was of use", loads_of_forty, at_most=1.05),
    Goal("W5 TTFT p95 of chats beside 20,000-token prompts, s", chat_beside_long_prompts, at_most=0.1),
    Goal("W5 TTFT p95 of 20,000-token prompts, s", long_prompts_beside_chat, at_most=1.2),
    Goal("W8 TTFT p95 beside on and off, s", steady_beside_on_and_off, at_most=0.15),
    Goal("W8 TTFT p95 beside an increasing tenant, s", steady_beside_increasing, at_most=0.15),
    Goal("W9 shares before and after weights change", error_of_changed_weights, at_most=0.03),
    *(
        goal
        for target_ms, least in ((7.0, 0.8), (8.0, 0.88))
        for goal in (
            Goal(
                f"A-9 ITL p99 by a target of {target_ms:g} ms",
                partial(itl_by_target, itl_target_ms=target_ms),
                at_most=1.0,
            ),
            Goal(
                f"A-9 tokens with a target of {target_ms:g} ms",
                partial(tokens_with_target, itl_target_ms=target_ms),
                at_least=least,
            ),
        )
    ),
    Goal("A-12 mean time of short calls with MLFQ, by FCFS", short_with_mlfq, at_most=0.1),
    Goal("A-12 worst pause with MLFQ less a step, s", pause_with_mlfq, at_most=0.5),
    Goal("TTFT p95 beside a batch, steps more", lambda policy: steps_added_by_batch(policy, 0.5), at_most=2),
    Goal("time per token beside a batch, by alone", lambda policy: stretch_by_batch(policy, 0.5), at_most=1.3),
    Goal("service of a batch beside half a load", lambda policy: service_of_batch(policy, 0.5), at_least=0.1),
    Goal("service of a batch beside a full load", lambda policy: service_of_batch(policy, 2.0), at_least=0.04),
)
