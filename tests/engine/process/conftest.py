"""One engine process for the tests of its client and of its restarts."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from engine_client import ADAPTERS, DEMO, Engine
from manylora.adapters.blobs.local import LocalBlobs
from manylora.adapters.checkpoint.reader import read_checkpoint
from manylora.adapters.ref import AdapterRef
from manylora.benchmarks.engine.stored import adapter_ref, store_blob
from manylora.config import Config, MemoryConfig, ModelConfig, RegistryConfig, SchedulerConfig
from manylora.engine.text.tokenizer import Tokenizer


@pytest.fixture(scope="package")
def config(tmp_path_factory: pytest.TempPathFactory) -> Config:
    return Config(
        model=ModelConfig(
            path=str(DEMO / "manylora-demo"), device="cpu", dtype="float32", threads=1
        ),
        memory=MemoryConfig(gib=0.05, host_gib=0.05),
        scheduler=SchedulerConfig(max_running=8, step_tokens=64),
        registry=RegistryConfig(blob_url=str(tmp_path_factory.mktemp("blobs"))),
    )


@pytest.fixture(scope="package")
def tokenizer() -> Tokenizer:
    return Tokenizer(DEMO / "manylora-demo")


@pytest.fixture(scope="package")
def prompt(tokenizer: Tokenizer) -> list[int]:
    return tokenizer.chat_prompt([{"role": "user", "content": "Where are you?"}])


@pytest.fixture(scope="package")
def refs(config: Config) -> dict[str, AdapterRef]:
    blobs = LocalBlobs(config.blob_dir)
    found = {}
    for name in ADAPTERS:
        source = DEMO / "adapters" / name
        weights = source / "adapter_model.safetensors"
        spec = read_checkpoint(
            (source / "adapter_config.json").read_bytes(), weights, None, 64
        ).spec
        found[name] = adapter_ref(name, spec, store_blob(blobs, weights.read_bytes()))
    return found


@pytest.fixture(scope="module")
def engine(config: Config) -> Iterator[Engine]:
    engine = Engine(config)
    yield engine
    engine.close()
