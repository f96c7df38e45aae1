from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from api_adapters import sound, sound_mlx
from recording_server import Recorder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "my-adapter"
    made.mkdir()
    (made / "adapter_config.json").write_bytes(sound().config)
    (made / "adapter_model.safetensors").write_bytes(sound().weights)
    return made


@pytest.fixture
def mlx_folder(tmp_path: Path) -> Path:
    """A folder as mlx-lm leaves it, with a checkpoint of an earlier step."""
    folder, made = tmp_path / "mlx", sound_mlx(model="meta/Big")
    folder.mkdir()
    (folder / "adapter_config.json").write_bytes(made.config)
    (folder / "adapters.safetensors").write_bytes(made.weights)
    (folder / "0000100_adapters.safetensors").write_bytes(b"an earlier step")
    return folder


@pytest.fixture
def recorder() -> Iterator[Recorder]:
    made = Recorder()
    thread = threading.Thread(target=made.server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    yield made
    made.server.shutdown()
    made.server.server_close()
    thread.join()
