from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from api_adapters import sound
from recording_server import Recorder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "my-adapter"
    made.mkdir()
    (made / "adapter_config.json").write_bytes(sound().config)
    (made / "adapter_model.safetensors").write_bytes(sound().weights)
    return made


@pytest.fixture
def recorder() -> Iterator[Recorder]:
    made = Recorder()
    thread = threading.Thread(target=made.server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    yield made
    made.server.shutdown()
    made.server.server_close()
    thread.join()
