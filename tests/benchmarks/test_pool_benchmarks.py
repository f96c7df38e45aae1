"""The pool's benchmarks, small and quick: that they put the load on that they say, not how fast it went."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from manylora.adapters.blobs.local import LocalBlobs
from manylora.adapters.checkpoint.reader import check_weights
from manylora.benchmarks.pool import unified
from manylora.benchmarks.pool.pool_run import PoolEngine, pool_engine
from manylora.benchmarks.pool.pool_shape import (
    ATTENTION,
    GROUPED,
    RANKS,
    PoolModel,
    PoolShape,
    make_pool_shape,
)
from manylora.benchmarks.workloads import TimedRequest
from manylora.errors import ManyloraError

NUM_FILES = 8


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def quick(
    cache: Path, measure: Callable[..., dict[str, Any]]
) -> Callable[[str, str], dict[str, Any]]:
    """Run a benchmark of the pool once."""
    return lambda name, options: measure(
        name, f"--repeats 1 --files {NUM_FILES} {options}", "--cache", str(cache)
    )


@pytest.fixture(scope="module")
def shape(cache: Path) -> PoolShape:
    return make_pool_shape(cache, NUM_FILES)


@pytest.fixture
def make_engine(shape: PoolShape) -> Iterator[Callable[[int, int], PoolEngine]]:
    with contextlib.ExitStack() as stack:

        def make(room: int, count: int) -> PoolEngine:
            memory = shape.memory(room * shape.mean_pages + 16, 400)
            engine = stack.enter_context(pool_engine(shape, count, memory, max_running=2))
            stack.callback(engine.core.check)
            return engine

        yield make


def test_every_adapter_is_a_version_of_its_own_that_the_base_accepts(shape: PoolShape) -> None:
    adapters = shape.adapters(3 * NUM_FILES)
    assert len({adapter.digest for adapter in adapters}) == len(adapters)
    assert len({adapter.weights_sha256 for adapter in adapters}) == NUM_FILES
    blobs = LocalBlobs(shape.blobs)
    for index, adapter in enumerate(adapters[: len(RANKS)]):
        content = blobs.path(adapter.weights_sha256).read_bytes()
        checkpoint = check_weights(adapter.config, content, len(content), shape.kind.sizes.base())
        assert set(checkpoint.ranks.values()) == {RANKS[index]}
        assert checkpoint.applied == checkpoint.total


def test_a_closed_loop_records_every_token_and_load(
    make_engine: Callable[[int, int], PoolEngine],
) -> None:
    load = [TimedRequest(0.0, index % 8, 3, 4) for index in range(16)]
    run = make_engine(3, 8).run(load, in_flight=4)
    assert [len(record.token_times_s) for record in run.records] == [4] * 16
    assert all(record.due_s <= record.token_times_s[0] <= record.done_s for record in run.records)
    assert sum(step.requests for step in run.steps) >= 16 * 4
    assert run.counts["loads"]["stored>device:ok"] == 8
    assert run.counts["evictions"]["adapter"] >= 8 - 3
    assert run.output_tokens_per_s > 0
    assert run.facts()["share_of_time_in_steps"] <= 1


def test_a_second_run_counts_only_its_own_steps_and_loads(
    make_engine: Callable[[int, int], PoolEngine],
) -> None:
    engine = make_engine(8, 2)
    load = [TimedRequest(0.0, index % 2, 3, 4) for index in range(4)]
    first, second = (engine.run(load, in_flight=2) for _ in range(2))
    assert sum(first.counts["loads"].values()) == 2
    assert sum(second.counts["loads"].values()) == 0
    assert {step.step for step in first.steps}.isdisjoint(step.step for step in second.steps)


def test_an_open_loop_submits_no_earlier_than_due(
    make_engine: Callable[[int, int], PoolEngine],
) -> None:
    load = [TimedRequest(0.5 * index, 0, 3, 2) for index in range(3)]
    run = make_engine(2, 1).run(load, scale=0.2)
    dues = [record.due_s - run.start_s for record in run.records]
    assert dues == pytest.approx([0.0, 0.1, 0.2])
    assert all(record.token_times_s[0] > record.due_s for record in run.records)


def test_a_request_that_fails_is_an_error_and_not_a_sample(
    shape: PoolShape, tmp_path: Path
) -> None:
    elsewhere = PoolShape(shape.model, tmp_path, shape.weights, shape.kind)
    with (
        pool_engine(elsewhere, 1, elsewhere.memory(100, 100), max_running=2) as engine,
        pytest.raises(ManyloraError, match="failed: The adapter's weights"),
    ):
        engine.run([TimedRequest(0.0, 0, 3, 2)], in_flight=1)


def test_adapter_count(quick: Callable[[str, str], dict[str, Any]]) -> None:
    options = "--counts 2 16 --requests 12 --lengths 4 24 --room 4 --max-running 4 --in-flight 8"
    result = quick("adapters", options)
    assert [row["adapters"] for row in result["table"]] == [2, 16]
    assert set(result["output_tokens_per_s"]) == {"2", "16"}
    assert set(result["ratios"]) == {"16 / 2"}
    facts = result["facts"]
    assert facts["2"]["adapters_per_step"] <= 2
    assert facts["16"]["evictions per request, adapter"] > 0


def test_cliff(quick: Callable[[str, str], dict[str, Any]]) -> None:
    options = (
        "--actives 2 8 --room 4 --requests 12 --input-tokens 8 --output-tokens 8 --max-running 4"
    )
    result = quick("cliff", options)
    assert set(result["adapters"]) == {"2", "8"}
    found = result["adapters"]["8"]
    assert any(name.startswith("loads") for name in found["facts"]["small"])
    assert "evictions per request, adapter" not in found["facts"]["whole"]
    assert found["ratio"]["median"] > 0
    assert result["copy_ms"] > 0


@pytest.mark.parametrize(("model", "tokens"), [(ATTENTION, 120), (GROUPED, 480)])
def test_adapters_and_tokens_take_pages_in_the_proportions_of_real_models(
    model: PoolModel, tokens: int, cache: Path
) -> None:
    shape = make_pool_shape(cache, NUM_FILES, model)
    assert shape.mean_pages * shape.geometry.page_tokens == tokens


def test_the_halves_of_a_split_pool_never_help_each_other_out(shape: PoolShape) -> None:
    memory = shape.memory(152, 400, prefix_cache=False)
    with pool_engine(shape, 4, memory, 4, build=unified.build_split_engine) as engine:
        load = [TimedRequest(0.0, index % 4, 20, 12) for index in range(8)]
        run = engine.run(load, in_flight=4)
        engine.core.check()
        # 64 + 32 + 16 + 8 pages of adapters do not fit 76, although nearly all of the other half is free.
        assert max(step.adapters for step in run.steps) < 4
        pages = engine.core.status().pages
        assert sum(pages.values()) == 76
        assert pages["adapter"] == 0


def test_unified(
    quick: Callable[[str, str], dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unified, "LOADS", (unified.Load("short", ATTENTION, (4, 48)),))
    result = quick("unified", "--requests 16 --adapters 8 --batch 8 --in-flight 10 --max-running 8")
    ((_, found),) = result["loads"].items()
    assert set(found["output_tokens_per_s"]) == {"unified", "split"}
    assert found["ratio"]["median"] > 0
    assert found["pages"] % 2 == 0
