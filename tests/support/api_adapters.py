"""Uploads for the server's tests: small sound adapters of the demo model."""

from __future__ import annotations

import httpx

from bad_upload import Upload
from fake_engine import demo_ready
from lora_files import config_bytes, mlx_config_bytes, mlx_tensors, q_and_v, weights_bytes


def sound(alpha: int = 16, rank: int = 8) -> Upload:
    """An adapter that the demo model can serve; another alpha is another digest, another rank also another blob."""
    base = demo_ready().base
    return Upload(config_bytes(r=rank, lora_alpha=alpha), weights_bytes(q_and_v(base, rank=rank)))


def sound_mlx(**fields: object) -> Upload:
    """The same as mlx-lm writes it, of rank 6."""
    return Upload(mlx_config_bytes(**fields), weights_bytes(mlx_tensors(demo_ready().base)))


async def upload(
    client: httpx.AsyncClient, name: str, files: Upload | None = None, **fields: str
) -> httpx.Response:
    """POST /v1/adapters as clients do."""
    made = files or sound()
    return await client.post(
        "/v1/adapters",
        data={"name": name, **fields},
        files={
            "config": ("adapter_config.json", made.config),
            "weights": ("adapter_model.safetensors", made.weights),
        },
    )
