"""Beam search inside the scheduler: shared pages, preemption, pressure, and every way to end."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Literal

import pytest

from manylora.adapters.ref import AdapterRef
from manylora.engine.request import INTERNAL, NON_FINITE, FlowKey, GenerationRequest
from manylora.engine.sampling_params import BeamParams
from manylora.engine.scheduling.plan import ChunkResult, StepPlan
from manylora.errors import ContextLengthError, InvalidRequestError, NeverFitsError
from simulation.driven import (
    PAGE_TOKENS,
    RECOMPUTES,
    SWAPS,
    VOCAB_SIZE,
    Simulator,
    adapter,
    expected_tokens,
    likely_tokens,
    request,
)

pytestmark = pytest.mark.no_cover

Sequences = list[tuple[list[int], float]]


def beam_request(
    request_id: str,
    prompt: int | list[int] = 10,
    max_tokens: int = 8,
    width: int = 3,
    ref: AdapterRef | None = None,
    *,
    length_penalty: float = 1.0,
    early_stopping: bool | Literal["never"] = False,
    **fields: object,
) -> GenerationRequest:
    beam = BeamParams(width=width, length_penalty=length_penalty, early_stopping=early_stopping)
    return request(request_id, prompt, max_tokens, ref, beam=beam, logprobs=0, **fields)


def expected(asked: GenerationRequest, stops: frozenset[int]) -> Sequences:
    """Result of a search without pages, written down as the rule says it."""
    beam, max_tokens = asked.beam, asked.params.max_tokens
    assert beam is not None
    digest = asked.adapter.digest if asked.adapter is not None else None
    num_top = beam.width + len(stops)
    running: Sequences = [([], 0.0)]
    finished: Sequences = []
    for length in range(1, max_tokens + 1):
        candidates = [
            ([*tokens, token], total + logprob)
            for tokens, total in running
            for token, logprob in zip(
                *likely_tokens(digest, asked.prompt_token_ids + tokens, num_top), strict=True
            )
        ]
        candidates.sort(key=lambda candidate: -candidate[1])
        for tokens, total in candidates[: beam.width]:
            if tokens[-1] in stops or length == max_tokens:
                finished.append((tokens, total / length**beam.length_penalty))
        finished = sorted(finished, key=lambda each: -each[1])[: beam.width]
        running = [candidate for candidate in candidates if candidate[0][-1] not in stops][
            : beam.width
        ]
        if len(finished) == beam.width:
            best_length = (
                max_tokens if beam.early_stopping == "never" and beam.length_penalty > 0 else length
            )
            best = running[0][1] / best_length**beam.length_penalty
            if beam.early_stopping is True or beam.width == 1 or best <= finished[-1][1]:
                break
    return finished


def check_search(
    simulator: Simulator, asked: GenerationRequest, stops: frozenset[int] = frozenset()
) -> None:
    (output,) = simulator.outputs[asked.request_id]
    assert output.error is None, output.error
    assert output.hypotheses is not None
    wanted = expected(asked, stops)
    assert [each.token_ids for each in output.hypotheses] == [tokens for tokens, _ in wanted]
    assert asked.beam is not None
    for each, (tokens, score) in zip(output.hypotheses, wanted, strict=True):
        total = sum(entry.logprob for entry in each.logprobs or ())
        assert total / len(tokens) ** asked.beam.length_penalty == pytest.approx(score)


def is_empty(simulator: Simulator) -> bool:
    """True if nothing is held any more, except for what an empty engine caches."""
    counts = simulator.pool.counts()
    used = simulator.num_leases + simulator.num_holds + simulator.swap.num_used
    return not (counts["kv"] or counts["quarantine"] or used or simulator.core.has_work())


@pytest.mark.parametrize("has_prefixes", [True, False])
@pytest.mark.parametrize("num_groups", [1, 2])
@pytest.mark.parametrize("prompt", [1, 3, 4, 5, 8, 40])
def test_hypotheses_are_those_of_a_search_without_pages(
    prompt: int, num_groups: int, has_prefixes: bool
) -> None:
    simulator = Simulator(
        num_pages=256, num_groups=num_groups, has_prefixes=has_prefixes, step_tokens=16
    )
    asked = [beam_request(f"w{width}", prompt, 10, width) for width in (1, 2, 4)]
    asked += [beam_request("adapter", prompt, 10, 3, adapter("a")), request("plain", prompt, 10)]
    simulator.submit(*asked)
    simulator.run()
    for each in asked[:-1]:
        check_search(simulator, each)
    assert simulator.tokens("plain") == expected_tokens(asked[-1], 10)
    simulator.pump()
    assert is_empty(simulator)
    assert simulator.num_preemptions == 0


@pytest.mark.parametrize("early_stopping", [False, True, "never"])
@pytest.mark.parametrize("length_penalty", [-1.0, 0.0, 1.0, 2.0])
def test_sequences_that_end_early_follow_the_rule(
    length_penalty: float, early_stopping: bool | Literal["never"]
) -> None:
    stops = frozenset(range(0, VOCAB_SIZE, 4))
    lengths = set()
    for seed in range(6):
        simulator = Simulator(num_pages=256, eos=stops, step_tokens=16)
        asked = beam_request(
            f"seed{seed}", 5, 16, 3, length_penalty=length_penalty, early_stopping=early_stopping
        )
        simulator.submit(asked)
        simulator.run()
        check_search(simulator, asked, stops)
        (output,) = simulator.outputs[asked.request_id]
        for each in output.hypotheses or ():
            assert (
                (each.stop_token_id is not None)
                == (each.token_ids[-1] in stops)
                == (each.finish_reason == "stop")
            )
            lengths.add(len(each.token_ids))
    assert len(lengths) > 1


def test_beams_share_all_but_their_last_page() -> None:
    """A long prompt is there once, and each beam has pages for what it alone wrote."""
    width, prompt_blocks = 4, 25
    simulator = Simulator(num_pages=256, step_tokens=64)
    simulator.submit(beam_request("search", prompt_blocks * PAGE_TOKENS + 2, 6, width))
    most = 0
    while simulator.core.has_work():
        simulator.pump()
        counts = simulator.pool.counts()
        most = max(most, counts["kv"] + counts["prefix"])
    # Two tokens of the prompt and five of the output fill at most two blocks.
    assert most <= prompt_blocks + 2 * width + 1
    copied = [len(plan.copies) for plan in simulator.runner.plans]
    assert max(copied) <= width - 1
    assert sum(copied) > 0


def test_a_search_takes_a_step_in_every_step_of_the_engine() -> None:
    """Forks start in the step after the one that chose them, beside the beams that go on."""
    simulator = Simulator(num_pages=256, step_tokens=64)
    simulator.submit(beam_request("search", 20, 12, 4))
    simulator.run()
    assert [len(plan.chunks) for plan in simulator.runner.plans] == [1] + [4] * 11
    computed = sum(len(chunk.token_ids) for plan in simulator.runner.plans for chunk in plan.chunks)
    assert computed == 20 + 4 * 11  # nothing was computed twice


def test_without_a_prefix_cache_forks_copy_all_pages() -> None:
    simulator = Simulator(num_pages=256, step_tokens=64, has_prefixes=False)
    simulator.submit(beam_request("search", 22, 12, 4))
    simulator.run()
    check_search(simulator, beam_request("search", 22, 12, 4))
    computed = sum(len(chunk.token_ids) for plan in simulator.runner.plans for chunk in plan.chunks)
    assert computed == 22 + 4 * 11
    assert max(len(plan.copies) for plan in simulator.runner.plans) >= 3 * 6
    assert (
        simulator.pool.counts()["free"] + simulator.pool.counts()["quarantine"]
        == simulator.pool.capacity
    )


@pytest.mark.parametrize(
    ("asked", "error"),
    [
        (beam_request("x", width=9), InvalidRequestError),  # more than may run
        (beam_request("x", prompt_logprobs=1), InvalidRequestError),
        (beam_request("x", max_tokens=0), InvalidRequestError),
        (beam_request("x", generated_token_ids=[1]), InvalidRequestError),
        (beam_request("x", 500, 20), ContextLengthError),
        (beam_request("x", 40, 100, width=4), NeverFitsError),
    ],
)
def test_what_cannot_be_searched_is_refused_on_arrival(
    asked: GenerationRequest, error: type[Exception]
) -> None:
    simulator = Simulator(num_pages=64)
    with pytest.raises(error):
        simulator.submit(asked)
    assert not simulator.core.has_work()
    simulator.submit(beam_request("x"))  # the id is free
    simulator.run()
    check_search(simulator, beam_request("x"))


def test_a_prompt_that_beams_share_counts_once_in_what_fits() -> None:
    asked = beam_request("x", 100, 9, width=4)  # 25 blocks, and 3 more for each: 24 + 4 * 3 pages
    simulator = Simulator(num_pages=36)
    simulator.submit(asked)
    simulator.run()
    check_search(simulator, asked)
    for tight in (Simulator(num_pages=35), Simulator(num_pages=36, has_prefixes=False)):
        with pytest.raises(NeverFitsError, match="in 4 beams"):
            tight.core.submit(asked)


def test_an_id_in_use_is_refused_while_any_beam_lives() -> None:
    simulator = Simulator()
    simulator.submit(beam_request("x2"))
    while "x2" in simulator.scheduler.table.requests:  # until the first beam is given up for others
        simulator.pump()
    assert simulator.core.has_work()
    with pytest.raises(InvalidRequestError):
        simulator.submit(request("x2"))


def test_scores_that_are_no_numbers_end_the_whole_search(monkeypatch: pytest.MonkeyPatch) -> None:
    simulator = Simulator()
    carry_out: Callable[[StepPlan], list[ChunkResult]] = simulator.runner.carry_out

    def unsound(plan: StepPlan) -> list[ChunkResult]:
        results = carry_out(plan)
        if plan.step == 4:
            results[1] = ChunkResult(request_id=results[1].request_id, is_non_finite=True)
        return results

    monkeypatch.setattr(simulator.runner, "carry_out", unsound)
    simulator.submit(beam_request("search"))
    simulator.run()
    (output,) = simulator.outputs["search"]
    assert (output.finish_reason, output.error) == ("error", NON_FINITE)
    simulator.pump()
    assert is_empty(simulator)


@pytest.mark.parametrize("costs", [RECOMPUTES, SWAPS], ids=["recompute", "swap"])
@pytest.mark.parametrize("has_prefixes", [True, False])
def test_beams_that_are_preempted_find_the_same(costs: object, has_prefixes: bool) -> None:
    """An older request grows until it has all pages but its own and those of one search."""
    simulator = Simulator(num_pages=40, step_tokens=32, costs=costs, has_prefixes=has_prefixes)  # type: ignore[arg-type]
    old = request("old", 10, 120)
    asked = [beam_request("one", 12, 12, 3), beam_request("two", 9, 14, 4, length_penalty=0.5)]
    simulator.submit(old)
    simulator.pump(90)
    simulator.submit(*asked)
    simulator.run()
    assert simulator.tokens("old") == expected_tokens(old, 120)
    for each in asked:
        check_search(simulator, each)
    assert simulator.num_preemptions > 0
    simulator.pump()
    assert is_empty(simulator)


def test_searches_that_fill_the_pool_together_all_end() -> None:
    """Each holds pages that the others wait for."""
    for num_pages in (14, 16, 20, 26):
        simulator = Simulator(num_pages=num_pages, max_running=6, step_tokens=12, policy="fair")
        asked = [
            beam_request(f"s{index}", 9, 12, 3, flow=FlowKey(tenant=f"t{index % 2}"))
            for index in range(5)
        ]
        simulator.submit(*asked)
        simulator.run()
        for each in asked:
            check_search(simulator, each)


@pytest.mark.parametrize("seed", range(60))
def test_anything_beside_anything_under_pressure(seed: int) -> None:
    """Searches, choices and plain requests with adapters, aborts and steps that fail; pages are checked all along."""
    rng = random.Random(seed)
    stops = frozenset(range(0, VOCAB_SIZE, rng.choice([20, 100])))
    simulator = Simulator(
        num_pages=rng.choice([30, 40, 80]),
        num_groups=rng.choice([1, 1, 2]),
        max_running=rng.choice([4, 6, 12]),
        step_tokens=rng.choice([12, 16, 48]),
        policy=rng.choice(["fcfs", "fair"]),
        has_prefixes=rng.random() < 0.8,
        host_pages=rng.choice([0, 8, 40]),
        costs=rng.choice([RECOMPUTES, SWAPS]),
        eos=stops,
    )
    refs = [None, adapter("a"), adapter("b")]
    common = [rng.randrange(VOCAB_SIZE) for _ in range(30)]
    aborts: dict[int, str] = {}
    asked: list[GenerationRequest] = []
    arrivals: dict[int, list[GenerationRequest]] = {}
    for index in range(14):
        prompt = common[: rng.randrange(1, 20)] + [index] * rng.choice([0, 1, 6])
        flow = FlowKey(tenant=rng.choice("tu"), lane=rng.choice([0, 0, 1]))
        ref, name, length = rng.choice(refs), f"r{index}", rng.randint(1, 14)
        if rng.random() < 0.6:
            stoppings: list[bool | Literal["never"]] = [False, True, "never"]
            penalty, stopping = rng.choice([0.0, 1.0, 2.0]), rng.choice(stoppings)
            width = rng.randint(1, 4)
            each = beam_request(
                name,
                prompt,
                length,
                width,
                ref,
                flow=flow,
                length_penalty=penalty,
                early_stopping=stopping,
            )
        else:
            each = request(name, prompt, length, ref, flow=flow)
        arrivals.setdefault(rng.randrange(30), []).append(each)
        if rng.random() < 0.2:
            aborts[rng.randrange(60)] = name
    simulator.runner.fail_on = {rng.randrange(80)} if rng.random() < 0.3 else set()
    for pump in range(60):
        for each in arrivals.get(pump, ()):
            try:
                simulator.submit(each)
            except NeverFitsError:
                continue
            asked.append(each)
        if pump in aborts:
            simulator.core.abort(aborts[pump])
        simulator.pump()
    simulator.run()
    check_ends(simulator, asked, aborts.values(), stops)
    simulator.pump()
    assert is_empty(simulator)
    simulator.submit(*asked)  # the ids are free


def check_ends(
    simulator: Simulator, asked: Sequence[GenerationRequest], aborted: object, stops: frozenset[int]
) -> None:
    for each in asked:
        last = simulator.last(each.request_id)
        assert each.beam is None or len(simulator.outputs[each.request_id]) == 1
        if last.finish_reason == "abort":
            assert each.request_id in aborted  # type: ignore[operator]
        elif last.finish_reason == "error":
            assert last.error == INTERNAL
            assert simulator.runner.fail_on
        elif each.beam is not None:
            check_search(simulator, each, stops)
        else:
            tokens = expected_tokens(each, each.params.max_tokens)
            ends = [index for index, token in enumerate(tokens) if token in stops]
            assert simulator.tokens(each.request_id) == tokens[: ends[0] + 1 if ends else None]
