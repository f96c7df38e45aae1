"""`manylora adapter`: check a folder without a server, upload it, list, show and remove adapters."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from manylora.cli.options import JSON, ServerCall, fail, fail_with, refuse, tenant_command
from manylora.cli.table import show, value_text
from manylora.errors import AdapterError, ClientError, Finding, PayloadTooLargeError

KEEP_SMALL = "Leave out what PEFT did not write."
COLUMNS = (
    "name",
    "tenant",
    "version",
    "rank",
    "target_modules",
    "parameters",
    "pages",
    "residency",
    "pinned",
    "aliases",
)
Folder = Annotated[
    Path,
    typer.Argument(help="Folder that PEFT or mlx-lm saved the adapter to.", show_default=False),
]
Base = Annotated[
    str | None, typer.Option(help="Base model to check against: folder, GGUF file or hub id.")
]
MaxRank = Annotated[int, typer.Option(help="Largest rank that the server takes.")]
Meanings = Annotated[
    list[str],
    typer.Argument(
        metavar="ALIAS=MEANING...",
        help="prod=2, a canary as prod=2:90,3:10, or prod= to remove it.",
    ),
]
Copies = Annotated[
    int, typer.Option(min=1, help="Servers that keep it, where several share a database.")
]
OnlyVersion = Annotated[int | None, typer.Option("--version", help="Only this version.")]
app = typer.Typer(help="Check, upload, list and remove adapters.", no_args_is_help=True)


@app.command()
def validate(
    folder: Folder,
    model: Base = None,
    max_rank: MaxRank = 64,
    trained_on_quantised: Annotated[
        bool,
        typer.Option(
            "--trained-on-quantised", help="As model.adapters_trained_on_quantised of the server."
        ),
    ] = False,
    as_json: JSON = False,
) -> None:
    """Check an adapter as an upload would, without a server."""
    from manylora.adapters.checkpoint.folder import adapter_files
    from manylora.adapters.checkpoint.reader import read_checkpoint
    from manylora.engine.model.spec import SPEC_FILES, base_shape, read_spec, resolve_model

    config, weights = adapter_files(folder)
    spec = read_spec(resolve_model(model, SPEC_FILES)) if model else None
    base = (
        base_shape(spec, "sha256:" + "0" * 64, trained_on_quantised=trained_on_quantised)
        if spec
        else None
    )
    names = (Path(model).resolve().name,) if model else ()
    with refusals(folder, config, weights, as_json):
        found = read_checkpoint(config.read_bytes(), weights, base, max_rank, base_names=names)
    facts = {
        "valid": True,
        "rank": found.largest_rank,
        "target_modules": list(found.target_modules),
        "applied_modules": {"applied": found.applied, "total": found.total},
        "parameters": found.parameters,
        "checked_against": model or "itself",
        "report": dict(found.report),
    }
    show(facts, as_json, list(facts)[:-1])
    if not as_json:
        _tell(found.report)


@app.command()
@tenant_command
def push(  # noqa: PLR0913 - one parameter per option
    call: ServerCall,
    folder: Folder,
    name: Annotated[
        str | None, typer.Option(help="The adapter's name; the folder's by default.")
    ] = None,
    description: Annotated[str | None, typer.Option(help="Free text.")] = None,
    activate: Annotated[bool, typer.Option(help="Let the plain name mean this version.")] = True,
    ephemeral: Annotated[
        bool, typer.Option("--ephemeral", help="Only in the server's memory.")
    ] = False,
    keep: Annotated[
        int | None, typer.Option(help="Ephemeral versions that stay, this one included.")
    ] = None,
    ttl: Annotated[
        int | None, typer.Option(help="Seconds after which an ephemeral version is withdrawn.")
    ] = None,
) -> None:
    """Upload an adapter, or its next version. A broken upload is continued, also by a later call."""
    import sys

    from rich.console import Console
    from rich.progress import Progress, TaskID

    name = name or folder.resolve().name
    if not ephemeral and (keep is not None or ttl is not None):
        fail("--keep and --ttl are for --ephemeral.")
    if ephemeral and description is not None:
        fail("An ephemeral version takes no --description.")
    bars: dict[Path, TaskID] = {}
    with Progress(console=Console(stderr=True), disable=not sys.stderr.isatty()) as progress:

        def draw(file: Path, sent: int, size: int) -> None:
            if file not in bars:
                bars[file] = progress.add_task(file.name, total=size)
            progress.update(bars[file], completed=sent)

        try:
            if ephemeral:
                body = call.client.push_ephemeral(
                    name, folder, keep=keep, ttl_s=ttl, activate=activate
                )
            else:
                body = call.client.push(
                    folder, name, description=description, activate=activate, progress=draw
                )
        except ClientError as error:
            progress.stop()
            fail_with(error, call.as_json)
    call.show(body, COLUMNS)
    if not call.as_json:
        _tell_pushed(body)


@app.command("ls")
@tenant_command
def list_adapters(call: ServerCall) -> None:
    """List adapters; with the admin key and without --tenant, those of all tenants."""
    call.show(call.client.list_adapters(), COLUMNS)


@app.command("show")
@tenant_command
def show_adapter(call: ServerCall, name: str) -> None:
    """Show an adapter, the tenants that may call it, and its versions."""
    name = _own_name(name)
    body = call.client.get_adapter(name)
    versions = call.client.list_versions(name)
    grants = call.client.list_grants(name)
    if call.as_json:
        call.show({**body, "versions": versions, "grants": grants}, ())
        return
    body["granted_to"] = [
        grant["tenant"] + (f"@{grant['version']}" if grant["version"] else "") for grant in grants
    ]
    call.show(body, (*COLUMNS, "pinned_copies", "description", "granted_to"))
    _tell(body.get("report") or {})
    typer.echo("")
    call.show(versions, ("version", "digest", "rank", "size_bytes", "created_at"))


@app.command("alias")
@tenant_command
def set_aliases(call: ServerCall, name: str, aliases: Meanings) -> None:
    """Set the version of an alias. The name without @ means `default`, so default=1 rolls back to version 1."""
    meanings = dict(_alias(text) for text in aliases)
    call.show(call.client.update_adapter(_own_name(name), aliases=meanings), COLUMNS)


@app.command()
@tenant_command
def grant(
    call: ServerCall,
    name: str,
    grantee: Annotated[
        str, typer.Argument(help="Id of the other tenant; admins may give its name.")
    ],
    version: OnlyVersion = None,
    withdraw: Annotated[bool, typer.Option("--withdraw", help="Take the grant back.")] = False,
) -> None:
    """Let another tenant call an adapter as `tenant/name`, or withdraw that."""
    name = _own_name(name)
    if withdraw:
        call.client.withdraw_grant(name, grantee, version)
        call.tell(f"{grantee} may no longer call {name}")
        return
    made = call.client.grant(name, grantee, version)
    call.tell(f"{made['tenant']} may call {name}" + (f"@{version}" if version else ""), made)


@app.command("rm")
@tenant_command
def remove(call: ServerCall, name: str, version: OnlyVersion = None) -> None:
    """Delete an adapter, or one version of it."""
    call.client.delete_adapter(_own_name(name), version)
    call.tell(f"deleted {name}" if version is None else f"deleted {name}@{version}")


@app.command()
@tenant_command
def pin(call: ServerCall, name: str, copies: Copies = 1) -> None:
    """Bring an adapter to the device and keep it there."""
    wanted = {"pinned_copies": copies} if copies != 1 else {}
    body = call.client.update_adapter(_own_name(name), pinned=True, **wanted)
    call.tell(f"pinned {name}", body)


@app.command()
@tenant_command
def unpin(call: ServerCall, name: str) -> None:
    """Let an adapter be evicted again."""
    body = call.client.update_adapter(_own_name(name), pinned=False)
    call.tell(f"unpinned {name}", body)


@contextmanager
def refusals(adapter: Path, config: Path | None, weights: Path, as_json: bool) -> Iterator[None]:
    """If the block finds that an adapter cannot be served, print all findings and end the command."""
    files = {"config": config.name if config else "", "weights": weights.name}
    try:
        yield
    except AdapterError as error:
        refuse(str(adapter), [asdict(finding) for finding in error.findings], as_json, files)
    except PayloadTooLargeError as error:
        refuse(
            str(adapter),
            [asdict(Finding(error.code, error.message, None, KEEP_SMALL))],
            as_json,
            files,
        )
    except OSError as error:
        fail(f"{error.filename or weights} cannot be read: {error.strerror}.")


def _tell(report: Mapping[str, Any]) -> None:
    """Print the report of a check, with warnings on stderr."""
    if report.get("layout") == "mlx" or report.get("renamed"):
        renamed = (
            f", {report['renamed']} tensors under other names than PEFT's"
            if report.get("renamed")
            else ""
        )
        typer.echo(f"read as: {report['layout']}{renamed}")
    for warning in report.get("warnings", ()):
        typer.echo(f"warning: {warning}", err=True)


def _tell_pushed(body: Mapping[str, Any]) -> None:
    """Print the result of a push, and the name for requests."""
    _tell(body.get("report") or {})
    version = body["version"]
    selector = body["name"]
    is_default = body["aliases"].get("default") == version
    if not body["is_new"]:
        means = f"; the plain name means version {version} now" if is_default else ""
        typer.echo(f"nothing new: version {version} has these very bytes{means}")
    elif not is_default:
        meaning = value_text(body["aliases"].get("default"))
        typer.echo(
            f"the plain name still means {meaning}; to change that: manylora adapter alias {selector} default=..."
        )
    if not is_default:
        selector += f"@{version}"
    typer.echo(f'ready: ask for it with "model": "{selector}"')


def _own_name(name: str) -> str:
    """Check an adapter's name. A name with a tenant or a version ends the command."""
    tenant, slash, own = name.rpartition("/")
    if slash:
        fail(
            f"expected an adapter's own name, got {name!r}. For another tenant's: {own} --tenant {tenant}"
        )
    own, at, version = name.partition("@")
    if at:
        fail(
            f"expected an adapter's name without a version, got {name!r}: write {own}. `show` lists all versions; "
            f"`rm` and `grant` take --version {version}."
        )
    return name


def _alias(text: str) -> tuple[str, dict[str, int] | int | None]:
    """Read an alias and its meaning from `prod=2`, `prod=2:90,3:10` or `prod=`."""
    if not re.fullmatch(r"[^=]*=((\d+(:\d+)?,)*\d+(:\d+)?)?", text, re.ASCII):
        fail(
            f"{text!r} gives an alias no meaning: write ALIAS=VERSION (prod=2), ALIAS=VERSION:WEIGHT,VERSION:WEIGHT "
            "(prod=2:90,3:10), or prod= to delete the alias prod."
        )
    alias, _, meaning = text.partition("=")
    shares = [part.partition(":") for part in meaning.split(",") if part]
    if len(shares) > 1:
        return alias, {version: int(weight or 1) for version, _, weight in shares}
    return alias, int(shares[0][0]) if shares else None
