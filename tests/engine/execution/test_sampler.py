"""Tokens are chosen as asked, and draws depend on the request alone."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.generation.logits_process import (
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
)

from manylora.engine.execution.sampler import GREEDY, PhiloxDraws, RowMasks, Sampler
from manylora.engine.sampling_params import SamplingParams
from manylora.engine.scheduling.plan import SampleSpec
from manylora.kernels.dispatch import kernels_for, torch_kernels
from manylora.kernels.sampling import NON_FINITE, NOTHING_LEFT, RowSampling, sampling_rows

VOCAB = 300
SAMPLER = Sampler(kernels_for(torch.device("cpu"), torch.float32))


def spec(seed: int = 7, choice: int = 0, output: int = 0, **params: Any) -> SampleSpec:
    history = {
        key: params.pop(key) for key in ("prompt_token_ids", "output_token_ids") if key in params
    }
    return SampleSpec(
        params=SamplingParams(**params),
        seed=seed,
        choice_index=choice,
        output_index=output,
        **history,
    )


def logits(rows: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed))


def sample(scores: torch.Tensor, *specs: SampleSpec) -> list[int]:
    return [token for token, _ in SAMPLER.sample(scores.clone(), specs)]


def test_a_draw_is_the_philox_number_of_seed_choice_and_output_index_whatever_was_drawn_before() -> (
    None
):
    draws = PhiloxDraws()
    for seed in (0, 1, -3):
        for choice in (0, 2):
            for output in (5, 0, 1, 31, 32, 1000):
                key = np.array([seed % 2**64, choice], dtype=np.uint64)
                raw = int(np.random.Philox(key=key, counter=output).random_raw())
                assert draws.uniform(seed, choice, output) == (raw >> 40) / 2**24


def test_a_sampled_token_does_not_depend_on_its_neighbours() -> None:
    scores = logits(4)
    specs = [spec(seed=seed, output=seed, temperature=1.5) for seed in range(3)] + [
        spec(temperature=0.0)
    ]
    together = sample(scores, *specs)
    apart = [sample(scores[row : row + 1], each)[0] for row, each in enumerate(specs)]
    assert together == apart


def test_seeds_choices_and_places_draw_different_tokens() -> None:
    scores = torch.zeros(1, VOCAB)
    tokens = {
        sample(scores, spec(seed=seed, choice=choice, output=output))[0]
        for seed in (1, 2)
        for choice in (0, 1)
        for output in (0, 1)
    }
    assert len(tokens) > 5


def test_penalties_and_biases_change_only_their_row() -> None:
    scores = torch.zeros(4, VOCAB)
    scores[:, 5] = 1.0
    scores[:, 6] = 0.9
    plain = spec(temperature=0.0)
    penalised = spec(temperature=0.0, presence_penalty=0.5, output_token_ids=[5])
    repeated = spec(temperature=0.0, repetition_penalty=1.5, prompt_token_ids=[5])
    biased = spec(temperature=0.0, logit_bias={9: 50.0})
    assert sample(scores, plain, penalised, repeated, biased) == [5, 6, 6, 9]


def test_penalties_are_those_of_openai_and_transformers() -> None:
    scores = torch.tensor(
        [
            [2.0, -2.0, 1.0, 0.5, 3.0],
            [1.0] * 5,
            [2.0, -2.0, 1.0, 0.5, 3.0],
            [4.0, -4.0, 4.0, 1.0, 1.0],
        ]
    )
    specs = [
        spec(prompt_token_ids=[0, 3, 3], output_token_ids=[1, 1, 2], repetition_penalty=2.0),
        spec(),
        spec(
            prompt_token_ids=[0],
            output_token_ids=[1, 1, 4],
            frequency_penalty=0.5,
            presence_penalty=0.25,
        ),
        spec(
            prompt_token_ids=[0, 1],
            output_token_ids=[1, 2],
            repetition_penalty=2.0,
            presence_penalty=1.0,
        ),
    ]
    SAMPLER.edit(scores, specs)
    expected = [
        [1.0, -4.0, 0.5, 0.25, 3.0],
        [1.0] * 5,
        [2.0, -3.25, 1.0, 0.5, 2.25],
        [2.0, -9.0, 1.0, 1.0, 1.0],
    ]
    assert torch.allclose(scores, torch.tensor(expected))


def test_biases_are_added_after_penalties_and_unknown_tokens_ignored() -> None:
    scores = torch.tensor([[4.0, 1.0], [1.0, 1.0]])
    biased = spec(
        output_token_ids=[0], repetition_penalty=2.0, logit_bias={0: 3.0, 2: 100.0, 3: 5.0}
    )
    SAMPLER.edit(scores, [biased, spec()])
    assert scores.tolist() == [[5.0, 1.0], [1.0, 1.0]]


def test_only_allowed_tokens_stay_after_biases_and_other_rows_keep_theirs() -> None:
    scores = torch.tensor([[4.0, 1.0, 2.0], [1.0, 3.0, 1.0], [5.0, 6.0, 7.0]])
    several = spec(allowed_token_ids=(2, 0, 2), logit_bias={0: 1.5})
    SAMPLER.edit(scores, [spec(allowed_token_ids=(1,)), spec(), several])
    assert scores.tolist() == [
        [-torch.inf, 1.0, -torch.inf],
        [1.0, 3.0, 1.0],
        [6.5, -torch.inf, 7.0],
    ]


def test_logprobs_are_those_of_the_unchanged_logits() -> None:
    scores = logits(2)
    expected = scores.log_softmax(-1)
    asked = spec(temperature=0.0, logit_bias={9: 50.0}, logprobs=2)
    more = spec(temperature=0.0, logprobs=4)
    (token, found), (_, longer) = SAMPLER.sample(scores.clone(), [asked, more])
    assert token == 9
    assert found is not None
    assert longer is not None
    assert found.token_id == 9
    assert found.logprob == pytest.approx(float(expected[0, 9]), abs=1e-5)
    assert found.rank == int((expected[0] > expected[0, 9]).sum()) + 1
    assert found.top_ids == expected[0].topk(2).indices.tolist()
    assert found.top_logprobs == pytest.approx(expected[0].topk(2).values.tolist(), abs=1e-5)
    assert len(longer.top_ids) == 4
    assert longer.rank == 1


def test_what_was_not_asked_for_is_not_reported() -> None:
    (_, found), (_, without_top), (_, missing) = SAMPLER.sample(
        logits(3), [spec(logprobs=1), spec(logprobs=0), spec()]
    )
    assert found is not None
    assert without_top is not None
    assert without_top.top_ids == []
    assert missing is None


def test_more_alternatives_than_tokens_are_all_tokens() -> None:
    found = SAMPLER.logprobs(torch.randn(1, 3), [1], 20)
    assert len(found[0].top_ids) == 3


FILTERS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {},
    {"top_k": 5},
    {"top_p": 0.9},
    {"min_p": 0.1},
    {"top_k": 5, "top_p": 0.5, "min_p": 0.1},
    {"logprobs": 2},
]


@pytest.mark.parametrize("filters", FILTERS, ids=str)
@pytest.mark.parametrize("spoilt", [math.nan, math.inf, 1e35])
def test_a_row_that_is_no_distribution_has_no_token_and_leaves_the_others_alone(
    filters: dict[str, Any], spoilt: float
) -> None:
    scores = logits(3)
    alone = [SAMPLER.sample(scores[row : row + 1].clone(), [spec(**filters)])[0] for row in (0, 2)]
    scores[1, 7] = spoilt
    together = SAMPLER.sample(scores, [spec(**filters)] * 3)
    assert together[1] == (NON_FINITE, None)
    assert [token for token, _ in (together[0], together[2])] == [token for token, _ in alone]


def test_a_row_of_minus_infinity_has_no_token() -> None:
    assert SAMPLER.sample(torch.full((1, VOCAB), -math.inf), [spec()]) == [(NOTHING_LEFT, None)]


def test_a_penalty_that_overflows_is_the_end_of_its_own_row_only() -> None:
    scores = logits(2)
    overflowing = spec(repetition_penalty=1e-45, prompt_token_ids=list(range(VOCAB)))
    (spoilt, _), (token, _) = SAMPLER.sample(scores.clone(), [overflowing, spec()])
    assert spoilt == NON_FINITE
    assert [token] == sample(scores[1:], spec())


def test_a_top_k_beyond_any_integer_keeps_all() -> None:
    scores = logits(1)
    assert sample(scores, spec(top_k=10**30)) == sample(scores, spec())


EOS, STOP = 290, 41
BAD_WORDS = ((3,), (5, 6), (5, 6, 7), (6, 7), (9, 9, 9, 2), (EOS,))


def ruled_out(scores: torch.Tensor, chosen: SampleSpec) -> set[int]:
    """The tokens that are never chosen, found by asking for all of them, one after the other."""
    sampler = Sampler(kernels_for(torch.device("cpu"), torch.float32), [EOS])
    lifted = scores.repeat(VOCAB, 1)
    lifted[range(VOCAB), range(VOCAB)] = 1000.0
    return {
        token
        for token, (found, _) in enumerate(sampler.sample(lifted, [chosen] * VOCAB))
        if found != token
    }


@pytest.mark.parametrize(
    "output", [[], [5], [5, 6], [6], [5, 5, 6], [9, 9], [9, 9, 9], [1, 9, 9, 9], [7, 6]], ids=str
)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_bad_words_are_those_of_transformers(output: list[int], temperature: float) -> None:
    scores = logits(1)
    reference = NoBadWordsLogitsProcessor([list(word) for word in BAD_WORDS])(
        torch.tensor([output], dtype=torch.int64), scores
    )
    asked = spec(
        temperature=temperature, bad_words=BAD_WORDS, output_token_ids=output, output=len(output)
    )
    assert ruled_out(scores, asked) == set(torch.isinf(reference[0]).nonzero()[:, 0].tolist())


@pytest.mark.parametrize("num_output", range(5))
@pytest.mark.parametrize("ignore_eos", [True, False])
def test_until_min_tokens_nothing_ends_the_output_as_in_transformers(
    num_output: int, ignore_eos: bool
) -> None:
    scores, prompt = logits(1), [1, 2, 3]
    reference = MinNewTokensLengthLogitsProcessor(len(prompt), 3, [EOS, STOP])(
        torch.tensor([prompt + [8] * num_output]), scores
    )
    asked = spec(
        output=num_output,
        temperature=0.0,
        min_tokens=3,
        stop_token_ids=(STOP,),
        ignore_eos=ignore_eos,
    )
    assert ruled_out(scores, asked) == set(torch.isinf(reference[0]).nonzero()[:, 0].tolist())


def test_only_allowed_tokens_are_chosen_and_penalties_count_among_them() -> None:
    scores = logits(2)
    allowed = (4, 17, 250)
    asked = spec(temperature=0.0, allowed_token_ids=allowed)
    assert ruled_out(scores[:1], asked) == set(range(VOCAB)) - set(allowed)
    best = max(allowed, key=lambda token: float(scores[0, token]))
    biased = spec(temperature=0.0, allowed_token_ids=allowed, logit_bias={best: -100.0, 9: 100.0})
    assert sample(scores, asked, spec(temperature=0.0)) == [best, int(scores[1].argmax())]
    assert sample(scores[:1], biased)[0] in set(allowed) - {best}


def test_words_that_leave_no_token_are_the_end_of_their_own_row_only() -> None:
    scores = logits(2)
    nothing_left = spec(allowed_token_ids=(4,), bad_words=((4,),))
    assert sample(scores, nothing_left, spec()) == [NOTHING_LEFT, sample(scores[1:], spec())[0]]


def test_ruled_out_tokens_keep_their_logprobs() -> None:
    scores = logits(1)
    likeliest = int(scores[0].argmax())
    ((token, found),) = SAMPLER.sample(
        scores.clone(), [spec(temperature=0.0, bad_words=((likeliest,),), logprobs=1)]
    )
    assert found is not None
    assert (found.rank, found.top_ids, found.token_id) == (2, [likeliest], token)


def bits_of(*allowed: set[int]) -> torch.Tensor:
    """Masks that allow these tokens."""
    words = np.zeros((len(allowed), -(-VOCAB // 32)), dtype=np.uint32)
    for row, tokens in enumerate(allowed):
        for token in tokens:
            words[row, token // 32] |= 1 << token % 32
    return torch.from_numpy(words.view(np.int32))


@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_a_masked_row_is_dead_only_where_nothing_is_left_of_a_distribution(
    filters: dict[str, Any],
) -> None:
    scores = logits(6)
    scores[2, 5] = math.nan  # which its grammar rules out
    scores[3, 5] = 1e35
    specs = [spec(**filters)] * 5 + [spec(allowed_token_ids=(4,), bad_words=((4,),))]
    masks = RowMasks([3, 0, 1, 2], bits_of({7}, {7}, set(), {7}))
    expected = sample(scores[4:5], specs[4])[0]
    tokens = [token for token, _ in SAMPLER.sample(scores, specs, masks)]
    assert tokens == [7, NOTHING_LEFT, NON_FINITE, NON_FINITE, expected, NOTHING_LEFT]


def test_edits_come_before_masks_and_their_rows_are_told_apart() -> None:
    scores = torch.zeros(3, VOCAB)
    specs = [
        spec(temperature=0.0, logit_bias={9: 50.0, 3: 20.0}),
        spec(temperature=0.0, allowed_token_ids=(8, 3)),
    ]
    masks = RowMasks([0, 1], bits_of({3, 4}, {8}))
    SAMPLER.edit(scores, [*specs, spec()], masks)
    assert {token: float(scores[0, token]) for token in (3, 4)} == {3: 20.0, 4: 0.0}
    assert (scores[0] > -math.inf).sum() == 2
    assert (scores[1] > -math.inf).nonzero().tolist() == [[8]]
    assert not scores[2].any()


def test_columns_of_a_step_are_its_parameters_and_draws() -> None:
    drawn = spec(seed=3, output=40, temperature=0.5, top_k=10**30, top_p=0.25, min_p=0.125)
    words = torch.from_numpy(SAMPLER.columns([drawn, spec(temperature=1e-6), spec(top_k=-1)]))
    draws = PhiloxDraws()
    assert sampling_rows(words) == [
        RowSampling(0.5, 2**31 - 1, 0.25, 0.125, draws.uniform(3, 0, 40)),
        GREEDY,
        RowSampling(1.0, uniform=draws.uniform(7, 0, 0)),
    ]


class Copies(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts copies from the host. A read by the host raises on a meta tensor of itself."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        is_moved = func is torch.ops.aten._to_copy.default and args[0].device.type == "cpu"
        self.count += is_moved and torch.device(named.get("device", "cpu")).type == "meta"
        return func(*args, **named)


def test_edits_are_one_copy_and_neither_they_nor_logprobs_are_waited_for() -> None:
    """On a GPU, whose log-probabilities are shown here by those of Triton, which need no kernel of it."""
    pytest.importorskip("triton", reason="needs Triton, which is there on Linux")
    from manylora.kernels.triton.sampling import logprobs

    masked = []
    kernels = replace(
        torch_kernels(),
        logprobs=logprobs,
        mask_tokens=lambda *operands: masked.append([x.shape for x in operands]),
    )
    sampler = Sampler(kernels)
    scores = torch.empty((3, VOCAB), device="meta")
    specs = [
        spec(
            logit_bias={9: 50.0, 3: 20.0},
            repetition_penalty=1.5,
            prompt_token_ids=[5, 6],
            output_token_ids=[7],
        ),
        spec(allowed_token_ids=(8, 3), logprobs=3),
        spec(),
    ]
    with Copies() as copies:
        sampler.edit(scores, specs, RowMasks([0, 2], bits_of({3, 4}, {8})))
        assert copies.count == 1
        words = sampler.logprob_words(scores, torch.empty(3, dtype=torch.int32, device="meta"), 3)
        assert copies.count == 1
    assert masked == [[(3, VOCAB), (2,), (2, 10)]]
    assert (words.shape, words.dtype) == ((3, 8), torch.int32)
