"""A step without adapters costs what it costs where there are none."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch.profiler import ProfilerActivity, profile

from drive_core import run_all
from manylora.adapters.blobs.local import LocalBlobs
from manylora.adapters.ref import AdapterRef
from manylora.config import Config, MemoryConfig, ModelConfig, ServerConfig
from manylora.engine import build
from manylora.engine.build import EngineParts, build_engine
from manylora.engine.core import EngineCore
from manylora.engine.request import GenerationRequest
from manylora.engine.sampling_params import SamplingParams
from manylora.memory.arena import Arena
from stored_adapters import store_adapter
from tiny_models import ALL_LINEAR, make_adapter, make_model

PARAMS = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)


class NoLora:
    """What a build without LoRA has in its place."""

    def __init__(self, arena: Arena, *_: object) -> None:
        self.arena = arena

    def prepare(self, *_: object) -> None:
        raise AssertionError("a step without adapters asks for LoRA")


def request(name: str, adapter: AdapterRef | None = None) -> GenerationRequest:
    return GenerationRequest(
        request_id=name, prompt_token_ids=[5, 6, 7, 8, 9], params=PARAMS, adapter=adapter
    )


def operators(core: EngineCore) -> list[str]:
    """Every operator of a base request's steps, in order: its prompt, then its tokens."""
    core.submit(request("base"))
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        while core.has_work():
            core.pump()
    events = sorted(profiler.events(), key=lambda event: event.time_range.start)
    return [event.name for event in events if "::" in event.name]


def test_base_requests_run_the_same_operators_with_adapters_resident_and_in_a_build_without_lora(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model(tmp_path / "model", "qwen2")
    folder = make_adapter(model, tmp_path / "adapter", targets=ALL_LINEAR)
    config = Config(
        model=ModelConfig(path=str(model), dtype="float32", threads=1),
        memory=MemoryConfig(gib=0.02, host_gib=0.01, prefix_cache=False),
        server=ServerConfig(data_dir=tmp_path),
    )

    def run(parts: EngineParts, ref: AdapterRef | None) -> tuple[list[str], list[str]]:
        try:
            before = operators(parts.core)
            if ref is not None:
                run_all(parts.core, [request("adapted", ref)])
                assert [resident.tier for resident in parts.core.status().residents] == ["device"]
            return before, operators(parts.core)
        finally:
            parts.core.close()

    with_lora = build_engine(config)
    fresh, resident = run(
        with_lora, store_adapter(LocalBlobs(config.blob_dir), folder, with_lora.ready.base)
    )
    monkeypatch.setattr(build, "PagedLora", NoLora)
    without_lora = build_engine(config)
    _, bare = run(without_lora, None)
    assert resident == fresh == bare
    assert sum("linear" in name or "mm" in name for name in bare) > PARAMS.max_tokens * 4, (
        "the steps were profiled"
    )
