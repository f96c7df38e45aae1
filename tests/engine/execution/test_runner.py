"""The runner carries out a plan exactly as it says, and refuses one that is out of date."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from manylora.engine.execution.runner import LaunchedStep, ModelRunner
from manylora.engine.sampling_params import SamplingParams
from manylora.engine.scheduling.plan import PageCopy, PageMove, StepPlan
from manylora.errors import EngineError, PageAccountingError, StaleSlotError
from step_driver import StepDriver
from tiny_models import ALL_LINEAR, make_adapter, make_model, prompt


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), "llama", num_hidden_layers=2)


@pytest.fixture(scope="module")
def adapter(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_adapter(model, tmp_path_factory.mktemp("adapter"), targets=ALL_LINEAR)


def test_results_come_in_the_order_of_the_plan(model: Path, adapter: Path) -> None:
    driver = StepDriver(model)
    slot = driver.load_adapter(adapter)
    prompts = [prompt(6, seed) for seed in range(4)]
    slots = [slot, None, slot, None]
    apart = [
        driver.run([driver.request(*each)])[0].token_id for each in zip(prompts, slots, strict=True)
    ]
    requests = [driver.request(*each) for each in zip(prompts, slots, strict=True)]
    results = driver.run(requests)
    assert [result.request_id for result in results] == [request.request_id for request in requests]
    assert [result.token_id for result in results] == apart


def test_a_chunk_that_does_not_end_its_prompt_samples_nothing(model: Path) -> None:
    driver = StepDriver(model)
    request = driver.request(prompt(12))
    assert driver.run([request], 7)[0].token_id is None
    assert driver.run([request])[0].token_id is not None


def test_logprobs_of_prompt_and_output_are_those_of_the_logits(model: Path) -> None:
    driver = StepDriver(model)
    tokens = prompt(150, seed=4)
    expected = driver.logits_alone(tokens).log_softmax(-1)
    request = driver.request(
        tokens, params=SamplingParams(temperature=0.0, logprobs=2, max_tokens=99)
    )
    chunk = driver.chunk(request, prompt_logprobs=3)
    (result,) = driver.execute(driver.plan([chunk], request.new_pages))
    assert len(result.prompt_logprobs) == 149
    assert [entry.token_id for entry in result.prompt_logprobs] == tokens[1:]
    found = torch.tensor([entry.logprob for entry in result.prompt_logprobs])
    torch.testing.assert_close(found, expected[torch.arange(149), tokens[1:]], rtol=1e-4, atol=1e-4)
    assert result.prompt_logprobs[70].top_ids == expected[70].topk(3).indices.tolist()
    assert result.token_id == int(expected[-1].argmax())
    assert result.logprobs is not None
    assert result.logprobs.logprob == pytest.approx(float(expected[-1].max()), abs=1e-4)


def test_a_slot_that_was_reused_is_refused_before_anything_is_computed(
    model: Path, adapter: Path
) -> None:
    driver = StepDriver(model)
    old = driver.load_adapter(adapter)
    request = driver.request(prompt(5), old)
    chunk = driver.chunk(request)
    before = driver.arena.bytes.clone()
    driver.slots[0] = type(old)(slot=0, generation=2, digest="another")
    with pytest.raises(StaleSlotError):
        driver.execute(driver.plan([chunk], request.new_pages))
    assert torch.equal(driver.arena.bytes, before)


def test_the_zero_page_stays_zero(model: Path) -> None:
    driver = StepDriver(model)
    driver.generate([driver.request(prompt(1)), driver.request(prompt(20))], 3)
    driver.generate([driver.request(prompt(1))], 3)
    assert not driver.arena.bytes[0].any()


def test_an_adapter_that_overflows_ends_its_own_chunk_only(model: Path, tmp_path: Path) -> None:
    driver = StepDriver(model)
    wild = driver.load_adapter(make_adapter(model, tmp_path, targets=ALL_LINEAR))
    tokens = prompt(6)
    alone = driver.run([driver.request(tokens, params=SamplingParams())])[0].token_id
    driver.tables.host_scalings[wild.slot] = 1e30
    requests = [driver.request(tokens, each, params=SamplingParams()) for each in (wild, None)]
    spoilt, sound = driver.run(requests)
    assert (spoilt.is_non_finite, spoilt.token_id) == (True, None)
    assert (sound.is_non_finite, sound.token_id) == (False, alone)


def test_prompt_scores_that_overflow_are_told(model: Path, tmp_path: Path) -> None:
    driver = StepDriver(model)
    wild = driver.load_adapter(make_adapter(model, tmp_path, targets=ALL_LINEAR))
    driver.tables.host_scalings[wild.slot] = 1e30
    request = driver.request(prompt(6), wild)
    chunk = driver.chunk(request, 4, prompt_logprobs=2)
    (result,) = driver.execute(driver.plan([chunk], request.new_pages))
    assert result.is_non_finite


def moves(pages: Sequence[int], host_pages: Sequence[int]) -> list[PageMove]:
    return [
        PageMove(device_page=page, host_page=host)
        for page, host in zip(pages, host_pages, strict=True)
    ]


def test_tokens_do_not_depend_on_pages_that_were_swapped_out_and_in_to_others(model: Path) -> None:
    driver = StepDriver(model)
    expected = driver.generate([driver.request(prompt(20))], 6)[0]
    request = driver.request(prompt(20))
    first = driver.generate([request], 3)[0]
    old = request.table.by_block()
    host_pages = range(len(old))
    driver.execute(StepPlan(step=98, chunks=[], swap_out=moves(old, host_pages)))
    driver.arena.poison(old)
    new = driver.pool.allocate(len(old), "kv")
    assert new is not None
    request.table.pages[0][:] = new
    chunk = driver.chunk(request)
    (result,) = driver.execute(StepPlan(step=99, chunks=[chunk], swap_in=moves(new, host_pages)))
    assert result.token_id is not None
    request.token_ids.append(result.token_id)
    driver.generate([request], 2)
    assert first == expected[:3]
    assert request.token_ids[20:] == expected


def test_a_copied_page_goes_on_by_itself(model: Path) -> None:
    driver = StepDriver(model)
    leader = driver.request(prompt(20))
    expected = driver.generate([leader], 6)[0]
    fork = driver.request(prompt(20))
    fork.table.append([leader.table.pages[0][0]])
    copied = driver.pool.allocate(1, "kv")
    assert copied is not None
    fork.table.append(copied)
    fork.num_computed = 19
    chunk = driver.chunk(fork)
    copies = [PageCopy(source=leader.table.pages[0][1], target=copied[0])]
    before = driver.arena.bytes[leader.table.pages[0]].clone()
    (result,) = driver.execute(StepPlan(step=99, chunks=[chunk], copies=copies))
    assert result.token_id is not None
    fork.token_ids.append(result.token_id)
    driver.generate([fork], 5)
    assert fork.token_ids[20:] == expected
    assert torch.equal(driver.arena.bytes[leader.table.pages[0]], before)


def test_pages_move_in_the_order_of_the_plan(model: Path) -> None:
    """One page is read by the swap before it is zeroed, another is zeroed before it is swapped in and copied."""
    driver = StepDriver(model)
    driver.arena.bytes[1].fill_(1)
    driver.slab.pages[3].fill_(3)
    plan = StepPlan(
        step=1,
        chunks=[],
        swap_out=moves([1], [0]),
        zero_pages=[1, 2],
        swap_in=moves([2], [3]),
        copies=[PageCopy(source=2, target=4)],
    )
    assert driver.execute(plan) == []
    assert [
        int(driver.slab.pages[0][0]),
        *(int(driver.arena.bytes[page][-1]) for page in (1, 2, 4)),
    ] == [1, 0, 3, 3]


@pytest.mark.parametrize("is_broken", [False, True])
def test_a_step_ends_after_its_copies_to_the_host_even_when_it_fails(
    model: Path, is_broken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the host pages of a step that failed would be written by a loader while a device still copies to them."""
    driver = StepDriver(model)
    events: list[str] = []
    copies = Mock(synchronize=lambda: events.append("waited"))

    def forward(*_: object) -> torch.Tensor:
        events.append("computed")
        return torch.zeros(2, driver.spec.hidden_size) if not is_broken else torch.zeros(1 // 0)

    monkeypatch.setattr(ModelRunner, "move_pages", lambda *_: copies)
    monkeypatch.setattr(driver.decoder, "forward", forward)
    with pytest.raises(ZeroDivisionError) if is_broken else nullcontext():
        driver.run([driver.request(prompt(2))])
    assert events == ["computed", "waited"]


@pytest.mark.parametrize(
    "wrong",
    [
        {"zero_pages": [0]},
        {"zero_pages": [400]},
        {"swap_in": moves([0], [0])},
        {"swap_in": moves([1], [8])},
        {"swap_out": moves([1], [-1])},
        {"copies": [PageCopy(source=400, target=1)]},
        {"copies": [PageCopy(source=1, target=0)]},
    ],
)
def test_pages_that_do_not_exist_are_refused_before_any_is_moved(
    model: Path, wrong: dict[str, list[Any]]
) -> None:
    driver = StepDriver(model)
    before = driver.arena.bytes.clone()
    fields: dict[str, Any] = {"swap_out": moves([2], [2]), "zero_pages": [3], **wrong}
    with pytest.raises(PageAccountingError):
        driver.execute(StepPlan(step=1, chunks=[], **fields))
    assert torch.equal(driver.arena.bytes, before)


def test_a_token_of_the_step_before_is_taken_before_anybody_reads_it(
    model: Path, adapter: Path
) -> None:
    """Two requests at depth 1, in other places in each step, say what they say when each token is read first."""
    driver = StepDriver(model)
    slot = driver.load_adapter(adapter)
    wanted = driver.generate([driver.request(prompt(6)), driver.request(prompt(9, 1), slot)], 4)
    requests = [driver.request(prompt(6)), driver.request(prompt(9, 1), slot)]
    before: tuple[list[int], LaunchedStep] | None = None
    found: list[list[int | None]] = [[], []]
    for step in range(4):
        order = [0, 1] if step % 2 == 0 else [1, 0]
        plan = driver.plan_of([requests[index] for index in order])
        for place, chunk in enumerate(plan.chunks if step else ()):
            chunk.token_ids, chunk.token_source = [0], 1 - place
        launched = driver.runner.launch(plan)
        if before is not None:
            for index, result in zip(before[0], driver.runner.collect(before[1]), strict=True):
                found[index].append(result.token_id)
        for request in requests:
            request.token_ids.append(0)  # the token is on the device alone
        before = order, launched
    assert before is not None
    for index, result in zip(before[0], driver.runner.collect(before[1]), strict=True):
        found[index].append(result.token_id)
    assert found == wanted


def test_a_token_of_no_chunk_is_refused(model: Path) -> None:
    driver = StepDriver(model)
    driver.run([driver.request(prompt(3))])
    request = driver.request(prompt(1))
    chunk = replace(driver.chunk(request), token_ids=[0], token_source=1)
    with pytest.raises(EngineError, match="takes the token of chunk 1 of a step with 1 chunks"):
        driver.runner.launch(driver.plan([chunk], request.new_pages))
