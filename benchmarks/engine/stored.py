"""Adapters and requests as a server would hand them to an engine, and random weights for adapters."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from manylora.adapters.base_shape import BaseShape
from manylora.adapters.blobs.local import LocalBlobs
from manylora.adapters.checkpoint.reader import read_checkpoint
from manylora.adapters.ref import AdapterRef, LoraSpec, content_digest
from manylora.engine.request import GenerationRequest
from manylora.engine.sampling_params import SamplingParams
from manylora.engine.status import EngineReady


def store_blob(blobs: LocalBlobs, content: bytes) -> str:
    """Store bytes; returns their digest."""
    with blobs.create() as writer:
        writer.write(content)
        return writer.commit()


def adapter_ref(name: str, spec: LoraSpec, weights_sha256: str) -> AdapterRef:
    """Refer to a version; each spec makes another version of the same weights."""
    digest = content_digest(spec, weights_sha256)
    return AdapterRef(
        tenant_id="benchmark",
        adapter_id=name,
        version=1,
        digest=digest,
        weights_sha256=weights_sha256,
        config=spec,
    )


def store_adapters(
    ready: EngineReady, blob_dir: Path, folders: Sequence[Path], count: int
) -> list[AdapterRef]:
    """Store checkpoints and refer to them in turn; each reference has another alpha.

    Args:
        ready: Of the engine that is to serve them.
        blob_dir: Its blobs.
        folders: With the checkpoints.
        count: Adapters, each with a digest of its own.
    """
    blobs = LocalBlobs(blob_dir)
    stored = []
    for folder in folders[:count]:
        config = (folder / "adapter_config.json").read_bytes()
        weights = folder / "adapter_model.safetensors"
        spec = read_checkpoint(config, weights, ready.base, ready.max_rank, scan_values=False).spec
        stored.append((folder.name, spec, store_blob(blobs, weights.read_bytes())))
    return [
        adapter_ref(f"{name}-{index}", replace(spec, alpha=spec.alpha + index), sha256)
        for index, (name, spec, sha256) in zip(range(count), itertools.cycle(stored), strict=False)
    ]


def random_lora(
    base: BaseShape, modules: Sequence[int], rank: int, generator: torch.Generator
) -> dict[str, torch.Tensor]:
    """Tensors of an adapter as PEFT names them; in bfloat16, as adapters mostly come."""
    tensors = {}
    for layer in range(base.num_layers):
        for module in (base.modules[index] for index in modules):
            path = f"base_model.model.{base.layer_prefix}.{layer}.{module.path}"
            for part, sizes in (
                ("A", (rank, module.in_features)),
                ("B", (module.out_features, rank)),
            ):
                values = torch.randn(sizes, generator=generator).mul_(0.02)
                tensors[f"{path}.lora_{part}.weight"] = values.to(torch.bfloat16)
    return tensors


def greedy_request(
    request_id: str, prompt_token_ids: list[int], max_tokens: int, adapter: AdapterRef | None
) -> GenerationRequest:
    """Make a request for exactly `max_tokens` tokens."""
    params = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)
    return GenerationRequest(
        request_id=request_id, prompt_token_ids=prompt_token_ids, params=params, adapter=adapter
    )
