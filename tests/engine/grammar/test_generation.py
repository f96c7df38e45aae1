"""Outputs that are held to a grammar, by a tiny random model and by the demo's."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from manylora import LLM
from manylora.engine.request import FlowKey, GenerationRequest, Grammar, RequestOutput
from manylora.engine.sampling_params import BeamParams, SamplingParams
from manylora.errors import InvalidRequestError, RequestError

DEMO = Path(__file__).resolve().parents[3] / "manylora" / "demo" / "manylora-demo"
NUMBER = "start: /[1-9][0-9]{2,5}/"
CHOICE = 'start: "yes" | "no"'
FREE = SamplingParams(max_tokens=12, temperature=1.2, seed=5)
PROMPT = [1, 40, 41, 42]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(DEMO, device="cpu", dtype="float32", memory_gib=0.05, host_gib=0.05, threads=1) as llm:
        yield llm


def drained(llm: LLM, *requests: GenerationRequest) -> dict[str, list[RequestOutput]]:
    outputs: dict[str, list[RequestOutput]] = {request.request_id: [] for request in requests}
    core = llm.engine.core
    for request in requests:
        core.submit(request)
    while not all(found and found[-1].finish_reason for found in outputs.values()):
        for output in core.pump():
            outputs[output.request_id].append(output)
    core.check()
    return outputs


def request_for(name: str, lark: str, **fields: object) -> GenerationRequest:
    given = {"prompt_token_ids": PROMPT, "params": FREE, "flow": FlowKey(tenant=name), **fields}
    return GenerationRequest(request_id=name, grammar=Grammar.of(lark), **given)  # type: ignore[arg-type]


def test_every_answer_is_one_of_the_grammar(llm: LLM) -> None:
    params = [SamplingParams(max_tokens=12, temperature=2.0, seed=seed) for seed in range(20)]
    for completion in llm.generate([PROMPT] * 20, params, grammar=NUMBER):
        assert re.fullmatch("[1-9][0-9]{2,5}", completion.text)
        assert completion.finish_reason == "stop"


def test_an_answer_is_the_same_alone_and_among_others_with_and_without_grammars(llm: LLM) -> None:
    params = [SamplingParams(max_tokens=12, temperature=1.5, seed=seed) for seed in range(6)]
    grammars = [None, NUMBER, CHOICE, None, NUMBER, None]
    together = llm.generate([PROMPT] * 6, params, grammar=grammars)
    for index in range(6):
        assert llm.generate([PROMPT], params[index], grammar=grammars[index]) == [together[index]]
    free = llm.generate([PROMPT] * 6, params)
    assert [index for index in range(6) if free[index] == together[index]] == [0, 3, 5]


def test_log_probabilities_are_those_without_the_grammar(llm: LLM) -> None:
    params = SamplingParams(max_tokens=1, temperature=0.0, logprobs=20)
    (free,) = llm.generate([PROMPT], params)
    (held,) = llm.generate([PROMPT], params, grammar=CHOICE)
    assert free.logprobs is not None
    assert held.logprobs is not None
    assert free.token_ids != held.token_ids
    assert held.logprobs[0].top_ids == free.logprobs[0].top_ids
    assert held.logprobs[0].top_logprobs == free.logprobs[0].top_logprobs


def test_an_answer_that_is_cut_ends_with_length_and_one_that_just_fits_with_stop(llm: LLM) -> None:
    outcomes = {
        count: llm.generate(
            [PROMPT], SamplingParams(max_tokens=count, temperature=0), grammar='start: "abcd"'
        )[0]
        for count in (1, 12)
    }
    assert (outcomes[1].finish_reason, outcomes[12].finish_reason) == ("length", "stop")
    exact = len(outcomes[12].token_ids)
    (just,) = llm.generate(
        [PROMPT], SamplingParams(max_tokens=exact, temperature=0), grammar='start: "abcd"'
    )
    assert (just.finish_reason, just.text) == ("stop", "abcd")


@pytest.mark.parametrize(
    "fields",
    [
        {"min_tokens": 12},
        {"stop_token_ids": (72, 73)},
        {"ignore_eos": True},
        {"repetition_penalty": 5.0, "frequency_penalty": 2.0},
        {"top_k": 1},
        {"top_p": 0.01},
        {"min_p": 1.0},
        {"logit_bias": {5: 100.0, 6: 100.0}},
    ],
)
def test_other_parameters_of_sampling_do_not_break_the_grammar(
    llm: LLM, fields: dict[str, object]
) -> None:
    params = SamplingParams(max_tokens=12, temperature=1.5, seed=3, **fields)  # type: ignore[arg-type]
    (completion,) = llm.generate([PROMPT], params, grammar='start: "yes, of " /[ab]/ " sort"')
    assert completion.finish_reason in ("stop", "length")
    assert re.fullmatch("yes, of [ab] sort", completion.text)


def test_a_stop_string_still_ends_an_answer(llm: LLM) -> None:
    (completion,) = llm.generate(
        [PROMPT],
        SamplingParams(max_tokens=12, temperature=0, stop=("of",)),
        grammar='start: "yes, of a sort"',
    )
    assert (completion.text, completion.finish_reason, completion.stop_reason) == (
        "yes, ",
        "stop",
        "of",
    )


def test_a_request_whose_grammar_leaves_no_token_ends_with_an_error_and_its_neighbours_go_on(
    llm: LLM,
) -> None:
    forbids = SamplingParams(max_tokens=5, temperature=0, allowed_token_ids=(40,))
    outputs = drained(
        llm,
        request_for("dead", CHOICE, params=forbids),
        request_for("fine", CHOICE),
        request_for("wrong", "start: nothing"),
    )
    codes = {name: found[-1].error and found[-1].error.code for name, found in outputs.items()}
    assert codes == {"dead": "grammar_dead_end", "fine": None, "wrong": "grammar_too_complex"}


def test_a_request_whose_grammar_takes_too_long_to_follow_ends_with_an_error(llm: LLM) -> None:
    params = SamplingParams(max_tokens=400, min_tokens=400, temperature=1.0, seed=1)
    (*_, last) = drained(
        llm, request_for("slow", "start: a\na: /[a-z]/ | a a | a a a", params=params)
    )["slow"]
    assert last.error is not None
    assert last.error.code == "grammar_too_complex"


def test_what_was_generated_elsewhere_counts(llm: LLM) -> None:
    token_ids = llm.tokenizer.encode("yes, of a sort", add_special_tokens=False)
    lark = 'start: "yes, of a sort"'
    outputs = drained(
        llm,
        request_for("goes on", lark, generated_token_ids=token_ids[:2]),
        request_for("complete", lark, generated_token_ids=token_ids),
        request_for(
            "other", lark, generated_token_ids=llm.tokenizer.encode("no", add_special_tokens=False)
        ),
    )
    rest = [token_id for output in outputs["goes on"] for token_id in output.token_ids]
    assert llm.tokenizer.decode(token_ids[:2] + rest) == "yes, of a sort"
    assert outputs["complete"][-1].finish_reason == "stop"
    assert outputs["other"][-1].error is not None
    assert outputs["other"][-1].error.code == "grammar_mismatch"


def test_choices_that_share_a_prompt_have_matchers_of_their_own(llm: LLM) -> None:
    first = request_for("first", NUMBER)
    forks = [
        request_for(f"fork-{index}", NUMBER, flow=first.flow, choice_index=index, fork_of="first")
        for index in range(1, 4)
    ]
    texts = {
        name: llm.tokenizer.decode([token_id for output in found for token_id in output.token_ids])
        for name, found in drained(llm, first, *forks).items()
    }
    assert all(re.fullmatch("[1-9][0-9]{2,5}", text) for text in texts.values())
    assert len(set(texts.values())) > 1


def test_beam_search_is_refused(llm: LLM) -> None:
    with pytest.raises(InvalidRequestError, match="beam search"):
        llm.engine.core.submit(request_for("beams", CHOICE, beam=BeamParams(width=2)))


def test_an_aborted_request_leaves_nothing_behind(llm: LLM) -> None:
    core = llm.engine.core
    core.submit(request_for("gone", "start: /[a-z]+ever/"))
    assert core.status().waiting_reasons == {"GRAMMAR": 1}
    core.abort("gone")
    assert [output.finish_reason for output in core.pump()] == ["abort"]
    assert not core.has_work()
    core.check()


def test_the_wait_for_a_grammar_holds_nobody_up(llm: LLM) -> None:
    core = llm.engine.core
    core.submit(request_for("held", "start: /(a|b|c){40}/"))
    core.submit(GenerationRequest(request_id="free", prompt_token_ids=PROMPT, params=FREE))
    first = next(iter(outputs)) if (outputs := core.pump()) else None
    assert first is not None
    assert first.request_id == "free"
    core.abort("held")
    core.abort("free")
    core.pump()


def test_json_is_json(llm: LLM) -> None:
    lark = 'start: %json {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}'
    params = SamplingParams(max_tokens=60, temperature=0.0)
    (completion,) = llm.generate([PROMPT], params, grammar=lark)
    if completion.finish_reason == "stop":
        assert json.loads(completion.text)["a"] in (True, False)


def test_the_error_of_a_grammar_reaches_the_caller(llm: LLM) -> None:
    with pytest.raises(RequestError, match="grammar"):
        llm.generate([PROMPT], FREE, grammar="start: nothing")


@pytest.mark.slow
def test_a_preempted_answer_keeps_its_place_in_the_grammar(llm: LLM) -> None:
    params = [SamplingParams(max_tokens=400, temperature=1.5, seed=seed) for seed in range(12)]
    lark = "start: /([a-z]{3} ){120}/"
    small = {"device": "cpu", "dtype": "float32", "host_gib": 0.001, "threads": 1}
    with LLM(DEMO, memory_gib=0.0035, **small) as crowded:
        together = crowded.generate([PROMPT] * 12, params, grammar=lark)
        assert sum(crowded.engine.core.status().preemptions.values()) > 0
    before = llm.engine.core.status().preemptions
    assert together == llm.generate([PROMPT] * 12, params, grammar=lark)
    assert llm.engine.core.status().preemptions == before
    assert together[:2] == [llm.generate([PROMPT], own, grammar=lark)[0] for own in params[:2]]
    assert all(re.fullmatch("([a-z]{3} ){120}", completion.text) for completion in together)
