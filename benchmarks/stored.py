"""Adapters and requests as a server would hand them to an engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from weft.adapters.blobs import LocalBlobs
from weft.adapters.checkpoint import read_checkpoint
from weft.adapters.ref import AdapterRef, content_digest
from weft.engine.request import GenerationRequest
from weft.engine.sampling_params import SamplingParams
from weft.engine.status import EngineReady


def store_adapters(ready: EngineReady, blob_dir: Path, folders: Sequence[Path], count: int) -> list[AdapterRef]:
    """Store checkpoints and refer to them in turn, told apart by their alpha.

    Args:
        ready: Of the engine that is to serve them.
        blob_dir: Its blobs.
        folders: With the checkpoints.
        count: Adapters, each with a digest of its own.
    """
    blobs = LocalBlobs(blob_dir)
    refs = []
    for index in range(count):
        folder = folders[index % len(folders)]
        weights = folder / "adapter_model.safetensors"
        checkpoint = read_checkpoint(
            (folder / "adapter_config.json").read_bytes(), weights, ready.base, ready.max_rank, scan_values=False
        )
        with blobs.create() as writer:
            writer.write(weights.read_bytes())
            sha256 = writer.commit()
        spec = replace(checkpoint.spec, alpha=checkpoint.spec.alpha + index)
        refs.append(
            AdapterRef(
                tenant_id="benchmark",
                adapter_id=f"{folder.name}-{index}",
                version=1,
                digest=content_digest(spec, sha256),
                weights_sha256=sha256,
                config=spec,
            )
        )
    return refs


def greedy_request(
    request_id: str, prompt_token_ids: list[int], max_tokens: int, adapter: AdapterRef | None
) -> GenerationRequest:
    """A request for exactly so many tokens."""
    params = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)
    return GenerationRequest(request_id=request_id, prompt_token_ids=prompt_token_ids, params=params, adapter=adapter)
