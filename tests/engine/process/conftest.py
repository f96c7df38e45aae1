"""One engine process for the tests of its client and of its restarts."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from engine_client import ADAPTERS, DEMO, Engine
from manylora.adapters.blobs.local import LocalBlobs
from manylora.adapters.ref import AdapterRef
from manylora.config import Config, MemoryConfig, ModelConfig, RegistryConfig, SchedulerConfig
from manylora.engine.text.tokenizer import Tokenizer
from stored_adapters import store_adapter


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
    return {name: store_adapter(blobs, DEMO / "adapters" / name, None) for name in ADAPTERS}


@pytest.fixture(scope="module")
def engine(config: Config) -> Iterator[Engine]:
    engine = Engine(config)
    yield engine
    engine.close()
