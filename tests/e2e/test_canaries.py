"""No cross-talk: 64 adapters that each force their own token, in a pool with room for 8, under loads, evictions,
cancellations and deletes.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from canary import VOCAB, make_canary, make_canary_base, value_direction
from manylora.adapters.blobs.local import LocalBlobs
from manylora.adapters.ref import AdapterRef
from manylora.config import (
    AdapterConfig,
    Config,
    MemoryConfig,
    ModelConfig,
    SchedulerConfig,
    ServerConfig,
)
from manylora.engine.build import EngineParts, build_engine
from manylora.engine.core import EngineCore
from manylora.engine.request import GenerationRequest
from manylora.engine.sampling_params import SamplingParams
from stored_adapters import adapter_pages, store_adapter

NUM_ADAPTERS = 64
NUM_REQUESTS = 2000
ROOM = 8
KV_PAGES = 40


def config_for(base: Path, data_dir: Path, gib: float) -> Config:
    return Config(
        model=ModelConfig(path=str(base), dtype="float32", device="cpu", threads=1),
        memory=MemoryConfig(gib=gib, host_gib=0.005, poison=True),
        adapter=AdapterConfig(max_rank=16, slots=12),
        scheduler=SchedulerConfig(max_running=12, step_tokens=48),
        server=ServerConfig(data_dir=data_dir),
    )


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> tuple[EngineParts, list[AdapterRef]]:
    folder = tmp_path_factory.mktemp("canary")
    head = make_canary_base(folder / "base")
    constant = value_direction(folder / "base")
    for token in range(1, NUM_ADAPTERS + 1):
        rank = random.Random(token).choice([1, 4, 8, 16])
        make_canary(folder / f"canary-{token}", token, rank, head, constant)

    roomy = build_engine(config_for(folder / "base", folder / "data", 0.02))
    blobs = LocalBlobs(folder / "data" / "blobs")
    refs = [
        store_adapter(blobs, folder / f"canary-{token}", roomy.ready.base, max_rank=16)
        for token in range(1, NUM_ADAPTERS + 1)
    ]
    base, geometry = roomy.ready.base, roomy.ready.geometry
    largest = max(
        adapter_pages(folder / f"canary-{token}", base, geometry, max_rank=16)
        for token in range(1, NUM_ADAPTERS + 1)
    )
    roomy.core.close()
    pages = 1 + ROOM * largest + KV_PAGES
    return build_engine(
        config_for(folder / "base", folder / "data", pages * geometry.page_bytes / (1 << 30))
    ), refs


@dataclass
class Crowd:
    """Clients of all canaries, who come, leave early, and have their adapters deleted under them."""

    core: EngineCore
    refs: list[AdapterRef]
    rng: random.Random
    token_of: dict[str, int] = field(default_factory=dict)
    """The one token each request may see."""
    got: dict[str, list[int]] = field(default_factory=dict)
    ended: dict[str, str] = field(default_factory=dict)

    @property
    def alive(self) -> list[str]:
        return [request_id for request_id in self.token_of if request_id not in self.ended]

    def arrive(self) -> None:
        index = (
            self.rng.randrange(NUM_ADAPTERS) if self.rng.random() < 0.7 else self.rng.randrange(6)
        )
        request_id = f"r{len(self.token_of)}"
        self.token_of[request_id] = index + 1
        self.got[request_id] = []
        params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=self.rng.randint(1, 6))
        prompt = [
            self.rng.randrange(NUM_ADAPTERS + 1, VOCAB) for _ in range(self.rng.randint(1, 40))
        ]
        self.core.submit(
            GenerationRequest(
                request_id=request_id,
                prompt_token_ids=prompt,
                params=replace(params),
                adapter=self.refs[index],
            )
        )

    def disturb(self) -> None:
        if self.rng.random() < 0.05 and self.alive:
            leaver = self.rng.choice(self.alive)
            self.core.abort(leaver)
            self.ended[leaver] = "abort"
        if self.rng.random() < 0.05:
            self.core.residency.forget(self.rng.choice(self.refs).digest)

    def listen(self) -> None:
        for output in self.core.pump():
            self.got[output.request_id] += output.token_ids
            if output.finish_reason is not None:
                assert output.error is None, output.error
                self.ended.setdefault(output.request_id, output.finish_reason)


def test_no_token_of_another_adapter_is_ever_sampled(
    engine: tuple[EngineParts, list[AdapterRef]],
) -> None:
    parts, refs = engine
    core = parts.core
    pages_at_start = core.status().pages
    crowd = Crowd(core, refs, random.Random(5))
    most_adapters = 0
    while len(crowd.ended) < NUM_REQUESTS:
        while len(crowd.token_of) < NUM_REQUESTS and len(crowd.alive) < 32:
            crowd.arrive()
        crowd.disturb()
        crowd.listen()
        most_adapters = max(
            [most_adapters, *(step.adapters for step in core.status().last_steps[-1:])]
        )

    foreign = {
        r: tokens
        for r, tokens in crowd.got.items()
        if any(token != crowd.token_of[r] for token in tokens)
    }
    assert foreign == {}
    assert sum(reason == "length" for reason in crowd.ended.values()) > 0.8 * NUM_REQUESTS
    assert core.status().evictions["adapter"] > 100
    assert most_adapters >= 3

    for ref in refs:
        core.residency.forget(ref.digest)
    for _ in range(3):
        core.pump()
    core.check()
    assert core.status().pages == pages_at_start
