"""The memory that `weft serve` would have for adapters and KV cache, from its settings and the model's config alone."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

from weft.adapters.base_shape import BaseShape
from weft.config import GIB, Config
from weft.engine.execution.memory_plan import FreeMemory, free_memory, max_model_len, plan_memory
from weft.engine.model.device import choose_device, choose_dtype
from weft.engine.model.spec import DecoderSpec, base_shape, model_geometry, read_spec
from weft.engine.model.weights import resolve_model
from weft.engine.status import MemoryPlan
from weft.errors import ConfigError
from weft.server.adapters.fit import AdapterFit, Room

CONFIG_FILE = "config.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRoom:
    """What the settings would make of a device."""

    config: Config
    spec: DecoderSpec
    base: BaseShape
    device: torch.device
    dtype: torch.dtype
    free: FreeMemory
    memory: MemoryPlan
    room: Room

    def least_gib(self, fit: AdapterFit) -> float:
        """The smallest `memory.gib`, in steps of 0.001, that holds what does not fit.

        Raises:
            ConfigError: The device does not have it.
        """
        geometry = self.room.geometry
        asked = self.config.model.max_model_len or geometry.page_tokens
        num_bytes = max(fit.least_pages, 1 + geometry.pages(asked)) * geometry.page_bytes
        gib = math.ceil(num_bytes / GIB * 1000) / 1000
        memory = replace(self.config.memory, gib=gib)
        plan_memory(replace(self.config, memory=memory), self.spec, self.base, geometry, self.device, self.free)
        return gib


def plan_room(config: Config, free_gib: float | None = None) -> PlannedRoom:
    """Divide the memory as the engine would; no weights are read or downloaded.

    Args:
        config: All settings.
        free_gib: Free memory of the device that is planned for; None measures the one that is here.

    Raises:
        ConfigError: The model or the memory does not allow what the settings ask for.
    """
    spec = read_spec(resolve_model(config.model.path, files=(CONFIG_FILE,)))
    is_elsewhere = free_gib is not None and config.model.device == "cuda"
    device = torch.device("cuda") if is_elsewhere else choose_device(config.model.device)
    dtype = choose_dtype(config.model.dtype, spec.dtype, device)
    base = base_shape(spec, "")
    geometry = model_geometry(spec, base, dtype.itemsize)
    free = _free(device, free_gib)
    memory = plan_memory(config, spec, base, geometry, device, free)
    room = Room(
        pages=memory.num_pages,
        slots=memory.slots,
        geometry=geometry,
        max_model_len=max_model_len(config, spec, memory),
    )
    return PlannedRoom(
        config=config, spec=spec, base=base, device=device, dtype=dtype, free=free, memory=memory, room=room
    )


def _free(device: torch.device, free_gib: float | None) -> FreeMemory:
    if free_gib is None:
        return free_memory(device)
    if not 0 < free_gib < math.inf:
        raise ConfigError(f"--free-gib must be above 0, got {free_gib}")
    num_bytes = int(free_gib * GIB)
    return FreeMemory(num_bytes, num_bytes if device.type == "cpu" else free_memory(torch.device("cpu")).host)
