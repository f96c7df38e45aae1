"""The figures of the start: positive, of one machine, and without a trace in the pages."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from pathlib import Path

import pytest
import torch

from manylora.engine.execution.costs import DECODE_ROWS, MAX_TOKENS, StartMeasures, slowness
from manylora.engine.fairness.service import Prices
from manylora.engine.model.decoder import StepRows
from manylora.memory.arena import HostSlab, PageCopier
from manylora.memory.eviction import PageCosts
from step_driver import StepDriver
from tiny_models import make_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), "llama")


def ticking() -> Callable[[], float]:
    """A clock that moves by one second per look."""
    return count(1.0).__next__


COSTS = PageCosts(copy_s=0.5, load_s=1.0, token_s=0.25)


def costs_of(
    driver: StepDriver, num_host_pages: int = 4, max_tokens: int = 512, **clock: Callable[[], float]
) -> PageCosts:
    """Measured with a slab of so many pages; nothing is left in any page."""
    slab = HostSlab(num_host_pages, driver.geometry.page_bytes, pinned=False)
    measures = StartMeasures(
        driver.decoder, driver.arena, driver.pool, max_tokens=max_tokens, **clock
    )
    costs = measures.costs(slab, PageCopier(driver.arena))
    assert driver.pool.num_free == driver.pool.capacity
    assert slab.num_free == num_host_pages
    assert not driver.arena.bytes[0].any()
    return costs


def prices_of(
    driver: StepDriver, lora_bytes_per_rank: int, prompt_context: float = 0.125
) -> Prices:
    """Measured by a clock of one second per step of 16 rows."""
    num_free = driver.pool.num_free
    measures = StartMeasures(
        driver.decoder, driver.arena, driver.pool, max_tokens=512, clock=ticking()
    )
    prices = measures.prices(
        COSTS, lora_bytes_per_rank=lora_bytes_per_rank, prompt_context=prompt_context
    )
    assert driver.pool.num_free == num_free
    assert not driver.arena.bytes[0].any()
    return prices


@pytest.mark.parametrize(
    ("token_s", "output", "said"),
    [
        (0.001, 31.0, None),  # a step of 16 rows in half a second
        (0.001, 32.0, "0.5 s for a token of each of 16 requests, 1 s for a prompt of 1,000 tokens"),
        (0.03, 1.0, None),
        (0.04, 1.0, "0.6 s for a token of each of 16 requests, 40 s for a prompt of 1,000 tokens"),
    ],
)
def test_a_model_for_which_people_would_wait_is_told_with_what_helps(
    token_s: float, output: float, said: str | None
) -> None:
    costs = PageCosts(copy_s=1.0, load_s=1.0, token_s=token_s)
    found = slowness(costs, Prices(output=output), "bf16")
    if said is None:
        assert found is None
    else:
        assert found is not None
        assert said in found
        assert "model.weights int8" in found
        assert "model.weights int4" in (slowness(costs, Prices(output=output), "int8") or "")


@pytest.mark.parametrize("num_host_pages", [0, 4])
def test_pages_are_all_given_back(model: Path, num_host_pages: int) -> None:
    costs = costs_of(StepDriver(model), num_host_pages)
    assert min(costs.copy_s, costs.load_s, costs.token_s) > 0


def test_prices_are_of_one_machine(model: Path) -> None:
    driver = StepDriver(model)
    prices = prices_of(driver, driver.geometry.page_bytes // 2)
    assert prices == Prices(output=1.0, context=0.0, prompt_context=0.125, rank=1.0, page_load=2.0)


def test_a_pool_of_a_few_pages_has_the_usual_prices(model: Path) -> None:
    driver = StepDriver(model)
    assert driver.pool.allocate(driver.pool.num_free - 1, "kv")
    assert prices_of(driver, 1, 1 / 30_000) == Prices()


def test_rows_whose_last_blocks_do_not_all_fit_have_less_context(model: Path) -> None:
    driver = StepDriver(model)
    block_and_a_half = driver.geometry.num_groups * DECODE_ROWS * 3 // 2
    assert driver.pool.allocate(driver.pool.num_free - block_and_a_half, "kv")
    assert prices_of(driver, driver.geometry.page_bytes).rank == 2.0, "measured"


def test_a_slow_machine_is_judged_by_a_short_prompt(model: Path) -> None:
    costs = costs_of(StepDriver(model), clock=ticking())
    assert costs == PageCosts(copy_s=0.25, load_s=1.0, token_s=1 / 16)


def test_what_is_set_up_for_a_length_is_no_part_of_its_cost(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU a kernel may be compiled anew for the first longer prompt, which takes seconds."""
    driver = StepDriver(model)
    forward = driver.decoder.forward
    now_s = [0.0]
    lengths: set[int] = set()

    def compute(rows: object, *rest: object) -> torch.Tensor:
        length = len(rows.tokens)  # type: ignore[attr-defined]
        now_s[0] += 0.001 * length + (0.0 if length in lengths else 5.0)
        lengths.add(length)
        return forward(rows, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(driver.decoder, "forward", compute)
    costs = costs_of(driver, clock=lambda: now_s[0])
    assert costs.token_s == pytest.approx(0.001)
    assert len(lengths) == 2


def test_a_prompt_is_as_long_as_the_model_and_the_pool_allow(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths: list[int] = []

    def measure(max_tokens: int, num_pages: int) -> int:
        driver = StepDriver(model, num_pages=num_pages)
        forward = driver.decoder.forward

        def note(rows: StepRows, *rest: object) -> torch.Tensor:
            lengths.append(rows.attention[0].num_rows)
            return forward(rows, *rest)  # type: ignore[arg-type]

        monkeypatch.setattr(driver.decoder, "forward", note)
        costs_of(driver, max_tokens=max_tokens, clock=count(step=1e-6).__next__)
        return lengths[-1]

    page_tokens = StepDriver(model).geometry.page_tokens
    assert measure(512, 400) == MAX_TOKENS
    assert measure(50, 400) == 50
    assert measure(512, 3) == min(2 * page_tokens, MAX_TOKENS)
