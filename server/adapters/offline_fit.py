"""`manylora fit` without a server: the memory left for adapters, and what folders of adapters need."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from manylora.adapters.base_shape import BaseShape
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
    DecoderSpec,
    base_shape,
    model_geometry,
    read_spec,
    resolve_model,
)
from manylora.engine.status import MemoryPlan
from manylora.errors import ConfigError
from manylora.server.adapters.fit import Capacity, waste
from manylora.server.adapters.schemas import AdapterFitItem, AdapterFitView


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedCapacity:
    """Plan of a device's memory by the settings."""

    config: Config
    spec: DecoderSpec
    base: BaseShape
    device: torch.device
    dtype: torch.dtype
    free: FreeMemory
    memory: MemoryPlan
    capacity: Capacity

    def least_gib(self, fit: AdapterFitView) -> float:
        """The smallest `memory.gib`, in steps of 0.001, that holds what does not fit.

        Raises:
            ConfigError: The device does not have it.
        """
        geometry = self.capacity.geometry
        asked = self.config.model.max_model_len or geometry.page_tokens
        num_bytes = (
            1 + max(fit.pages.needed + geometry.num_groups, geometry.pages(asked))
        ) * geometry.page_bytes
        gib = math.ceil(num_bytes / GIB * 1000) / 1000
        memory = replace(self.config.memory, gib=gib)
        config = replace(self.config, memory=memory)
        on_cpu = self.device.type == "cpu"
        plan_memory(config, self.spec, self.base, geometry, self.free, on_cpu=on_cpu)
        return gib


def plan_capacity(config: Config, free_gib: float | None = None) -> PlannedCapacity:
    """Divide the memory as the engine would; no weights are read or downloaded.

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
    free = _free(device, free_gib)
    memory = plan_memory(config, spec, base, geometry, free, on_cpu=device.type == "cpu")
    capacity = Capacity(
        pages=memory.num_pages,
        slots=memory.slots,
        geometry=geometry,
        max_model_len=max_model_len(config, spec, memory),
    )
    return PlannedCapacity(
        config=config,
        spec=spec,
        base=base,
        device=device,
        dtype=dtype,
        free=free,
        memory=memory,
        capacity=capacity,
    )


def _free(device: torch.device, free_gib: float | None) -> FreeMemory:
    if free_gib is None:
        return free_memory(device)
    if not 0 < free_gib < math.inf:
        raise ConfigError(f"--free-gib must be above 0, got {free_gib}")
    num_bytes = int(free_gib * GIB)
    return FreeMemory(num_bytes, num_bytes if device.type == "cpu" else free_memory().host)


def item_on_disk(
    name: str, config: Path, weights: Path, planned: PlannedCapacity
) -> AdapterFitItem:
    """Pages of an adapter on disk, if it were on the device; its values are not looked at.

    Args:
        name: Name to show.
        config: Its `adapter_config.json`.
        weights: Its `adapter_model.safetensors`.
        planned: Gives base shape, page size and rank limit.

    Raises:
        AdapterError: It cannot be served with this base; carries all findings.
        OSError: A file cannot be read.
    """
    max_rank = planned.config.adapter.max_rank
    geometry = planned.capacity.geometry
    found = read_checkpoint(config.read_bytes(), weights, planned.base, max_rank, scan_values=False)
    pages = adapter_pages(found.ranks, planned.base, geometry)
    with weights.open("rb") as file:
        digest = content_digest(found.spec, hashlib.file_digest(file, "sha256").hexdigest())
    return AdapterFitItem(
        adapter=name,
        digest=digest,
        rank=found.largest_rank,
        target_modules=list(found.target_modules),
        pages=pages,
        waste=waste(found.parameters, pages, geometry),
    )
