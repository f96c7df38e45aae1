"""The figures of the start: positive, of one machine, and without a trace in the pages."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from step_driver import StepDriver
from tiny_models import make_model
from weft.engine.execution.costs import DECODE_ROWS, MAX_TOKENS, measure_costs, measure_prices
from weft.engine.fairness.prices import Prices
from weft.engine.model.decoder import StepRows
from weft.memory.arena import PageCopier
from weft.memory.eviction import PageCosts
from weft.memory.host_slab import HostSlab


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), "llama")


class Ticking:
    """A clock that moves by one second per look."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        self.now_s += 1.0
        return self.now_s


@pytest.mark.parametrize("num_host_pages", [0, 4])
def test_pages_are_all_given_back(model: Path, num_host_pages: int) -> None:
    driver = StepDriver(model)
    slab = HostSlab(num_host_pages, driver.geometry.page_bytes, pinned=False)
    costs = measure_costs(driver.decoder, driver.arena, driver.pool, slab, PageCopier(driver.arena), max_tokens=512)
    assert min(costs.copy_s, costs.load_s, costs.token_s) > 0
    assert driver.pool.num_free == driver.pool.capacity
    assert slab.num_free == num_host_pages
    assert not driver.arena.bytes[0].any()


def test_prices_are_of_one_machine_and_leave_no_trace(model: Path) -> None:
    driver = StepDriver(model)
    costs = PageCosts(copy_s=0.5, load_s=1.0, token_s=0.25)
    prices = measure_prices(
        driver.decoder,
        driver.arena,
        driver.pool,
        costs,
        lora_bytes_per_rank=driver.geometry.page_bytes // 2,
        prompt_context=0.125,
        max_tokens=512,
        clock=Ticking(),
    )
    assert prices == Prices(output=1.0, context=0.0, prompt_context=0.125, rank=1.0, page_load=2.0), (
        "each step of 16 rows took a second"
    )
    assert driver.pool.num_free == driver.pool.capacity
    assert not driver.arena.bytes[0].any()


def test_a_pool_of_a_few_pages_has_the_usual_prices(model: Path) -> None:
    driver = StepDriver(model)
    costs = PageCosts(copy_s=0.5, load_s=1.0, token_s=0.25)
    taken = driver.pool.allocate(driver.pool.num_free - 1, "kv") or []
    assert (
        measure_prices(
            driver.decoder,
            driver.arena,
            driver.pool,
            costs,
            lora_bytes_per_rank=1,
            prompt_context=1 / 30_000,
            max_tokens=512,
        )
        == Prices()
    )
    driver.pool.free(taken, 0)


def test_rows_whose_last_blocks_do_not_all_fit_have_less_context(model: Path) -> None:
    driver = StepDriver(model)
    block_and_a_half = driver.geometry.num_groups * DECODE_ROWS * 3 // 2
    taken = driver.pool.allocate(driver.pool.num_free - block_and_a_half, "kv") or []
    prices = measure_prices(
        driver.decoder,
        driver.arena,
        driver.pool,
        PageCosts(copy_s=0.5, load_s=1.0, token_s=0.25),
        lora_bytes_per_rank=driver.geometry.page_bytes,
        prompt_context=0.125,
        max_tokens=512,
        clock=Ticking(),
    )
    assert prices.rank == 2.0, "measured"
    assert driver.pool.num_free == block_and_a_half
    driver.pool.free(taken, 0)


def test_a_slow_machine_is_judged_by_a_short_prompt(model: Path) -> None:
    driver = StepDriver(model)
    slab = HostSlab(4, driver.geometry.page_bytes, pinned=False)
    copier = PageCopier(driver.arena)
    costs = measure_costs(driver.decoder, driver.arena, driver.pool, slab, copier, max_tokens=512, clock=Ticking())
    assert costs == PageCosts(copy_s=0.25, load_s=1.0, token_s=1 / 16)


def test_what_is_set_up_for_a_length_is_no_part_of_its_cost(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU a kernel may be compiled anew for the first longer prompt, which takes seconds."""
    driver = StepDriver(model)
    forward = driver.decoder.forward
    now_s = [0.0]
    lengths: set[int] = set()

    def compute(rows: object, *rest: object) -> torch.Tensor:
        count = len(rows.tokens)  # type: ignore[attr-defined]
        now_s[0] += 0.001 * count + (0.0 if count in lengths else 5.0)
        lengths.add(count)
        return forward(rows, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(driver.decoder, "forward", compute)
    slab = HostSlab(4, driver.geometry.page_bytes, pinned=False)
    copier = PageCopier(driver.arena)
    costs = measure_costs(
        driver.decoder, driver.arena, driver.pool, slab, copier, max_tokens=512, clock=lambda: now_s[0]
    )
    assert costs.token_s == pytest.approx(0.001)
    assert len(lengths) == 2


def test_a_prompt_is_as_long_as_the_model_and_the_pool_allow(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lengths: list[int] = []

    def measure(max_tokens: int, num_pages: int) -> int:
        driver = StepDriver(model, num_pages=num_pages)
        forward = driver.decoder.forward

        def note(rows: StepRows, *rest: object) -> torch.Tensor:
            lengths.append(rows.attention[0].num_rows)
            return forward(rows, *rest)  # type: ignore[arg-type]

        monkeypatch.setattr(driver.decoder, "forward", note)
        slab = HostSlab(4, driver.geometry.page_bytes, pinned=False)
        copier = PageCopier(driver.arena)
        clock = iter(range(10**6))
        measure_costs(
            driver.decoder,
            driver.arena,
            driver.pool,
            slab,
            copier,
            max_tokens=max_tokens,
            clock=lambda: next(clock) * 1e-6,
        )
        return lengths[-1]

    page_tokens = StepDriver(model).geometry.page_tokens
    assert measure(512, 400) == MAX_TOKENS
    assert measure(50, 400) == 50
    assert measure(512, 3) == min(2 * page_tokens, MAX_TOKENS)
