"""`manylora fit`: tells without a server if adapters fit on the device at once, and how much KV cache is left."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from manylora.cli.adapter import refusals
from manylora.cli.config import GivenSettings, settings_command
from manylora.cli.options import JSON, fail
from manylora.cli.table import print_table, show
from manylora.kernels.weight_format import number_format

if TYPE_CHECKING:
    from manylora.server.adapters.offline_fit import PlannedCapacity
    from manylora.server.adapters.schemas import AdapterFitItem, AdapterFitView

HEADER = ("ADAPTER", "RANK", "TARGETS", "COUNT", "PAGES", "SIZE", "WASTE")
NUMBERS = ("RANK", "COUNT", "PAGES", "SIZE", "WASTE")
Targets = Annotated[
    str, typer.Option(help="Modules of the --rank adapters: all, or some of q,k,v,o,gate,up,down.")
]


@settings_command(
    model="model.path",
    device="model.device",
    dtype="model.dtype",
    weights="model.weights",
    memory_gib="memory.gib",
    max_model_len="model.max_model_len",
    max_rank="adapter.max_rank",
)
def fit(
    given: GivenSettings,
    adapters: Annotated[
        list[Path] | None,
        typer.Argument(metavar="ADAPTER", help="Folders of PEFT adapters.", show_default=False),
    ] = None,
    ranks: Annotated[
        list[int] | None,
        typer.Option(
            "--rank", help="Plan for adapters of this rank that do not exist yet; repeat for more."
        ),
    ] = None,
    count: Annotated[int, typer.Option(help="How many adapters of each --rank.")] = 1,
    targets: Targets = "all",
    free_gib: Annotated[
        float | None,
        typer.Option(help="Plan for a device with this many GiB free, instead of this machine."),
    ] = None,
    as_json: JSON = False,
) -> None:
    """Plan memory before you serve: do these adapters fit on the device at once, and how much KV cache is left?

    Needs no server. Exits with 0 if they fit, with 1 if not. Adapters that do not fit at once can still be served: they
    take turns.
    """
    from manylora.server.adapters.fit import find_fit
    from manylora.server.adapters.offline_fit import plan_capacity
    from manylora.server.adapters.schemas import MAX_PLANNED

    if not adapters and not ranks:
        fail("name folders of adapters, or give --rank for planned adapters.")
    if not 1 <= count <= MAX_PLANNED:
        fail(f"--count must be 1 to {MAX_PLANNED}, got {count}.")
    modules = _modules(targets)
    planned = plan_capacity(given.load(), free_gib)
    items = [_on_disk(path, planned, as_json) for path in adapters or []]
    items += [_to_come(rank, modules, count, planned) for rank in ranks or []]
    found = find_fit(items, planned.capacity)
    _show(found, planned, as_json)
    raise typer.Exit(int(not found.fits))


def _modules(targets: str) -> list[str]:
    """Names of modules; an empty list means all."""
    from manylora.server.http.bodies import ALL_LINEAR, MODULE_NAMES

    if targets in ("all", ALL_LINEAR):
        return []
    names = [name.removesuffix("_proj") + "_proj" for name in targets.split(",")]
    if not set(names) <= set(MODULE_NAMES):
        known = ", ".join(name.removesuffix("_proj") for name in MODULE_NAMES)
        fail(f"--targets takes all, or some of {known} with commas between them, got {targets!r}.")
    return names


def _on_disk(path: Path, planned: PlannedCapacity, as_json: bool) -> AdapterFitItem:
    from manylora.adapters.checkpoint.folder import adapter_files
    from manylora.server.adapters.offline_fit import item_on_disk

    config, weights = adapter_files(path)
    with refusals(path, config, weights, as_json):
        return item_on_disk(str(path), config, weights, planned)


def _to_come(rank: int, modules: list[str], count: int, planned: PlannedCapacity) -> AdapterFitItem:
    from manylora.lora_rows import MAX_RANK
    from manylora.server.adapters.fit import planned_item

    max_rank = planned.config.adapter.max_rank
    if not 1 <= rank <= max_rank:
        advice = " Raise --max-rank for larger ones." if max_rank < rank <= MAX_RANK else ""
        fail(f"--rank must be 1 to {max_rank}, got {rank}.{advice}")
    return planned_item(rank, modules, count, planned.base, planned.capacity)


def _show(found: AdapterFitView, planned: PlannedCapacity, as_json: bool) -> None:
    from manylora.engine.execution.memory_plan import format_reserved

    advice = None if found.fits else _advice(found, planned)
    if as_json:
        body = {
            **found.model_dump(),
            "requests_left": planned.capacity.requests(found.pages.left),
            "advice": advice,
            "max_model_len": planned.capacity.max_model_len,
        }
        show(body, True, ())
        return
    page_bytes = planned.capacity.geometry.page_bytes
    memory = planned.memory
    print_table([HEADER, *(_row(item, page_bytes) for item in found.adapters)], NUMBERS)
    name = number_format(
        str(planned.dtype).removeprefix("torch."),
        memory.weights,
        planned.capacity.geometry.is_kv_int8,
    )
    about = f"{planned.config.model.path} on {planned.device.type} in {name}"
    typer.echo(f"\n{about}, weights {_size(memory.weight_bytes)}")
    if memory.reserved.total:
        typer.echo(f"reserved {format_reserved(memory.reserved, memory.step_tokens)}")
    pages = f"{memory.num_pages:,} of {page_bytes / 1024:,.0f} KiB ({_size(memory.arena_bytes)})"
    typer.echo(f"pages  {pages}: {found.pages.needed:,} needed, {found.pages.left:,} left")
    typer.echo(
        f"slots  {planned.capacity.slots:,}: {found.slots.needed:,} needed, {found.slots.left:,} left"
    )
    typer.echo(found.message)
    if advice:
        typer.echo(advice)


def _row(item: AdapterFitItem, page_bytes: int) -> tuple[str, ...]:
    name, targets = (
        item.adapter or "(to come)",
        ",".join(name.removesuffix("_proj") for name in item.target_modules),
    )
    size = _size(item.pages * page_bytes)
    waste = f"{item.waste:.1%}"
    return name, str(item.rank), targets, f"{item.count:,}", f"{item.pages:,}", size, waste


def _advice(found: AdapterFitView, planned: PlannedCapacity) -> str:
    """Advice that makes all adapters fit at once."""
    from manylora.config import AdapterConfig
    from manylora.errors import ConfigError

    wanted = []
    try:
        if found.pages.needed + planned.capacity.geometry.num_groups > planned.capacity.pages:
            wanted.append(f"--memory-gib {planned.least_gib(found):g}")
        if found.slots.needed > planned.capacity.slots:
            AdapterConfig(slots=found.slots.needed)
            wanted.append(f"--set adapter.slots={found.slots.needed}")
    except ConfigError as error:
        return f"No setting makes room for all at once here: {error.message}."
    return f"To have all at once: {' '.join(wanted)}"


def _size(num_bytes: int) -> str:
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB")):
        if num_bytes >= unit:
            return f"{num_bytes / unit:.2f} {name}"
    return f"{num_bytes / 1024:.0f} KiB"
