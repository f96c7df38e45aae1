"""`manylora fit` without a server: the memory left for adapters, and what folders of adapters need."""

from __future__ import annotations

import hashlib
import math
from dataclasses import replace
from pathlib import Path

import torch

from manylora.adapters.checkpoint.reader import read_checkpoint
from manylora.adapters.lora.layout import adapter_pages
from manylora.adapters.ref import content_digest
from manylora.config import GIB, Config
from manylora.engine.execution.memory_plan import (
    FreeMemory,
    free_memory,
    max_model_len,
    plan_memory,
)
from manylora.engine.model.device import choose_device, choose_dtype
from manylora.engine.model.spec import (
    SPEC_FILES,
    base_shape,
    model_geometry,
    read_spec,
    resolve_model,
)
from manylora.engine.status import EngineReady
from manylora.errors import ConfigError
from manylora.server.adapters.fit import waste
from manylora.server.adapters.schemas import AdapterFitItem, AdapterFitView


def planned_engine(config: Config, free_gib: float | None = None) -> EngineReady:
    """The engine's report as it would be: no weights are read or downloaded.

    Args:
        config: All settings.
        free_gib: Free memory of the device that is planned for; None measures the one that is here.

    Raises:
        ConfigError: The model or the memory does not allow what the settings ask for.
    """
    spec = read_spec(resolve_model(config.model.path, files=SPEC_FILES))
    is_elsewhere = free_gib is not None and config.model.device == "cuda"
    device = torch.device("cuda") if is_elsewhere else choose_device(config.model.device)
    dtype = choose_dtype(config.model.dtype, spec.dtype, device)
    base = base_shape(spec, "", trained_on_quantised=config.model.adapters_trained_on_quantised)
    geometry = model_geometry(spec, base, dtype.itemsize, config.memory.kv_dtype)
    on_cpu = device.type == "cpu"
    memory = plan_memory(config, spec, base, geometry, _free(device, free_gib), on_cpu=on_cpu)
    return EngineReady(
        boot_id="",
        model_path=config.model.path,
        device=device.type,
        dtype=str(dtype).removeprefix("torch."),
        max_model_len=max_model_len(config, spec, memory),
        vocab_size=spec.vocab_size,
        base=base,
        geometry=geometry,
        memory=memory,
        max_rank=config.adapter.max_rank,
    )


def least_gib(fit: AdapterFitView, config: Config, free_gib: float | None) -> float:
    """The smallest `memory.gib`, in steps of 0.001, that holds what does not fit; arguments as of `planned_engine`.

    Raises:
        ConfigError: The device does not have it.
    """
    geometry = planned_engine(config, free_gib).geometry
    asked = config.model.max_model_len or geometry.page_tokens
    pages = 1 + max(fit.pages.needed + geometry.num_groups, geometry.pages(asked))
    gib = math.ceil(pages * geometry.page_bytes / GIB * 1000) / 1000
    planned_engine(replace(config, memory=replace(config.memory, gib=gib)), free_gib)
    return gib


def _free(device: torch.device, free_gib: float | None) -> FreeMemory:
    if free_gib is None:
        return free_memory(device)
    if not 0 < free_gib < math.inf:
        raise ConfigError(f"--free-gib must be above 0, got {free_gib}")
    num_bytes = int(free_gib * GIB)
    return FreeMemory(num_bytes, num_bytes if device.type == "cpu" else free_memory().host)


def item_on_disk(name: str, config: Path, weights: Path, ready: EngineReady) -> AdapterFitItem:
    """Pages of an adapter on disk, if it were on the device; its values are not looked at.

    Args:
        name: Name to show.
        config: Its `adapter_config.json`.
        weights: Its `adapter_model.safetensors`.
        ready: Gives base shape, page size and rank limit.

    Raises:
        AdapterError: It cannot be served with this base; carries all findings.
        OSError: A file cannot be read.
    """
    found = read_checkpoint(
        config.read_bytes(), weights, ready.base, ready.max_rank, scan_values=False
    )
    pages = adapter_pages(found.ranks, ready.base, ready.geometry)
    with weights.open("rb") as file:
        digest = content_digest(found.spec, hashlib.file_digest(file, "sha256").hexdigest())
    return AdapterFitItem(
        adapter=name,
        digest=digest,
        rank=found.largest_rank,
        target_modules=list(found.target_modules),
        pages=pages,
        waste=waste(found.parameters, pages, ready.geometry),
    )
