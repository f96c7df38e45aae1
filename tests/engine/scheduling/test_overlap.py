"""A step is launched before the one before it is read, and nobody can tell but by the time it takes."""

from __future__ import annotations

from typing import Any

import pytest

from manylora.engine.core import MAX_FAILURES
from manylora.engine.request import GenerationRequest, RequestOutput
from manylora.engine.sampling_params import BeamParams
from manylora.engine.scheduling.plan import ChunkResult, StepPlan
from manylora.errors import EngineError
from simulation.driven import DrivenRunner, Simulator, adapter, expected_tokens, request


class Recorder:
    """Notes when steps of a simulator are launched and collected."""

    def __init__(self, simulator: Simulator, monkeypatch: pytest.MonkeyPatch) -> None:
        self.events: list[str] = []
        self.fails: set[str] = set()
        """Events that raise."""
        runner: DrivenRunner = simulator.runner
        launch, collect = runner.launch, runner.collect
        self._steps: dict[int, int] = {}

        def note(event: str) -> None:
            self.events.append(event)
            if event in self.fails:
                raise RuntimeError("the device is on fire")

        def launched(plan: StepPlan, masks: object = None) -> list[ChunkResult]:
            note(f"launch {plan.step}")
            results = launch(plan, masks)
            self._steps[id(results)] = plan.step
            return results

        def collected(results: list[ChunkResult]) -> list[ChunkResult]:
            note(f"collect {self._steps[id(results)]}")
            return collect(results)

        monkeypatch.setattr(runner, "launch", launched)
        monkeypatch.setattr(runner, "collect", collected)


def overlapped(**settings: Any) -> Simulator:
    return Simulator(overlaps=True, **settings)


def rows(simulator: Simulator, request_id: str) -> int:
    """Rows of one token that were computed for a request."""
    return sum(
        chunk.request_id == request_id and len(chunk.token_ids) == 1
        for plan in simulator.runner.plans
        for chunk in plan.chunks
    )


def test_each_step_is_launched_before_the_one_before_is_collected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    simulator = overlapped()
    recorder = Recorder(simulator, monkeypatch)
    wanted = request("x", max_tokens=3)
    simulator.submit(wanted)
    simulator.run()
    assert recorder.events == [
        "launch 1",
        "launch 2",
        "collect 1",
        "launch 3",
        "collect 2",
        "collect 3",
    ]
    assert simulator.tokens("x") == expected_tokens(wanted, 3)


@pytest.mark.parametrize(
    "fields",
    [
        {"repetition_penalty": 2.0},
        {"presence_penalty": 1.0},
        {"bad_words": ((1, 2),)},
        {"prompt_logprobs": 0, "max_tokens": 1},
        {"beam": BeamParams(width=2)},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_a_step_whose_results_the_next_plan_needs_is_taken_in_first(
    fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    simulator = overlapped()
    recorder = Recorder(simulator, monkeypatch)
    simulator.submit(request("x", **{"max_tokens": 3, **fields}))
    simulator.run()
    steps = [int(event.split()[1]) for event in recorder.events]
    assert recorder.events == [
        f"{what} {step}" for step in steps[::2] for what in ("launch", "collect")
    ]
    for plan in simulator.runner.plans:
        for chunk in plan.chunks:
            assert chunk.token_source is None
            if (
                chunk.sample is not None
                and "beam" not in fields
                and "prompt_logprobs" not in fields
            ):
                assert len(chunk.sample.output_token_ids) == chunk.sample.output_index


@pytest.mark.parametrize("fields", [{"min_tokens": 2}, {"logit_bias": {5: 1.0}}, {"logprobs": 2}])
def test_what_is_known_ahead_overlaps(
    fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    simulator = overlapped()
    recorder = Recorder(simulator, monkeypatch)
    simulator.submit(request("x", max_tokens=3, **fields))
    simulator.run()
    assert recorder.events[:3] == ["launch 1", "launch 2", "collect 1"]
    outputs = simulator.outputs["x"]
    assert [len(output.logprobs or []) for output in outputs] == [
        1 if "logprobs" in fields else 0
    ] * 3


def test_an_end_that_is_known_ahead_wastes_no_row() -> None:
    simulator = overlapped()
    simulator.submit(
        request("long", max_tokens=6),
        request("longest", prompt=6, max_tokens=6),
        request("none", max_tokens=0),
    )
    simulator.run()
    assert [rows(simulator, name) for name in ("long", "longest", "none")] == [5, 5, 0]
    assert [simulator.last(name).finish_reason for name in ("long", "longest", "none")] == [
        "length"
    ] * 3
    assert len(simulator.outputs["none"]) == 1


def test_a_row_behind_the_end_of_sequence_is_neither_told_nor_charged() -> None:
    asked = request("x", max_tokens=20)
    tokens = expected_tokens(asked, 4)
    counts = []
    for overlaps in (False, True):
        simulator = Simulator(overlaps=overlaps, eos=frozenset(tokens[3:]))
        simulator.submit(asked)
        simulator.run()
        assert simulator.tokens("x") == tokens
        last = simulator.last("x")
        assert (last.finish_reason, last.stop_token_id, last.computed_prompt_tokens) == (
            "stop",
            tokens[3],
            5,
        )
        counts.append(rows(simulator, "x"))
        assert simulator.core.status().service_tokens == {"": 5 + 3}
        assert simulator.pool.counts()["kv"] == simulator.pool.num_quarantined == 0
    assert counts == [3, 4]


def test_a_request_with_the_id_of_one_that_was_aborted_in_flight_gets_its_own_tokens() -> None:
    simulator = overlapped()
    simulator.submit(request("x", prompt=[1, 2, 3], max_tokens=50))
    simulator.pump(4)
    simulator.core.abort("x")
    again = request("x", prompt=[4, 5, 6, 7], max_tokens=5)
    simulator.core.submit(again)
    before = len(simulator.outputs["x"])
    simulator.run()
    aborted, *outputs = simulator.outputs["x"][before:]
    assert aborted.finish_reason == "abort"
    assert [token for output in outputs for token in output.token_ids] == expected_tokens(again, 5)


def test_a_launch_that_fails_takes_no_token_from_the_step_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    simulator = overlapped()
    recorder = Recorder(simulator, monkeypatch)
    recorder.fails = {"launch 4"}
    asked = request("x", max_tokens=9)
    simulator.submit(asked, request("done", prompt=6, max_tokens=3))
    simulator.run()
    assert simulator.tokens("x") == expected_tokens(asked, 3)
    assert simulator.last("x").error is not None
    assert simulator.last("done").finish_reason == "length"
    assert simulator.pool.counts()["kv"] == simulator.pool.num_quarantined == 0


def test_with_a_step_that_fails_the_one_launched_after_it_fails_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Both count as one failure; what they would have moved or computed is not trusted."""
    simulator = overlapped(num_pages=32)
    recorder = Recorder(simulator, monkeypatch)
    recorder.fails = {f"collect {step}" for step in (2, 4)}
    assert MAX_FAILURES == 3
    for index in range(2):
        simulator.submit(request(f"old {index}", max_tokens=9))
        simulator.pump(2)
        simulator.submit(request(f"new {index}", max_tokens=9))
        simulator.pump()
        assert [simulator.last(f"{age} {index}").finish_reason for age in ("old", "new")] == [
            "error",
            "error",
        ]
        assert not simulator.core.has_work()
        recorder.fails = {f"collect {simulator.core.num_steps + 2}"}
    assert simulator.pool.counts()["kv"] == simulator.pool.num_quarantined == 0
    recorder.fails = set()
    asked = request("fine", max_tokens=4)
    simulator.submit(asked)
    simulator.run()
    assert simulator.tokens("fine") == expected_tokens(asked, 4)


def test_a_plan_that_fails_takes_no_token_from_the_step_in_flight(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    simulator = overlapped()
    asked = request("x", max_tokens=9)
    simulator.submit(asked)
    simulator.pump(3)
    with monkeypatch.context() as broken:
        broken.setattr(simulator.scheduler, "plan", lambda: 1 / 0)
        simulator.pump()
    assert simulator.tokens("x") == expected_tokens(asked, 3)
    assert simulator.last("x").error is not None
    assert not simulator.core.has_work()


def test_failures_in_a_row_end_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    simulator = overlapped()
    monkeypatch.setattr(simulator.runner, "collect", lambda _: 1 / 0)
    for index in range(MAX_FAILURES - 1):
        simulator.submit(request(str(index)))
        simulator.pump(2)
    simulator.submit(request("last"))
    with pytest.raises(EngineError, match="3 plans or steps in a row failed"):
        simulator.pump(2)


@pytest.mark.parametrize("what", ["status", "close"])
def test_a_step_in_flight_is_waited_for(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    simulator = overlapped()
    recorder = Recorder(simulator, monkeypatch)
    simulator.submit(request("x", max_tokens=9))
    simulator.pump(3)
    assert recorder.events[-2:] == ["launch 3", "collect 2"]
    if what == "status":
        assert len(simulator.core.status().last_steps) == simulator.core.num_steps == 3
        simulator.run()
        assert len(simulator.tokens("x")) == 9
    else:
        simulator.core.close()
    assert "collect 3" in recorder.events


def test_a_step_is_in_flight_when_all_requests_are_gone() -> None:
    simulator = overlapped()
    simulator.submit(request("x", max_tokens=9))
    simulator.pump(3)
    simulator.core.abort("x")
    assert [output.finish_reason for output in simulator.pump()] == ["abort"]
    assert not simulator.core.has_work()
    assert simulator.pool.counts()["kv"] == simulator.pool.num_quarantined == 0


def test_a_pause_takes_in_what_is_in_flight_and_ends_it_where_it_ends_requests() -> None:
    simulator = overlapped()
    asked = request("x", max_tokens=9)
    simulator.submit(asked, request("y", max_tokens=9))
    simulator.pump(3)
    simulator.core.pause("keep")
    simulator.pump(5)
    assert len(simulator.tokens("x")) == 3
    assert simulator.pool.num_quarantined == 0
    simulator.core.abort("y")
    simulator.core.pause(None)
    simulator.run()
    assert simulator.tokens("x") == expected_tokens(asked, 9)


def told(outputs: list[RequestOutput]) -> Any:
    """Outputs of a client as one, without times."""
    last = outputs[-1]
    cached = sum(output.cached_tokens for output in outputs)
    prompt = [output.prompt_logprobs for output in outputs if output.prompt_logprobs is not None]
    return (
        [token for output in outputs for token in output.token_ids],
        last.finish_reason,
        cached,
        prompt,
        last.hypotheses,
    )


def mixed() -> list[GenerationRequest]:
    prompt = list(range(13))
    return [
        request("lead", prompt, max_tokens=7),
        request("fork", prompt, max_tokens=9, fork_of="lead", choice_index=1),
        request("fork too", prompt, max_tokens=5, fork_of="lead", choice_index=2),
        request("beams", 9, max_tokens=6, beam=BeamParams(width=3)),
        request("adapted", 30, max_tokens=12, ref=adapter("a")),
        request("scored", 11, max_tokens=4, prompt_logprobs=2, logprobs=1),
        request("penal", 6, max_tokens=8, frequency_penalty=0.5),
        request("one", 3, max_tokens=1),
        request("none", 5, max_tokens=0),
    ]


@pytest.mark.parametrize("num_pages", [64, 40])
def test_all_kinds_of_requests_get_the_same_and_forks_share_as_much(num_pages: int) -> None:
    found = []
    for overlaps in (False, True):
        simulator = Simulator(num_pages=num_pages, overlaps=overlaps, max_running=8)
        simulator.submit(*mixed())
        simulator.run()
        found.append({key: told(outputs) for key, outputs in simulator.outputs.items()})
        assert (
            simulator.pool.counts()["kv"]
            == simulator.pool.num_quarantined
            == simulator.swap.num_used
            == 0
        )
    assert found[0] == found[1]
    assert found[0]["fork"][2] == 12


def test_forks_share_the_blocks_of_their_leader_as_without_overlap() -> None:
    """They wait until the step is complete that wrote them; before, they would copy them."""
    for overlaps in (False, True):
        simulator = Simulator(overlaps=overlaps)
        simulator.submit(*mixed()[:3])
        simulator.run()
        assert not any(plan.copies for plan in simulator.runner.plans)


def test_the_times_of_steps_do_not_overlap(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a step would seem to take as long as two, and prompts would get less of it."""
    simulator = overlapped()
    collect = simulator.runner.collect

    def slowly(results: list[ChunkResult]) -> list[ChunkResult]:
        simulator.now_s += 0.5
        return collect(results)

    monkeypatch.setattr(simulator.runner, "collect", slowly)
    simulator.submit(request("x", max_tokens=20))
    simulator.pump()
    first_s = simulator.now_s
    simulator.run()
    seconds = [step.seconds for step in simulator.core.status().last_steps]
    assert len(seconds) == 20
    assert sum(seconds) == simulator.now_s - first_s
