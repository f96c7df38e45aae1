from __future__ import annotations

from pathlib import Path

import pytest

from api_adapters import sound


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "my-adapter"
    made.mkdir()
    (made / "adapter_config.json").write_bytes(sound().config)
    (made / "adapter_model.safetensors").write_bytes(sound().weights)
    return made
