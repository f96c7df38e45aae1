"""Would these adapters be on the device all at once, and how much KV cache is left beside them?

Answered from the memory plan and the layout planner alone: what is resident now has no say, and idle adapters reserve
nothing. Adapters that do not fit at once can still be served; they take turns. Knows neither HTTP nor torch.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from weft.adapters.base_shape import BaseShape
from weft.adapters.checkpoint.reader import Checkpoint, read_checkpoint
from weft.adapters.checkpoint.safetensors_header import read_header
from weft.adapters.checkpoint.tensor_names import TensorNames
from weft.adapters.lora.layout import adapter_pages
from weft.adapters.ref import content_digest
from weft.config import GIB, Config
from weft.engine.execution.memory_plan import FreeMemory, free_memory, max_model_len, plan_memory
from weft.engine.model.device import choose_device, choose_dtype
from weft.engine.model.spec import DecoderSpec, base_shape, model_geometry, read_spec
from weft.engine.model.weights import resolve_model
from weft.engine.status import EngineReady, MemoryPlan
from weft.errors import ConfigError
from weft.memory.geometry import PageGeometry


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """What the adapters would share with the KV cache."""

    pages: int
    """Pages of the pool that can be handed out."""
    slots: int
    """Most adapters on the device at once."""
    geometry: PageGeometry
    max_model_len: int

    @classmethod
    def of(cls, ready: EngineReady) -> Room:
        """The room of a running engine."""
        return cls(
            pages=ready.memory.num_pages,
            slots=ready.memory.slots,
            geometry=ready.geometry,
            max_model_len=ready.max_model_len,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class FitItem:
    """One adapter, or several that would look alike."""

    adapter: str | None = None
    """Its name; None for adapters that do not exist yet."""
    version: int | None = None
    digest: str | None = None
    """Adapters of one digest are one on the device; None is unlike every other."""
    rank: int
    """The largest of any module."""
    target_modules: tuple[str, ...]
    pages: int
    """Of each."""
    waste: float
    """Share of these pages that holds no weights."""
    count: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterFit:
    """The answer."""

    room: Room
    items: tuple[FitItem, ...]
    pages_needed: int
    slots_needed: int

    @property
    def fits(self) -> bool:
        """Whether all have pages and slots at once, beside at least one block of KV cache."""
        return self.pages_needed + self.room.geometry.num_groups <= self.room.pages and (
            self.slots_needed <= self.room.slots
        )

    @property
    def pages_left(self) -> int:
        """Pages for the KV cache while all are on the device."""
        return max(self.room.pages - self.pages_needed, 0)

    @property
    def slots_left(self) -> int:
        """Adapters that may join them, as far as slots go."""
        return max(self.room.slots - self.slots_needed, 0)

    @property
    def kv_tokens_left(self) -> int:
        """Tokens of KV cache that fit beside them."""
        return self.pages_left // self.room.geometry.num_groups * self.room.geometry.page_tokens

    @property
    def requests_left(self) -> int:
        """Requests of `max_model_len` tokens that fit beside them."""
        return self.pages_left // self.room.geometry.pages(self.room.max_model_len)

    @property
    def least_pages(self) -> int:
        """Pages of the smallest arena that would do, the zero page among them."""
        return 1 + self.pages_needed + self.room.geometry.num_groups

    @property
    def message(self) -> str:
        """The answer in words."""
        adapters = f"{_count(self.slots_needed, 'adapter')} need{'s' if self.slots_needed == 1 else ''}"
        numbers = (
            f"{adapters} {self.pages_needed:,} of {self.room.pages:,} pages "
            f"and {self.slots_needed:,} of {self.room.slots:,} slots"
        )
        if self.fits:
            return (
                f"All fit at once: {numbers}. Beside them {self.kv_tokens_left:,} tokens of KV cache fit, or "
                f"{_count(self.requests_left, 'request')} of {self.room.max_model_len:,} tokens."
            )
        return (
            f"Not all fit at once: {numbers}. They can still be served: an adapter has pages only while it is of use, "
            "so they take turns."
        )


def find_fit(items: Sequence[FitItem], room: Room) -> AdapterFit:
    """Add up what the adapters need; equal digests count once."""
    distinct = {item.digest or index: item for index, item in enumerate(items)}.values()
    return AdapterFit(
        room=room,
        items=tuple(items),
        pages_needed=sum(item.pages * item.count for item in distinct),
        slots_needed=sum(item.count for item in distinct),
    )


def planned_item(rank: int, target_modules: Sequence[str], count: int, base: BaseShape, room: Room) -> FitItem:
    """Adapters that are not there yet: of one rank on these modules of every layer.

    Args:
        rank: At least 1.
        target_modules: Names as of `ModuleShape.name`; empty means all.
        count: How many of them.
        base: Shape of the base model.
        room: Says how large pages are.
    """
    names = set(target_modules) or {module.name for module in base.modules}
    modules = [index for index, module in enumerate(base.modules) if module.name in names]
    pages = adapter_pages(
        {(layer, index): rank for layer in range(base.num_layers) for index in modules}, base, room.geometry
    )
    parameters = sum(base.modules[index].in_features + base.modules[index].out_features for index in modules)
    return FitItem(
        rank=rank,
        target_modules=tuple(base.modules[index].name for index in modules),
        pages=pages,
        waste=waste(parameters * rank * base.num_layers, pages, room.geometry),
        count=count,
    )


def waste(parameters: int, pages: int, geometry: PageGeometry) -> float:
    """Share of an adapter's pages that holds no weights: ends of pages, padding of rows and of ranks."""
    return 1 - parameters * geometry.dtype_bytes / (pages * geometry.page_bytes)


def _count(number: int, thing: str) -> str:
    return f"{number:,} {thing}{'' if number == 1 else 's'}"


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


def item_of_files(name: str, config: Path | None, weights: Path, base: BaseShape, max_rank: int, room: Room) -> FitItem:
    """What an adapter on disk would take on the device; its values are not looked at.

    Args:
        name: What it is called.
        config: Its `adapter_config.json`; None takes the ranks from the shapes of the weights.
        weights: Its `adapter_model.safetensors`.
        base: Shape of the base model.
        max_rank: Largest rank that is served.
        room: Says how large pages are.

    Raises:
        AdapterError: It cannot be served with this base.
        OSError: A file cannot be read.
    """
    raw = config.read_bytes() if config is not None else _config_by_shapes(weights, base)
    found = read_checkpoint(raw, weights, base, max_rank, scan_values=False)
    pages = adapter_pages(found.ranks, base, room.geometry)
    return FitItem(
        adapter=name,
        digest=_digest(found, weights),
        rank=found.largest_rank,
        target_modules=found.target_modules,
        pages=pages,
        waste=waste(found.parameters, pages, room.geometry),
    )


def _config_by_shapes(weights: Path, base: BaseShape) -> bytes:
    """A config with the ranks that the weights have. Its scaling is made up: it changes no size."""
    names = TensorNames(base)
    with weights.open("rb") as file:
        tensors = read_header(file, weights.stat().st_size)
    ranks = {}
    for tensor in tensors:
        name = names.read(tensor.name)
        place = name.place
        if place.part == "a" and len(tensor.shape) > 1:
            ranks[f"{name.stem}.{place.layer}.{base.modules[place.module].path}"] = tensor.shape[name.rank_axis]
    ((usual, _),) = Counter(ranks.values()).most_common(1) or [(1, 0)]
    pattern = {path: rank for path, rank in ranks.items() if rank != usual}
    return json.dumps({"peft_type": "LORA", "r": usual, "lora_alpha": usual, "rank_pattern": pattern}).encode()


def _digest(found: Checkpoint, weights: Path) -> str:
    with weights.open("rb") as file:
        return content_digest(found.spec, hashlib.file_digest(file, "sha256").hexdigest())
