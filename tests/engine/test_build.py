"""An engine built from settings alone answers as transformers and PEFT do."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from drive_core import run_all
from manylora.adapters.blobs.local import LocalBlobs
from manylora.adapters.ref import AdapterRef
from manylora.adapters.residency.load_threads import LoadPace
from manylora.config import Config, MemoryConfig, ModelConfig, SchedulerConfig, ServerConfig
from manylora.engine import build
from manylora.engine.build import EngineParts, build_engine
from manylora.engine.execution import costs
from manylora.engine.execution.memory_plan import format_plan
from manylora.engine.execution.step_programs import StepPrograms
from manylora.engine.model.checkpoint.weights import base_digest
from manylora.engine.model.device import has_idle_core
from manylora.engine.request import GenerationRequest
from manylora.engine.sampling_params import SamplingParams
from manylora.errors import ConfigError, ContextLengthError
from stored_adapters import store_adapter
from tiny_models import ALL_LINEAR, make_adapter, make_model

NUM_TOKENS = 12


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), "qwen2")


def settings(model: Path, data_dir: Path, **model_fields: object) -> Config:
    return Config(
        model=ModelConfig(path=str(model), threads=1, **{"dtype": "float32", **model_fields}),  # type: ignore[arg-type]
        memory=MemoryConfig(gib=0.02, host_gib=0.01, poison=True),
        scheduler=SchedulerConfig(max_running=4, step_tokens=16),
        server=ServerConfig(data_dir=data_dir),
    )


@pytest.fixture
def engine(model: Path, tmp_path: Path) -> Iterator[EngineParts]:
    parts = build_engine(settings(model, tmp_path))
    yield parts
    parts.core.close()


def prompt(length: int, seed: int) -> list[int]:
    return torch.randint(0, 250, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def request(
    request_id: str, tokens: list[int], adapter: AdapterRef | None = None
) -> GenerationRequest:
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    return GenerationRequest(
        request_id=request_id, prompt_token_ids=tokens, params=params, adapter=adapter
    )


def test_a_slow_model_is_told(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(costs, "SLOW_STEP_S", 0.0)
    build_engine(settings(model, tmp_path)).core.close()
    (told,) = [each for each in caplog.records if each.levelname == "WARNING"]
    assert told.getMessage().startswith("this model is slow on this CPU: 0.0 s for a token of each")


def test_ready_says_what_was_built(model: Path, engine: EngineParts) -> None:
    ready = engine.ready

    assert ready.base.digest == base_digest(model)
    assert (ready.device, ready.dtype, ready.vocab_size) == ("cpu", "float32", 320)
    assert ready.max_model_len == 512
    assert engine.core.status().pages["free"] == ready.memory.num_pages
    assert engine.tokenizer_path == model
    assert "512 tokens a request" in format_plan(ready.memory, ready)
    assert ready.number_format == "float32"


def test_a_device_without_memory_for_the_largest_step_is_told_what_to_lower(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def prepare(_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.28 GiB")

    monkeypatch.setattr(build, "runs_beside_host", lambda _: True)
    monkeypatch.setattr(StepPrograms, "prepare", prepare)
    monkeypatch.setattr(build, "cuda_graphs", lambda: None)
    with pytest.raises(
        ConfigError, match=r"memory\.gib: .* no memory for a step of 16 tokens .*2\.28 GiB.* less"
    ):
        build_engine(settings(model, tmp_path))


def test_the_asked_length_is_a_limit(model: Path, tmp_path: Path) -> None:
    parts = build_engine(settings(model, tmp_path, max_model_len=16))
    try:
        assert parts.ready.max_model_len == 16
        with pytest.raises(ContextLengthError):
            parts.core.submit(request("long", prompt(5, seed=0)))
    finally:
        parts.core.close()


def test_a_longer_limit_than_the_model_has_is_refused(model: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="512 positions"):
        build_engine(settings(model, tmp_path, max_model_len=513))


def test_loads_and_copies_pause_beside_steps_and_not_without_them(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stepping: list[bool] = []
    pauses: Counter[str] = Counter()

    class WatchedPace(LoadPace):
        def __init__(self, share: float) -> None:
            assert share == (1.0 if has_idle_core() else config.adapter.load_share)
            super().__init__(share)

        def set_stepping(self, running: int, held_up: int = 0) -> None:
            stepping.append(running > 0)
            super().set_stepping(running, held_up)

        def pause(self) -> None:
            pauses[threading.current_thread().name.rsplit("_", 1)[0]] += 1
            super().pause()

    monkeypatch.setattr("manylora.engine.build.LoadPace", WatchedPace)
    monkeypatch.setattr(
        "manylora.memory.arena.BYTES_AT_ONCE", 0
    )  # else nothing is left for the copier
    config = settings(model, tmp_path)
    parts = build_engine(config)
    try:
        pauses.clear()  # of the measurements at the start
        folder = make_adapter(model, tmp_path / "adapter", rank=8, targets=ALL_LINEAR)
        ref = store_adapter(LocalBlobs(config.blob_dir), folder, parts.ready.base)
        parts.core.pump()
        assert stepping == [False]
        run_all(parts.core, [request("one", prompt(4, 1), ref)])
        assert stepping.pop() is True
        parts.core.pump()
        assert stepping.pop() is False
        # Each page and what is read at a time is a piece of a load, and each page one of a copy.
        pages = parts.core.residency.pages_needed(ref)
        assert pages is not None
        assert pauses["adapter-loader"] > pages
        assert pauses["adapter-copier"] == pages
    finally:
        parts.core.close()
