"""The contract of sampling and log-probabilities; penalties and biases."""

from collections.abc import Sequence

import pytest
import torch

import implementations
from implementations import CPU, TORCH, Implementation
from manylora.kernels.sampling import (
    NON_FINITE,
    NOTHING_LEFT,
    RowSampling,
    sampling_words,
)
from oracles import ORACLES, probabilities

IMPLEMENTATIONS = [impl for impl in implementations.IMPLEMENTATIONS if impl.build is None]
"""C++ has none of its own."""
Parameters = tuple[float, int, float, float]
"""temperature, top_k, top_p, min_p"""
GREEDY: Parameters = (0.0, 0, 1.0, 0.0)
FILTERS: list[Parameters] = [
    (1.0, 0, 1.0, 0.0),
    (0.7, 0, 1.0, 0.0),
    (1.0, 1, 1.0, 0.0),
    (1.0, 5, 1.0, 0.0),
    (1.3, 200, 1.0, 0.0),
    (1.0, 0, 0.9, 0.0),
    (0.5, 0, 0.5, 0.0),
    (5.0, 0, 0.95, 0.0),
    (1.5, 0, 1.0, 0.1),
    (1.0, 0, 1.0, 1.0),
    (1.0, 50, 0.8, 0.0),
    (0.8, 40, 0.9, 0.05),
    (1.0, 100_000, 0.99, 0.01),
]
EACH_BRANCH = [FILTERS[index] for index in (0, 2, 3, 5, 8, 9, 10, 11, 12)]
"""For the interpreter, which takes a tenth of a second for the bound of a row: no, one, two and three filters."""
VOCABULARIES = [7, 640, 5000, 32_000]


def logits_of(vocab_size: int, rows: int = 1, seed: int = 0, spread: float = 3.0) -> torch.Tensor:
    return torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * spread


def columns_of(
    rows: Sequence[tuple[Parameters, float]], device: torch.device = CPU
) -> torch.Tensor:
    """From (parameters, uniform) of each row."""
    words = sampling_words([RowSampling(*parameters, uniform) for parameters, uniform in rows])
    return torch.from_numpy(words).to(device)


def draws(
    logits: torch.Tensor,
    parameters: Parameters,
    uniforms: Sequence[float],
    impl: Implementation = TORCH,
) -> torch.Tensor:
    columns = columns_of([(parameters, uniform) for uniform in uniforms], impl.device)
    return impl.kernels.sample(logits.expand(len(uniforms), -1).to(impl.device), columns).cpu()


@pytest.mark.parametrize("vocab_size", VOCABULARIES)
@pytest.mark.parametrize("parameters", FILTERS, ids=str)
def test_evenly_spaced_draws_follow_the_exact_distribution(
    vocab_size: int, parameters: Parameters, impl: Implementation
) -> None:
    uniforms = [0.0, *((i + 0.5) / 200 for i in range(200)), 0.95, 1 - 2**-24]
    if impl.is_interpreted:  # it is slow, and each draw finds the same bound
        if parameters not in {7: EACH_BRANCH[-2:], 640: EACH_BRANCH, 5000: EACH_BRANCH[-2:]}.get(
            vocab_size, ()
        ):
            return
        uniforms = [0.0, 0.5, 1 - 2**-24]
    logits = logits_of(vocab_size)
    tokens = draws(logits, parameters, uniforms, impl)
    assert_drawn_from(probabilities(logits[0], *parameters), tokens, uniforms, impl)


def assert_drawn_from(
    p: torch.Tensor, tokens: torch.Tensor, uniforms: Sequence[float], impl: Implementation
) -> None:
    """Check tokens against the exact distribution."""
    # A draw belongs to the token whose interval of the cumulative distribution holds it, up to rounding at its ends.
    ends = p.cumsum(0)[tokens]
    u = torch.tensor(uniforms, dtype=torch.float64)
    rounding = 2e-6 if impl.device == CPU else 1e-4
    assert (u < ends + rounding).all()
    assert (u > ends - p[tokens] - rounding).all()
    # On a GPU a bound may round to either side of a token at its very edge.
    assert (p[tokens] > 0).float().mean() >= (1 if impl.device == CPU else 0.98)


@pytest.mark.parametrize("vocab_size", [50_257, 128_256, 151_936])
def test_vocabularies_of_models_are_drawn_from_exactly(
    vocab_size: int, impl: Implementation
) -> None:
    if impl.is_interpreted and vocab_size % 2 == 0:
        return  # the odd one has all that these have
    logits = logits_of(vocab_size, rows=2)
    logits[1] = logits[1].round()  # equals in all places
    uniforms = [0.7] if impl.is_interpreted else [0.0, 0.3, 1 - 2**-24]
    cases = (
        [FILTERS[-2]] if impl.is_interpreted else [*FILTERS[::4], (1.0, vocab_size - 1, 0.9, 0.0)]
    )
    for parameters in cases:
        for row in range(1 if impl.is_interpreted else 2):
            tokens = draws(logits[row : row + 1], parameters, uniforms, impl)
            assert_drawn_from(probabilities(logits[row], *parameters), tokens, uniforms, impl)


EDGE_CASES: list[Parameters] = [
    (1.0, 0, 1.0, 0.0),
    (1.0, 1, 1.0, 0.0),
    (1.0, 299, 1.0, 0.0),
    (1.0, 300, 1.0, 0.0),
    (1.0, 2**31 - 1, 0.9, 0.0),
    (1.0, 0, 1e-6, 0.0),
    (1.0, 0, 0.999999, 0.0),
    (1.0, 0, 1.0, 1.0),
    (1.0, 150, 0.999999, 1e-9),
    (1e-5, 20, 0.9, 0.0),
    (1e-5, 0, 1.0, 0.5),
    (100.0, 20, 0.9, 0.1),
    (100.0, 0, 0.5, 0.0),
]


def test_extreme_parameters_and_logits_are_drawn_from_exactly(impl: Implementation) -> None:
    ordinary = logits_of(300)[0]
    masked = ordinary.where(torch.arange(300) % 3 == 1, -torch.inf)
    only_last = torch.full((300,), -torch.inf)
    only_last[299] = -2.0
    peak = torch.full((300,), -70.0)
    peak[[0, 150, 299]] = 3.0
    kinds = [
        ordinary,
        torch.full((300,), 2.5),
        ordinary.round(),
        masked,
        only_last,
        peak,
        ordinary * 1e-4,
        -40 - ordinary,
    ]
    uniforms = [0.6] if impl.is_interpreted else [0.0, 0.6, 1 - 2**-24]
    for kind, logits in enumerate(kinds):
        cases = EDGE_CASES[kind % 4 :: 4] if impl.is_interpreted else EDGE_CASES
        rows = [(parameters, uniform) for parameters in cases for uniform in uniforms]
        repeated = logits.expand(len(rows), -1).to(impl.device)
        tokens = (
            impl.kernels.sample(repeated, columns_of(rows, impl.device)).cpu().view(len(cases), -1)
        )
        for parameters, drawn in zip(cases, tokens, strict=True):
            assert_drawn_from(probabilities(logits, *parameters), drawn, uniforms, impl)


@pytest.mark.parametrize("uniform", [0.0, 1 - 2**-24, 1.0])
@pytest.mark.parametrize("parameters", FILTERS, ids=str)
def test_draws_at_the_ends_yield_kept_tokens(uniform: float, parameters: Parameters) -> None:
    logits = logits_of(1000)
    token = draws(logits, parameters, [uniform])
    p = probabilities(logits[0], *parameters)
    kept = (p > 0).nonzero()[:, 0]
    assert p[token] > 0
    expected = kept[0] if uniform == 0 else kept[-1]
    assert p[min(token, expected) : max(token, expected) + 1].sum() < 1e-5 + p[token] + p[expected]


@pytest.mark.parametrize("vocab_size", [1, 5, 127, 128, 640, 1000, 5001, 32_000])
def test_greedy_takes_the_first_of_equals_beside_rows_that_draw(
    vocab_size: int, impl: Implementation
) -> None:
    if impl.is_interpreted and vocab_size not in (1, 127, 5001):
        return
    logits = torch.randint(
        -3, 3, (20, vocab_size), generator=torch.Generator().manual_seed(0)
    ).float()
    logits[4, :-1] = -torch.inf
    draws_too = [index == 7 for index in range(20)]
    rows = [((1.0, 0, 1.0, 0.0) if drawn else GREEDY, 0.5) for drawn in draws_too]
    tokens = impl.kernels.sample(logits.to(impl.device), columns_of(rows, impl.device)).cpu()
    greedy = ~torch.tensor(draws_too)
    assert torch.equal(tokens[greedy], logits.argmax(-1)[greedy].int())
    assert tokens.dtype == torch.int32


@pytest.mark.parametrize("parameters", [GREEDY, FILTERS[0], FILTERS[-2]], ids=str)
@pytest.mark.parametrize("vocab_size", [1, 640, 5001])
def test_a_row_that_is_no_distribution_gets_a_code_beside_rows_that_are(
    vocab_size: int, parameters: Parameters, impl: Implementation
) -> None:
    if impl.is_interpreted and vocab_size == 640:
        return  # less than the others have
    logits = logits_of(vocab_size).repeat(13, 1)
    for row, place in enumerate((0, vocab_size // 2, vocab_size - 1)):
        logits[row, place] = torch.nan
        logits[3 + row, place] = torch.inf
        logits[6 + row, place] = 1e30
    logits[9] = -torch.inf
    logits[9, -1] = torch.nan
    logits[10] = -torch.inf
    logits[11] = -1e30
    out = torch.full((13,), -7, dtype=torch.int32, device=impl.device)
    tokens = impl.kernels.sample(
        logits.to(impl.device), columns_of([(parameters, 0.4)] * 13, impl.device), out
    )
    assert tokens is out
    assert tokens.tolist() == [NON_FINITE] * 10 + [
        NOTHING_LEFT,
        NON_FINITE,
        *draws(logits[12:], parameters, [0.4], impl),
    ]


def test_a_row_does_not_depend_on_the_batch(impl: Implementation) -> None:
    filters = [*EACH_BRANCH[2:5], EACH_BRANCH[7]] if impl.is_interpreted else FILTERS
    logits = logits_of(5000, rows=len(filters) + 1).to(impl.device)
    rows = [(parameters, 0.37) for parameters in filters] + [(GREEDY, 0.0)]
    together = impl.kernels.sample(logits, columns_of(rows, impl.device))
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0)).tolist()
    shuffled = impl.kernels.sample(logits[order], columns_of([rows[i] for i in order], impl.device))
    assert torch.equal(shuffled, together[order])
    for index, row in enumerate(rows):
        alone = impl.kernels.sample(logits[index : index + 1], columns_of([row], impl.device))
        assert alone == together[index]


def test_no_pass_leaves_anything_for_the_next(impl: Implementation) -> None:
    """Counters of the Triton kernels are zero between calls, whatever the rows need."""
    if impl.name != "triton":
        return
    from manylora.kernels.triton import sampling

    rows = [(parameters, 0.5) for parameters in (GREEDY, *FILTERS[-5:])]
    logits = logits_of(5000, rows=len(rows)).to(impl.device)
    logits[2], logits[3, 4500] = -torch.inf, torch.nan
    before = sampling._counters(logits.device, sampling.LEAST_ROWS)
    first = impl.kernels.sample(logits, columns_of(rows, impl.device))
    assert not before.any()
    assert torch.equal(impl.kernels.sample(logits, columns_of(rows, impl.device)), first)
    assert sampling._counters(logits.device, sampling.LEAST_ROWS) is before


def test_equals_at_the_bound_are_kept_together(impl: Implementation) -> None:
    logits = torch.tensor([[2.0, 1.0, 1.0, 1.0, 0.0]])
    assert draws(logits, (1.0, 2, 1.0, 0.0), [0.0, 0.4, 0.5, 0.75, 0.9], impl).tolist() == [
        0,
        0,
        1,
        2,
        3,
    ]
    assert probabilities(logits[0], 1.0, 2, 1.0, 0.0)[4] == 0


def test_equals_in_other_blocks_are_kept_together() -> None:
    logits = torch.zeros(1, 4000)
    logits[0, ::100] = 5.0
    tokens = draws(logits, (1.0, 3, 1.0, 0.0), [(i + 0.5) / 40 for i in range(40)])
    assert tokens.tolist() == list(range(0, 4000, 100))


def test_a_flat_distribution_reaches_top_p_too() -> None:
    logits = logits_of(32_000, spread=0.1)
    p = probabilities(logits[0], 1.0, 0, 0.9, 0.0)
    assert int((p > 0).sum()) > 20_000
    tokens = draws(logits, (1.0, 0, 0.9, 0.0), [(i + 0.5) / 100 for i in range(100)])
    assert (p[tokens] > 0).all()


@pytest.mark.parametrize("vocab_size", [7, 640, 1000])
def test_logprobs_equal_the_oracle(vocab_size: int, impl: Implementation) -> None:
    logits = logits_of(vocab_size, rows=5)
    if impl is TORCH:
        logits[1] = logits[1].round()  # equals, whose order is by id
    tokens = torch.tensor([0, 1, 2, 3, int(logits[4].argmax())])
    for num_top in (0, 1, 5):
        actual = impl.kernels.logprobs(logits.to(impl.device), tokens.to(impl.device), num_top)
        for found, expected in zip(actual, ORACLES.logprobs(logits, tokens, num_top), strict=True):
            torch.testing.assert_close(found.cpu(), expected, rtol=1e-5, atol=1e-5)
    assert actual[1][4] == 1


def test_a_row_that_is_no_distribution_has_no_logprobs(impl: Implementation) -> None:
    logits = logits_of(300, rows=5)
    for row, spoilt in enumerate((torch.nan, torch.inf, 1e30)):
        logits[row, 7] = spoilt
    logits[3] = -torch.inf
    tokens = torch.tensor([0, 1, 2, 3, 4], device=impl.device)
    chosen, _, top_ids, top = impl.kernels.logprobs(logits.to(impl.device), tokens, 2)
    assert chosen[:4].isnan().all()
    assert top[:4].isnan().all()
    assert ((top_ids >= 0) & (top_ids < 300)).all()
    torch.testing.assert_close(chosen[4].cpu(), logits[4].log_softmax(0)[4])


def test_misfits_are_refused(impl: Implementation) -> None:
    logits, columns = logits_of(7).to(impl.device), columns_of([(FILTERS[0], 0.5)], impl.device)
    with pytest.raises(ValueError, match=r"columns: expected shape \[5, 1\], got \[5, 2\]"):
        impl.kernels.sample(logits, columns_of([(FILTERS[0], 0.5)] * 2, impl.device))
    with pytest.raises(ValueError, match="columns: expected contiguous elements"):
        impl.kernels.sample(logits, columns.repeat(1, 2)[:, ::2])
    with pytest.raises(
        ValueError, match=r"logits: expected dtype torch\.float32, got torch\.float16"
    ):
        impl.kernels.sample(logits.half(), columns)
    with pytest.raises(ValueError, match=r"out: expected dtype torch\.int32, got torch\.int64"):
        impl.kernels.sample(logits, columns, torch.empty(1, dtype=torch.int64, device=impl.device))
    with pytest.raises(ValueError, match=r"logits: expected a vocabulary"):
        impl.kernels.sample(logits[:, :0], columns)
