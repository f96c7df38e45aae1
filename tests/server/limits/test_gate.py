"""The gate's decisions one by one, with a clock of the test's own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from manylora.engine.fairness.service import TenantLoad
from manylora.engine.status import EngineLoad
from manylora.errors import CapacityError, RateLimitError
from manylora.server.limits.gate import BOOKED_SHARE, Admission, Gate
from manylora.server.limits.prediction import (
    FACTOR_BOUNDS,
    MIN_ANSWERS,
    START_FACTOR,
    AdmissionRequest,
)
from manylora.server.limits.return_times import START_CLAIMED

ASK = AdmissionRequest(
    tenant="t",
    name="tenant",
    weight=1.0,
    adapter=None,
    num_bytes=400,
    num_choices=1,
    max_tokens=50,
    deadline_s=None,
    key=1,
)
UNITS = 100 * (1 + 100 / 60_000) + 50 * (2 + 125 / 600)
"""Of that request: 100 prompt tokens and 50 to come."""


class Setting:
    """A gate, its clock and what the engine says."""

    def __init__(self, rate: float = UNITS, max_waiting: int = 1000, rows: int = 0) -> None:
        self.now_s = 100.0
        self.load: EngineLoad | None = EngineLoad(rate=rate, rows=rows)
        self.told: list[tuple[str, str | None]] = []
        self.gate = Gate(
            10.0,
            max_waiting,
            lambda: self.load,
            lambda: self.now_s,
            lambda code, name: self.told.append((code, name)),
        )

    def admit(self, **fields: Any) -> Admission:
        return self.gate.admit(replace(ASK, **fields))

    def fill(self, **fields: Any) -> list[Admission]:
        """Let in as many as there is time for."""
        admitted = []
        while True:
            try:
                admitted.append(self.admit(**fields))
            except (RateLimitError, CapacityError):
                return admitted

    def refusal(self, **fields: Any) -> RateLimitError | CapacityError:
        with pytest.raises((RateLimitError, CapacityError)) as refused:
            self.admit(**fields)
        assert isinstance(refused.value, RateLimitError | CapacityError)
        return refused.value

    def rates(self, **rates: float) -> None:
        tenants = {name: TenantLoad(rate=rate) for name, rate in rates.items()}
        self.load = EngineLoad(rate=UNITS, tenants=tenants)


def test_so_many_are_let_in_as_begin_in_time() -> None:
    # each takes a second: the wait of the n-th is n times the factor, which must not exceed 9 s
    assert len(Setting().fill()) == int(9 / START_FACTOR) + 1
    assert len(Setting(rate=2 * UNITS).fill()) == int(18 / START_FACTOR) + 1


def test_a_request_is_let_in_where_nothing_of_its_tenant_waits() -> None:
    setting = Setting()
    huge = {"num_bytes": 4_000_000, "max_tokens": 100_000}
    (only,) = setting.fill(**huge)
    assert len(setting.fill(**huge, tenant="o", key=2)) == 1
    only.started(0.1)
    only.end()
    setting.admit(**huge, deadline_s=0.001)


def test_a_tenant_whose_requests_all_have_rows_is_let_in_whatever_the_rate_seems_to_be() -> None:
    setting = Setting(UNITS / 1000, rows=8)
    first = setting.fill()
    assert len(first) == 8
    assert len(setting.fill(tenant="other")) == 4
    first.pop().end()
    assert isinstance(setting.refusal(), RateLimitError)  # its share is four rows now


def test_while_the_engine_is_paused_requests_wait_as_long_as_there_is_room() -> None:
    setting = Setting(max_waiting=90)
    num_usual = len(setting.fill())
    setting.gate.pause(True)
    assert num_usual + len(setting.fill()) == 60  # two thirds of the places, for one tenant
    assert len(setting.fill(tenant="other")) == 20
    setting.admit(tenant="late")
    setting.admit(tenant="late", deadline_s=0.001)  # the engine refuses it when its time is over
    setting.gate.pause(False)
    assert len(setting.fill(tenant="third")) < 20 / 3


@pytest.mark.parametrize("is_paused", [True, False])
def test_a_wait_with_a_pause_in_it_teaches_nothing(is_paused: bool) -> None:
    """Without one, waits that are longer than predicted raise the factor."""
    setting = Setting()
    for _ in range(MIN_ANSWERS):
        one = setting.admit()
        one.started(0.0)
        one.finished(100, 100, 50)
        one.end()
    waiting = setting.fill()
    setting.gate.pause(is_paused)
    setting.now_s += 500.0
    before = setting.gate.prediction.factor
    waiting[-1].started(499.0)
    setting.gate.pause(False)
    waiting[-2].started(499.5)
    assert (setting.gate.prediction.factor > before) != is_paused
    setting.now_s += 501.0
    waiting[-3].started(500.0)
    assert setting.gate.prediction.factor > before


def test_a_wait_for_a_row_is_not_taken_for_the_time_that_an_adapter_takes_to_load() -> None:
    setting = Setting(rows=2)
    flood = [setting.admit(adapter="a") for _ in range(6)]
    for number, one in enumerate(flood):
        one.started(0.1 if number < 2 else 60.0)
        one.end()
    setting.fill()
    setting.admit(adapter="new")  # it waits for its load only, which takes 0.1 s


def test_a_tenant_gets_its_weight_or_what_others_leave() -> None:
    setting = Setting()
    setting.admit(tenant="light")
    setting.admit(tenant="heavy", weight=3.0)
    assert setting.gate.snapshot()["light"]["wait_s"] == pytest.approx(4 * START_FACTOR)
    assert setting.gate.snapshot()["heavy"]["wait_s"] == pytest.approx(4 / 3 * START_FACTOR)
    setting.rates(light=0.8 * UNITS, heavy=0.2 * UNITS)
    assert setting.gate.snapshot()["light"]["wait_s"] == pytest.approx(START_FACTOR / 0.8)


def test_who_takes_more_than_its_share_gets_429_and_all_others_503() -> None:
    setting = Setting()
    for name in ("a", "b"):
        setting.fill(tenant=name)
    setting.rates(a=0.9 * UNITS, b=0.1 * UNITS)
    codes = []
    for name in ("a", "b"):
        setting.fill(tenant=name)
        refused = setting.refusal(tenant=name)
        codes.append((type(refused), refused.code))
    assert codes == [(RateLimitError, "limit.queue"), (CapacityError, "server.overloaded")]
    assert setting.told[-1] == ("server.overloaded", "tenant")


def test_a_new_adapter_of_the_tenant_does_not_wait_for_all_others() -> None:
    setting = Setting()
    setting.fill()
    setting.admit(adapter="sha256:other", key=5)


def test_no_tenant_fills_the_queue_for_others() -> None:
    setting = Setting(rate=1e9, max_waiting=90)
    assert len(setting.fill()) == 60  # twice as many as are left
    for number in range(40):
        assert setting.fill(tenant=f"other-{number}")
    assert setting.gate.num_waiting <= 90 + 40


def test_a_request_for_which_a_row_is_free_takes_no_place_in_the_queue() -> None:
    setting = Setting(rate=1e9, max_waiting=2, rows=1)
    first, second, _ = (
        setting.fill()
    )  # one for the row and two for the queue, though the engine has begun none
    first.started(0.0)
    assert setting.fill() == []
    first.finished(100, 100, 50)
    assert len(setting.fill()) == 1
    first.end()
    assert setting.fill() == []
    second.started(0.0)
    second.end()
    assert len(setting.fill()) == 1


@pytest.mark.parametrize(
    ("num_prompt", "num_cached", "num_output"),
    [(100, 0, 50), (400, 0, 50), (100, 96, 50), (100, 0, 5)],
)
def test_told_times_follow_what_the_tenants_answers_cost(
    num_prompt: int, num_cached: int, num_output: int
) -> None:
    setting = Setting()
    other = setting.admit(tenant="other")
    for _ in range(500):
        answer = setting.admit()
        answer.started(0.0)
        answer.finished(num_prompt - num_cached, num_prompt, num_output)
        answer.end()
        other.finished(1, 1, 5000)  # changes nothing for the tenant
    setting.gate.prediction.factor = START_FACTOR
    setting.fill()
    told = [setting.refusal(key=1000 + number).retry_after_s or 0.0 for number in range(400)]
    computed = num_prompt - num_cached
    cost = computed * (1 + num_prompt / 60_000) + num_output * (
        2 + (num_prompt + num_output / 2) / 600
    )
    spacing_s = (told[-1] - told[100]) / 299
    assert spacing_s == pytest.approx(START_CLAIMED * cost / (BOOKED_SHARE * UNITS / 2), rel=0.1)


def test_who_came_as_told_has_come_though_its_deadline_forbids_to_wait() -> None:
    setting = Setting()
    admitted = setting.fill()
    told_s = setting.refusal(key=77).retry_after_s
    for one in admitted[1:]:
        one.end()
    setting.now_s += told_s or 0
    slots = setting.gate.tenants["t"].slots
    before = slots.claimed_shares[0]
    setting.refusal(key=77, deadline_s=0.5)
    assert slots.claimed_shares[0] > before
    assert len(slots) == 1  # that of the first that found no time


def test_a_deadline_alone_takes_no_slot() -> None:
    setting = Setting()
    for _ in range(3):
        setting.admit()
    with pytest.raises(CapacityError, match=r"the limit is 0\.5 s") as refused:
        setting.admit(deadline_s=0.5)
    assert refused.value.retry_after_s == pytest.approx(3 * START_FACTOR - 0.45)
    setting.admit()


def test_the_factor_follows_what_really_happens() -> None:
    for actual, bound in ((100.0, FACTOR_BOUNDS[1]), (0.001, FACTOR_BOUNDS[0])):
        setting = Setting(rate=1.5 * UNITS)
        for _ in range(MIN_ANSWERS):
            answer = setting.admit()
            answer.started(0.0)
            answer.finished(100, 100, 50)
            answer.end()
        assert (
            setting.gate.prediction.factor == START_FACTOR
        )  # nothing waited, so nothing was learned
        for _ in range(1500):
            first, second = setting.admit(), setting.admit()
            first.started(0.0)
            second.started(actual)
            first.end()
            second.end()
        assert setting.gate.prediction.factor == pytest.approx(bound)


def test_choices_leave_the_queue_one_by_one_and_the_end_takes_the_rest() -> None:
    setting = Setting()
    admission = setting.admit(num_choices=3)
    assert setting.gate.num_waiting == 3
    admission.started(0.1)
    assert setting.gate.num_waiting == 2
    admission.end()
    admission.end()
    admission.started(0.1)
    assert setting.gate.num_waiting == 0
    assert setting.gate.snapshot() == {}


def test_the_engines_own_refusals_get_a_time_and_are_counted() -> None:
    setting = Setting()
    for _ in range(4):
        setting.admit()
    admission = setting.admit()
    error = CapacityError("too late", code="deadline.queue")
    assert admission.refused(error) is error
    assert error.retry_after_s == pytest.approx(5 * START_FACTOR - 2.2)
    other = CapacityError("the engine restarts", code="engine_restarted", retry_after_s=7)
    admission.refused(other)
    assert other.retry_after_s == 7
    assert setting.gate.snapshot()["t"]["refused"] == {"deadline.queue": 1}
    assert setting.told == [("deadline.queue", "tenant")]


def test_an_adapter_not_seen_before_is_expected_to_take_its_load() -> None:
    setting = Setting(rows=1)
    one = setting.admit(adapter="sha256:cold")
    one.started(4.0)
    assert setting.gate.prediction.load_s == pytest.approx(0.5)
    one.end()
    two = setting.admit(adapter="sha256:cold")
    two.started(4.0)  # it is there by now: no load is learned from it
    assert setting.gate.prediction.load_s == pytest.approx(0.5)
    two.end()


@pytest.mark.parametrize("load", [None, EngineLoad(rate=0)])
def test_without_a_word_of_the_engine_everybody_is_let_in_up_to_the_cap(
    load: EngineLoad | None,
) -> None:
    setting = Setting(max_waiting=30)
    setting.load = load
    assert len(setting.fill()) == 20
    assert setting.refusal().retry_after_s == 1
