"""The router's decisions one by one, with a clock and a random source of the test's own."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from manylora.registry.servers import Server
from manylora.server.cluster import router as router_module
from manylora.server.cluster.loads import FETCH_S, SPAN_S, START_RATE, ranked
from manylora.server.cluster.router import SMOOTH_S, Router, Target
from registry_samples import server_sample

RATE = 1000.0
"""Units per second of each replica."""


def replica(name: str, boot_id: str = "1", is_ready: bool = True) -> Server:
    state = "ready" if is_ready else "draining"
    return server_sample(name=name, boot_id=boot_id, url=f"http://{name}", state=state)


def target(adapter: str | None = "a", units: float = 100.0, **fields: Any) -> Target:
    return Target(adapter=adapter, units=units, **fields)


class Setting:
    """A router, its clock, and replicas that have reported."""

    def __init__(self, num_replicas: int = 4, rate: float = RATE) -> None:
        self.now_s = 1000.0
        self.router = Router(lambda: self.now_s, random.Random(1))
        self.names = [f"r{i}" for i in range(num_replicas)]
        self.router.set_replicas([replica(name) for name in self.names])
        for name in self.names:
            self.report(name, 0.0, rate=rate)

    def report(
        self,
        name: str,
        backlog_s: float,
        rate: float = RATE,
        boot_id: str = "1",
        tiers: Mapping[str, str] | None = None,
    ) -> None:
        self.router.report(name, boot_id, backlog_s=backlog_s, rate=rate, tiers=tiers or {})

    def names_for(self, asked: Target, exclude: tuple[str, ...] = ()) -> list[str]:
        return [found.name for found in self.router.order(asked, exclude)]

    def first(self, asked: Target) -> str:
        return self.names_for(asked)[0]

    def loads(self) -> dict[str, float]:
        return {name: state.load_s for name, state in self.router.states.items()}

    def copies(self, digest: str) -> int:
        return self.router._adapters[digest].copies

    def serve(self, asked: Target, times: int = 1) -> Counter[str]:
        """Send requests that end at once; returns how many each replica got."""
        served: Counter[str] = Counter()
        for _ in range(times):
            name = self.first(asked)
            self.router.sent(name, asked)
            self.router.ended(name, asked)
            served[name] += 1
        return served

    def send(self, asked: Target, times: int) -> Counter[str]:
        """Send requests that do not end."""
        served: Counter[str] = Counter()
        for _ in range(times):
            name = self.first(asked)
            self.router.sent(name, asked)
            served[name] += 1
        return served


def homes(setting: Setting, num_adapters: int = 2000) -> list[str]:
    return [setting.first(target(f"adapter {i}")) for i in range(num_adapters)]


def test_without_ready_replicas_there_is_nobody_to_ask() -> None:
    router = Router(lambda: 0.0)
    assert router.order(target()) == []
    router.set_replicas([replica("r0", is_ready=False)])
    assert router.order(target()) == []
    assert router.order(target(None)) == []


def test_all_gateways_agree_on_the_order_of_an_adapter_and_it_is_that_of_the_ready_replicas() -> (
    None
):
    setting, other = Setting(), Router(lambda: 0.0)
    other.set_replicas([replica(name) for name in reversed(setting.names)])
    order = setting.names_for(target())
    assert [found.name for found in other.order(target())] == order
    assert sorted(order) == setting.names
    setting.router.set_replicas(
        [replica(name, is_ready=name != order[0]) for name in setting.names]
    )
    assert setting.names_for(target()) == order[1:]
    assert setting.names_for(target(), exclude=(order[1],)) == order[2:]
    for names in ([*order[:3], "new"], [*order[:2], "new", "newer"]):
        setting.router.set_replicas([replica(name) for name in names])
        assert sorted(setting.names_for(target())) == sorted(names)


@pytest.mark.parametrize("num_replicas", [4, 16, 64])
def test_a_replica_that_joins_or_leaves_moves_its_own_adapters_only(num_replicas: int) -> None:
    setting = Setting(num_replicas)
    before = homes(setting)
    assert max(Counter(before).values()) < 2000 / num_replicas * 1.9
    setting.router.set_replicas([replica(name) for name in [*setting.names, "new"]])
    joined = homes(setting)
    moved = [now for was, now in zip(before, joined, strict=True) if was != now]
    assert set(moved) == {"new"}
    assert len(moved) <= 1.5 / num_replicas * 2000
    setting.router.set_replicas([replica(name) for name in setting.names])
    assert homes(setting) == before
    setting.router.set_replicas([replica(name) for name in setting.names[1:]])
    moved = [was for was, now in zip(before, homes(setting), strict=True) if was != now]
    assert set(moved) == {"r0"}
    assert len(moved) <= 1.5 / num_replicas * 2000


def test_an_adapter_with_half_of_the_work_is_on_three_of_four_replicas() -> None:
    setting = Setting()
    for i in range(600):
        setting.serve(target("hot"))
        setting.serve(target(f"adapter {i}"))
    served = setting.send(target("hot", 1e-6), 30)  # work that changes no share
    assert sorted(served.values()) == [10, 10, 10]
    assert set(served) == set(setting.names_for(target("hot"))[:3])
    assert setting.copies("hot") == 3


def test_few_requests_make_no_copies() -> None:
    setting = Setting()
    setting.serve(target("only"), 10)
    assert setting.copies("only") == 1
    assert len(setting.serve(target("only"), 5)) == 1


def test_copies_come_at_once_and_go_after_a_minute() -> None:
    setting = Setting()
    setting.serve(target("hot"), 1000)
    setting.now_s += 1
    copies = []
    for _ in range(70):
        setting.serve(target("other"), 500)
        setting.now_s += 1
        setting.first(target("hot"))
        copies.append(setting.copies("hot"))
    assert copies[:58] == [4] * 58
    assert copies[-1] == 1


@pytest.mark.parametrize(("asked", "made"), [(1, 1), (2, 2), (9, 4)])
def test_a_pin_makes_copies(asked: int, made: int) -> None:
    served = Setting().send(target(units=1.0, copies=asked), 8)
    assert len(served) == made
    assert set(served.values()) == {8 // made}


def test_work_beyond_the_bound_goes_to_the_next_that_has_room() -> None:
    setting = Setting()
    first, second, third, fourth = setting.names_for(target())
    setting.report(first, 0.0)
    heavy = target(units=10 * RATE)
    setting.router.sent(first, heavy)
    assert setting.names_for(target()) == [second, first, third, fourth]
    setting.router.sent(second, heavy)
    assert setting.first(target()) == third
    setting.router.ended(first, heavy)
    assert setting.first(target()) == first


def test_a_replica_that_has_the_adapter_but_no_room_is_passed_over() -> None:
    setting = Setting()
    first, second, third, _ = setting.names_for(target())
    setting.report(second, 0.0, tiers={"a": "device"})
    setting.router.sent(first, target(units=10 * RATE))
    setting.router.sent(second, target(units=8 * RATE))
    assert setting.first(target()) == third


def test_a_load_is_worth_it_only_if_it_is_shorter_than_the_wait() -> None:
    setting = Setting()
    first, second, third, _ = setting.names_for(target())
    setting.router.sent(first, target(units=0.9 * FETCH_S * RATE))
    assert setting.first(target()) == first
    setting.report(third, 0.0, tiers={"a": "host"})
    assert setting.first(target()) == third
    setting.report(second, 0.0, tiers={"a": "device"})
    assert setting.first(target()) == second
    setting.report(second, 0.0, tiers={"a": "stored"})
    assert setting.first(target()) == third


def test_small_differences_move_nothing() -> None:
    setting = Setting()
    first, second, *_ = setting.names_for(target())
    setting.report(second, 0.0, tiers={"a": "device"})
    setting.router.sent(first, target(units=0.04 * RATE))
    assert setting.first(target()) == first


def test_own_requests_count_once_whether_a_report_has_them_or_not() -> None:
    setting = Setting(1)
    asked = target(units=2 * RATE)
    setting.router.sent("r0", asked)
    assert setting.loads() == {"r0": 2.0}
    setting.report("r0", 2.0)
    assert setting.loads() == {"r0": 2.0}
    setting.now_s += 100
    setting.report("r0", 0.5)  # most of it is done
    assert setting.loads() == {"r0": 2.0}
    setting.router.ended("r0", asked)
    assert setting.loads() == {"r0": 0.0}


def test_rounding_leaves_no_load_behind() -> None:
    setting = Setting(1)
    requests = [target(units=units) for units in (0.1, 0.2, 0.3)]
    for asked in requests:
        setting.router.sent("r0", asked)
    for asked in requests:
        setting.router.ended("r0", asked)
    assert setting.loads() == {"r0": 0.0}


def test_work_of_other_gateways_is_averaged_over_reports_and_stays_when_they_stop() -> None:
    setting = Setting(1)
    setting.router.set_replicas([replica("r0", boot_id="2")])
    setting.report("r0", 3.0, boot_id="2")
    assert setting.loads() == {"r0": 3.0}
    setting.now_s += SMOOTH_S / 10
    setting.report("r0", 0.0, boot_id="2")
    assert 2.6 < setting.loads()["r0"] < 2.8
    setting.now_s += 100
    assert 2.6 < setting.loads()["r0"] < 2.8
    setting.report("r0", 0.0, boot_id="2")
    assert setting.loads()["r0"] < 0.001


def test_a_replica_without_a_rate_is_taken_for_an_average_one() -> None:
    setting = Setting(2, rate=0.0)
    setting.router.sent("r0", target(units=500))
    assert setting.loads()["r0"] == 500 / START_RATE
    setting.report("r1", 0.0, rate=5000.0)
    setting.router.sent("r0", target(units=500))
    assert setting.loads()["r0"] == 0.2
    setting.report("r0", 0.0, rate=2000.0)
    assert setting.loads()["r0"] == 0.5
    setting.report("r0", 0.0, rate=0.0)
    assert setting.loads()["r0"] == 0.5


def test_reports_of_an_old_process_and_of_strangers_are_ignored() -> None:
    setting = Setting(1)
    setting.now_s += 100
    setting.report("r0", 9.0, boot_id="0")
    setting.report("stranger", 9.0)
    assert setting.loads() == {"r0": 0.0}


def test_a_new_process_starts_without_load_and_failures_and_old_requests_still_end() -> None:
    setting = Setting(2)
    old = target(units=RATE)
    setting.now_s += 100
    setting.report("r0", 5.0)
    setting.router.sent("r0", old)
    assert setting.loads()["r0"] == pytest.approx(6.0, abs=0.01)
    setting.router.failed("r0")
    setting.router.set_replicas([replica("r0", boot_id="2"), replica("r1")])
    seen = setting.router.states["r0"]
    assert (seen.failures, seen.reported_at_s, seen.in_flight) == (0, None, 1)
    assert seen.ejected_until_s < setting.now_s
    assert seen.load_s == 1.0, "the request that was sent to the old one"
    setting.router.ended("r0", old)
    assert setting.loads()["r0"] == 0.0


def test_a_replica_that_has_left_is_kept_until_its_requests_end() -> None:
    setting = Setting(2)
    setting.router.sent("r0", target())
    setting.router.set_replicas([replica("r1")])
    assert set(setting.router.states) == {"r0", "r1"}
    assert setting.names_for(target()) == ["r1"]
    setting.router.ended("r0", target())
    setting.router.set_replicas([replica("r1")])
    assert list(setting.router.states) == ["r1"]
    for call in (setting.router.failed, setting.router.answered):
        call("r0")
    setting.router.ended("r0", target())


def test_a_version_that_one_server_holds_goes_there_or_nowhere() -> None:
    setting = Setting()
    last = setting.names_for(target())[-1]
    setting.router.sent(last, target(units=100 * RATE))
    assert setting.names_for(target(held_by=last)) == [last]
    assert setting.names_for(target(held_by=last), exclude=(last,)) == []
    assert setting.names_for(target(held_by="gone")) == []


def test_base_requests_go_to_the_less_loaded_of_two() -> None:
    setting = Setting(4)
    setting.router.sent("r2", target(None, units=10.0))
    assert "r2" not in setting.serve(target(None), 200)
    served = Setting(4).send(target(None), 400)
    assert all(90 <= number <= 110 for number in served.values())
    setting.router.sent("r0", target(None, units=20.0))
    assert setting.names_for(target(None))[-2:] == ["r2", "r0"], (
        "those tried next are in order of load too"
    )


def test_one_replica_gets_everything() -> None:
    setting = Setting(1)
    for asked in (
        target(),
        target(None),
        target(None, affinity=b"session"),
        target(affinity=b"session", copies=3),
    ):
        setting.router.sent("r0", target(units=RATE))
        assert setting.names_for(asked) == ["r0"]


def test_a_session_of_the_base_stays_where_it_is_until_that_replica_has_too_much_to_do() -> None:
    setting = Setting()
    sessions = [target(None, affinity=b"%d" % i) for i in range(40)]
    first = [setting.first(session) for session in sessions]
    assert set(first) == set(setting.names)
    assert [setting.first(session) for session in sessions] == first
    setting.router.sent(first[0], target(units=RATE))
    assert setting.first(sessions[0]) != first[0]


def test_a_session_of_an_adapter_stays_on_one_of_its_copies() -> None:
    setting = Setting()
    copies = setting.names_for(target())[:2]
    sessions = [target(affinity=b"%d" % i, copies=2) for i in range(20)]
    first = [setting.first(session) for session in sessions]
    assert set(first) == set(copies)
    setting.router.sent(first[0], target(units=0.01 * RATE))
    assert [setting.first(session) for session in sessions] == first
    setting.router.sent(first[0], target(units=RATE))
    assert {setting.first(session) for session in sessions} == set(copies) - {first[0]}


def test_a_replica_that_fails_is_left_out_for_a_second_and_longer_each_time() -> None:
    setting = Setting()
    first = setting.first(target())
    waits = []
    for _ in range(7):
        for _ in range(20):  # requests that break together count once
            setting.router.failed(first)
        assert first not in setting.names_for(target())
        assert first not in setting.names_for(target(None))
        waits.append(setting.router.states[first].ejected_until_s - setting.now_s)
        setting.now_s += waits[-1]
        assert setting.first(target()) == first
    assert waits == [1, 2, 4, 8, 16, 30, 30]


def test_an_answer_ends_an_ejection_and_clears_the_failures() -> None:
    setting = Setting()
    first = setting.first(target())
    for _ in range(3):
        setting.router.failed(first)
        setting.now_s += 4
    setting.router.failed(first)
    assert first not in setting.names_for(target())
    setting.router.answered(first)
    assert setting.first(target()) == first
    setting.router.failed(first)
    setting.now_s += 1
    assert setting.first(target()) == first


def test_where_all_are_ejected_they_are_asked_all_the_same() -> None:
    setting = Setting(2)
    order = setting.names_for(target())
    for name in order:
        setting.router.failed(name)
    assert setting.names_for(target()) == order
    assert setting.names_for(target(held_by=order[1])) == [order[1]]


def test_a_tenants_weight_is_divided_like_its_running_work() -> None:
    setting = Setting()
    assert setting.router.weight_share("t", "r0") == 1.0
    for name, units in (("r0", 300.0), ("r1", 100.0)):
        setting.router.sent(name, target(units=units, tenant="t"))
    setting.router.sent("r1", target(units=1000.0, tenant="other"))
    assert setting.router.weight_share("t", "r0") == pytest.approx(0.75)
    assert setting.router.weight_share("t", "r1") == pytest.approx(0.25)
    assert setting.router.weight_share("t", "r2") == 0.01
    assert setting.router.weight_share("other", "r1") == 1.0
    setting.router.ended("r0", target(units=300.0, tenant="t"))
    assert setting.router.weight_share("t", "r1") == 1.0
    setting.router.ended("r1", target(units=100.0, tenant="t"))
    setting.router.ended("r1", target(units=1000.0, tenant="other"))
    assert not setting.router._running  # nothing is kept of tenants without requests


def test_each_tenant_is_spread_over_the_copies_that_have_room() -> None:
    setting = Setting(2, rate=1e6)
    flood, light = (target("hot", tenant=tenant, copies=2) for tenant in ("flood", "light"))
    first = setting.first(flood)
    setting.send(replace(flood, adapter=None), 2)  # on both
    for name in setting.names:
        for _ in range(50 if name == first else 10):
            setting.router.sent(name, flood)
    assert setting.first(flood) != first
    assert setting.send(light, 20) == dict.fromkeys(
        setting.names, 10
    )  # although one has less to do


def test_a_copy_with_too_much_to_do_gets_no_more_of_a_tenant_that_has_little_there() -> None:
    setting = Setting(2)
    setting.now_s += 10 * SMOOTH_S
    setting.report("r0", 60.0)
    setting.router.sent("r1", target(units=1.0, tenant="t"))
    assert setting.first(target("hot", tenant="t", copies=2)) == "r1"


def test_a_tenth_of_recent_requests_and_a_few_more_may_be_retried() -> None:
    setting = Setting()
    assert [setting.router.may_retry() for _ in range(4)] == [True, True, True, False]
    setting.serve(target(), 100)
    assert [setting.router.may_retry() for _ in range(11)] == [True] * 10 + [False]
    setting.now_s += 10 * SPAN_S
    assert setting.router.may_retry()


def test_adapters_with_little_work_are_forgotten_when_there_are_many(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(router_module, "MAX_ADAPTERS", 50)
    setting = Setting()
    setting.serve(target("hot", tenant="large"), 1000)
    for i in range(500):
        setting.serve(target(f"adapter {i}", tenant=f"tenant {i}"))
    assert len(setting.router._adapters) <= 50
    assert setting.copies("hot") == 4


def test_pins_follow_the_order_in_which_requests_go() -> None:
    setting = Setting()
    for digest in (f"adapter {number}" for number in range(20)):
        assert ranked(digest, reversed(setting.names)) == setting.names_for(target(digest))
