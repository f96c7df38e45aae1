from __future__ import annotations

import logging
from dataclasses import replace
from itertools import pairwise
from unittest.mock import Mock

import pytest
import torch

from manylora.engine.core import (
    CHECK_DIVISOR,
    MAX_FAILURES,
    NUM_KEPT_BATCHES,
    NUM_KEPT_STEPS,
    NUM_SHOWN_ADAPTERS,
)
from manylora.engine.fairness.service import Prices
from manylora.engine.request import FlowKey
from manylora.engine.scheduling.chunks import Chunks
from manylora.engine.scheduling.plan import ChunkResult, StepPlan
from manylora.engine.status import StepBatches
from manylora.errors import EngineError, PageAccountingError
from simulation.driven import Simulator, adapter, expected_tokens, request


def test_a_step_that_fails_ends_its_requests_and_the_engine_lives_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    simulator = Simulator()
    simulator.runner.fail_on = {6}
    for name in ("a", "b"):
        simulator.submit(request(name, max_tokens=20, ref=adapter("x") if name == "a" else None))
    with caplog.at_level(logging.ERROR):
        while simulator.core.num_steps < 6:
            simulator.pump()
    assert "the device is on fire" in caplog.text
    for name in ("a", "b"):
        error = simulator.last(name).error
        assert error is not None
        assert (error.code, error.kind) == ("internal_error", "internal")
        assert "fire" not in error.message
    simulator.submit(request("c"))
    simulator.run()
    assert simulator.tokens("c") == expected_tokens(request("c"), 6)
    assert simulator.pool.counts()["kv"] == 0
    assert simulator.num_leases == 0


def test_results_that_do_not_fit_the_plan_fail_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    simulator = Simulator()
    monkeypatch.setattr(simulator.runner, "execute", lambda _: [])
    simulator.submit(request("one"))
    simulator.pump()
    assert simulator.last("one").finish_reason == "error"


def test_what_was_committed_before_a_step_failed_is_not_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    simulator = Simulator()
    execute = simulator.runner.execute

    def break_the_second(plan: StepPlan) -> list[ChunkResult]:
        first, second = execute(plan)
        object.__setattr__(second, "prompt_logprobs", None)
        return [first, second]

    monkeypatch.setattr(simulator.runner, "execute", break_the_second)
    simulator.submit(request("fine", max_tokens=1))
    simulator.submit(request("broken", max_tokens=1, prompt_logprobs=0))
    simulator.pump()
    assert simulator.last("fine").finish_reason == "length"
    assert simulator.last("broken").finish_reason == "error"


def test_a_plan_that_fails_ends_what_runs_and_the_engine_lives_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    simulator = Simulator()
    simulator.submit(request("one", max_tokens=50))
    simulator.pump()
    with monkeypatch.context() as broken:
        broken.setattr(simulator.pool, "allocate", lambda *_: 1 / 0)
        while simulator.last("one").finish_reason is None:
            simulator.pump()
    assert simulator.last("one").finish_reason == "error"
    simulator.submit(request("two"))
    simulator.run()
    assert simulator.last("two").finish_reason == "length"


def test_pages_of_a_step_that_was_planned_in_part_wait_for_no_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    simulator = Simulator(num_pages=4)
    simulator.submit(request("one", prompt=4, max_tokens=8))
    simulator.pump()
    with monkeypatch.context() as broken:
        broken.setattr(Chunks, "plan", lambda *_: 1 / 0)
        simulator.pump()
    assert simulator.last("one").finish_reason == "error"
    assert simulator.pool.num_quarantined == 0
    simulator.submit(request("two", prompt=12, max_tokens=1))
    simulator.run()
    assert simulator.last("two").finish_reason == "length"


@pytest.mark.parametrize("part", ["plan", "execute"])
def test_an_engine_that_fails_several_times_in_a_row_gives_up(
    part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    simulator = Simulator()
    monkeypatch.setattr(
        simulator.scheduler if part == "plan" else simulator.runner, part, lambda *_: 1 / 0
    )
    for index in range(MAX_FAILURES - 1):
        simulator.submit(request(str(index)))
        simulator.pump()
    simulator.submit(request("last"))
    with pytest.raises(
        EngineError, match="3 plans or steps in a row failed; the engine must be started again"
    ):
        simulator.pump()


def test_steps_that_fail_with_good_ones_between_do_not_end_the_engine() -> None:
    simulator = Simulator()
    simulator.runner.fail_on = set(range(100)) - set(range(0, 100, MAX_FAILURES))
    for index in range(20):
        simulator.submit(request(str(index), max_tokens=2))
        simulator.run()
        assert simulator.last(str(index)).finish_reason == "error"
    assert simulator.core.num_steps > 2 * MAX_FAILURES


LOST = torch.AcceleratorError("an illegal memory access was encountered", 700)


@pytest.mark.parametrize(
    "error",
    [
        LOST,
        RuntimeError("CUDA error: device-side assert triggered"),
        RuntimeError(
            "CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx(handle)`"
        ),
        RuntimeError("CUDA driver error: an illegal instruction was encountered"),
        RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"),
    ],
)
def test_an_engine_that_has_lost_its_device_gives_up_at_once(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    simulator = Simulator()
    monkeypatch.setattr(simulator.runner, "execute", Mock(side_effect=error))
    simulator.submit(request("one"))
    with pytest.raises(EngineError, match="the device is lost; the engine must be started again"):
        simulator.pump()


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB."),
        torch.AcceleratorError("CUDA error: out of memory", 2),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("Triton Error [CUDA]: out of memory"),
    ],
)
def test_a_step_for_which_the_device_lacks_memory_is_a_failed_step(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    simulator = Simulator()
    simulator.submit(request("one"))
    with monkeypatch.context() as lacking:
        lacking.setattr(simulator.runner, "execute", Mock(side_effect=error))
        simulator.pump()
    assert simulator.last("one").finish_reason == "error"
    simulator.submit(request("two"))
    simulator.run()
    assert simulator.last("two").finish_reason == "length"


@pytest.mark.parametrize(
    "part",
    [
        "tick",
        "fence",
        "copy",
        "table",
        "plan",
        "commit",
        "fail_step",
        "complete",
        "note_step",
        "pages of a step",
    ],
)
def test_the_error_of_a_kernel_ends_the_engine_wherever_it_shows(
    part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    simulator = Simulator(load_ticks=0)
    owners = {
        "tick": (simulator.residency, "tick"),
        "fence": (simulator.store, "fence"),
        "copy": (simulator.store, "copy"),
        "table": (simulator.residency.transfers.tables, "write"),
        "pages of a step": (simulator.pool, "complete"),
    }
    owner, name = owners.get(part, (simulator.scheduler, part))
    for copier_part, value in (("pages_at_once", 0), ("fence", lambda: None), ("copy", Mock())):
        monkeypatch.setattr(simulator.store, copier_part, value, raising=False)
    monkeypatch.setattr(owner, name, Mock(side_effect=LOST))
    if part == "fail_step":
        monkeypatch.setattr(simulator.runner, "execute", Mock(side_effect=ValueError("a bug")))
    simulator.submit(request("one", ref=adapter("x")))
    with pytest.raises(EngineError, match="the device is lost; the engine must be started again"):
        simulator.pump(5)


@pytest.mark.parametrize("pages_at_once", [0, 1 << 30], ids=["copier's thread", "engine's thread"])
@pytest.mark.parametrize("is_on_host", [False, True], ids=["store", "host"])
def test_a_device_that_is_lost_while_an_adapter_is_copied_ends_the_engine(
    pages_at_once: int, is_on_host: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    simulator, copy = Simulator(load_ticks=0), Mock(side_effect=LOST)
    if is_on_host:
        simulator.put_on_host(adapter("x"))
    for name, value in (
        ("pages_at_once", pages_at_once),
        ("fence", lambda: None),
        ("copy_now", copy),
        ("copy", copy),
    ):
        monkeypatch.setattr(simulator.store, name, value, raising=False)
    simulator.submit(request("one", ref=adapter("x")))
    with pytest.raises(EngineError, match="the device is lost; the engine must be started again"):
        simulator.pump(3)


def test_the_accounts_are_checked_when_the_engine_falls_idle() -> None:
    simulator = Simulator(checked=False)
    simulator.submit(request("one", max_tokens=1))
    simulator.pump()
    simulator.pool.allocate(1, "kv")
    with pytest.raises(PageAccountingError):
        simulator.pump()


def test_verifying_the_accounts_takes_a_small_share_of_the_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With many cached blocks it takes long, and an engine with little to do falls idle after every request."""
    simulator = Simulator(checked=False)
    check = simulator.pool.check
    began_s: list[float] = []

    def check_slowly() -> None:
        began_s.append(simulator.now_s)
        check()
        simulator.now_s += 3.0

    monkeypatch.setattr(simulator.pool, "check", check_slowly)
    for index in range(500):
        simulator.submit(request(f"r{index}", max_tokens=1))
        simulator.run()
        simulator.pump()
    assert len(began_s) > 1
    assert min(late - early for early, late in pairwise(began_s)) >= 3.0 * CHECK_DIVISOR

    count = len(began_s)
    for _ in range(4 * CHECK_DIVISOR):  # it is put off, not left out
        simulator.pump()
    assert len(began_s) == count + 1


def test_status_tells_what_the_last_steps_did() -> None:
    simulator = Simulator(load_ticks=1)
    simulator.submit(request("base", prompt=5, max_tokens=3))
    simulator.submit(request("a", prompt=5, max_tokens=3, ref=adapter("a")))
    simulator.pump(3)
    simulator.now_s += 2.0
    status = simulator.core.status()
    assert (status.boot_id, status.num_steps) == ("boot", 3)
    assert (status.running, status.waiting) == (1, 0)
    assert status.last_step_age_s == 2.0
    last = status.last_steps[-1]
    assert (last.requests, last.tokens, last.prefill_tokens, last.adapters, last.base_requests) == (
        2,
        2,
        0,
        1,
        1,
    )
    assert status.last_steps[0].prefill_tokens == 5
    assert (status.pages["kv"], status.pages["prefix"]) == (
        1,
        2,
    )  # the prompts' full blocks are cached
    assert [resident.running for resident in status.residents] == [1]


def test_status_says_who_runs_and_who_waits_for_whom() -> None:
    simulator = Simulator(load_ticks=1, max_running=3)
    tenants = {"base": "t1", "a": "t1", "b": "t2", "late": "t2", "later": "t1", "last": "t2"}
    for name, tenant in tenants.items():
        ref = adapter(name) if name in ("a", "b") else None
        simulator.submit(request(name, max_tokens=9, ref=ref, flow=FlowKey(tenant=tenant)))
        simulator.pump()
    status = simulator.core.status()
    running = status.base_running + sum(resident.running for resident in status.residents)
    assert (status.running, status.base_running, running) == (3, 1, 3)
    assert {tenant: (load.running, load.waiting) for tenant, load in status.tenants.items()} == {
        "t1": (2, 1),
        "t2": (1, 2),
    }


def test_only_a_detailed_status_shows_pages_and_batches() -> None:
    simulator = Simulator()
    assert (simulator.core.status().page_map, simulator.core.status().batches) == (None, None)
    status = simulator.core.status(is_detailed=True)
    assert status.page_map is not None
    assert status.page_map.runs == [(simulator.pool.capacity, 0)]
    assert status.batches == StepBatches(adapters=[], steps=[])


def test_batches_name_the_busiest_adapters_and_count_the_others() -> None:
    simulator = Simulator(max_running=32, step_tokens=256, num_pages=256)
    for index in range(NUM_SHOWN_ADAPTERS + 2):
        simulator.load_now(adapter(str(index)))
        for choice in range(1 + (index in (4, 7)) + (index == 7)):
            simulator.submit(request(f"{index}-{choice}", max_tokens=20, ref=adapter(str(index))))
    simulator.submit(request("base", max_tokens=10))
    simulator.pump(20)
    batches = simulator.core.status(is_detailed=True).batches
    assert batches is not None
    others = [str(index) for index in range(NUM_SHOWN_ADAPTERS) if index not in (4, 7)]
    assert batches.adapters == [adapter(name).digest for name in ("7", "4", *others)]
    first, last = batches.steps[0], batches.steps[-1]
    assert first == [1, 1, 3, 2, *[1] * 6, 2]
    assert last == [20, 0, 3, 2, *[1] * 6, 2]
    for row, step in zip(batches.steps, simulator.core.status().last_steps, strict=True):
        assert (row[0], row[1], sum(row[1:])) == (step.step, step.base_requests, step.requests)


def test_status_counts_backlog_and_service_by_tenant() -> None:
    simulator = Simulator(step_tokens=8)
    simulator.submit(request("one", prompt=10, max_tokens=5))
    simulator.pump()
    status = simulator.core.status()
    load, prices = status.tenants[""], Prices()
    assert load.service == pytest.approx(8 * prices.prompt + prices.prompt_context * 8 * 4)
    assert load.backlog > 2 * prices.prompt
    assert (load.running, load.waiting, load.queued) == (1, 0, 0.0)


@pytest.mark.parametrize(
    ("num_pumps", "computed", "outputs"), [(0, 0, 0), (1, 8, 0), (2, 16, 0), (3, 20, 1), (5, 20, 3)]
)
def test_the_last_output_of_an_aborted_request_tells_what_was_computed_for_it(
    num_pumps: int, computed: int, outputs: int
) -> None:
    simulator = Simulator(step_tokens=8)
    simulator.submit(request("one", prompt=20, max_tokens=9))
    simulator.pump(num_pumps)
    simulator.core.abort("one")
    simulator.pump()
    last = simulator.last("one")
    assert (last.finish_reason, last.token_ids, last.computed_prompt_tokens) == (
        "abort",
        [],
        computed,
    )
    assert len(simulator.tokens("one")) == outputs


@pytest.mark.parametrize("max_tokens", [3, 0])
def test_the_last_output_of_a_request_that_ends_by_itself_tells_of_its_whole_prompt(
    max_tokens: int,
) -> None:
    simulator = Simulator(step_tokens=8)
    simulator.submit(request("one", prompt=20, max_tokens=max_tokens))
    simulator.run()
    outputs = simulator.outputs["one"]
    assert (outputs[-1].finish_reason, outputs[-1].computed_prompt_tokens) == ("length", 20)
    assert [output.computed_prompt_tokens for output in outputs[:-1]] == [0] * (len(outputs) - 1)


def test_only_the_last_steps_and_batches_are_kept() -> None:
    num_steps = max(NUM_KEPT_STEPS, NUM_KEPT_BATCHES) + 20
    simulator = Simulator(checked=False, max_model_len=2000, num_pages=512)
    simulator.submit(request("one", prompt=1, max_tokens=num_steps))
    simulator.run()
    status = simulator.core.status(is_detailed=True)
    kept = range(num_steps - NUM_KEPT_STEPS + 1, num_steps + 1)
    assert [step.step for step in status.last_steps] == list(kept)
    kept = range(num_steps - NUM_KEPT_BATCHES + 1, num_steps + 1)
    assert status.batches == StepBatches(adapters=[], steps=[[step, 1, 0] for step in kept])


def test_closing_ends_the_loads_and_the_runner() -> None:
    simulator = Simulator()
    simulator.submit(request("base", max_tokens=9))
    simulator.submit(request("a", ref=adapter("a")))
    simulator.pump()
    assert simulator.store.num_loading
    assert simulator.runner.pages
    simulator.core.close()
    assert not simulator.store.num_loading
    assert not simulator.runner.pages


def test_status_counts_kernels_that_were_compiled_until_the_engine_closes() -> None:
    simulator = Simulator()
    watch = simulator.core._compiles
    assert simulator.core.status().kernel_compiles == 0
    watch.counts.update(item_kernel=2, shrink_kernel=1)
    assert simulator.core.status().kernel_compiles == 3
    watch.end = Mock()  # type: ignore[method-assign]
    simulator.core.close()
    watch.end.assert_called_once_with()


def test_scores_that_are_no_numbers_end_their_own_request_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    simulator = Simulator()
    execute = simulator.runner.execute

    def spoil(plan: StepPlan) -> list[ChunkResult]:
        return [
            replace(result, token_id=None, is_non_finite=True)
            if result.request_id == "wild"
            else result
            for result in execute(plan)
        ]

    monkeypatch.setattr(simulator.runner, "execute", spoil)
    simulator.submit(request("fine", max_tokens=3))
    simulator.submit(request("wild", max_tokens=3))
    simulator.run()
    error = simulator.last("wild").error
    assert error is not None
    assert (error.kind, error.code) == ("request", "scores_not_finite")
    assert simulator.last("fine").finish_reason == "length"
    simulator.core.check()
