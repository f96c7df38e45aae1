"""`weft adapter`: check a folder without a server, upload it, list, show and remove adapters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from weft.cli.client import DEFAULT_URL, JSON, KEY, TENANT, URL, call, fail, refuse, show

if TYPE_CHECKING:
    from weft.adapters.base_shape import BaseShape

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
Folder = Annotated[Path, typer.Argument(help="Folder that PEFT or mlx-lm saved the adapter to.", show_default=False)]
app = typer.Typer(help="Check, upload, list and remove adapters.", no_args_is_help=True)


@app.command()
def validate(
    folder: Folder,
    model: Annotated[str | None, typer.Option(help="Folder of the base model to check against.")] = None,
    max_rank: Annotated[int, typer.Option(help="Largest rank that the server takes.")] = 64,
    as_json: JSON = False,
) -> None:
    """Check an adapter as an upload would, without a server."""
    from weft.adapters.checkpoint.reader import read_checkpoint
    from weft.errors import AdapterError, ConfigError, Finding, PayloadTooLargeError

    config, weights = adapter_files(folder)
    files = {"config": config.name, "weights": weights.name}
    try:
        base = _base(Path(model)) if model else None
    except ConfigError as error:
        fail(error.message, 2)
    try:
        names = (Path(model).resolve().name,) if model else ()
        found = read_checkpoint(config.read_bytes(), weights, base, max_rank, base_names=names)
    except AdapterError as error:
        refuse(str(folder), [asdict(finding) for finding in error.findings], as_json, files)
    except PayloadTooLargeError as error:
        refuse(str(folder), [asdict(Finding(error.code, error.message, None, KEEP_SMALL))], as_json, files)
    except OSError as error:
        fail(f"{weights} cannot be read: {error.strerror}.", 2)
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
def push(  # noqa: PLR0913 - one parameter per option
    folder: Folder,
    name: Annotated[str | None, typer.Option(help="The adapter's name; the folder's by default.")] = None,
    description: Annotated[str | None, typer.Option(help="Free text.")] = None,
    activate: Annotated[bool, typer.Option(help="Let the plain name mean this version.")] = True,
    tenant: TENANT = None,
    url: URL = DEFAULT_URL,
    key: KEY = None,
    as_json: JSON = False,
) -> None:
    """Upload an adapter, or its next version. After a broken connection it goes on, also when started again."""
    from weft.cli.push import push_files
    from weft.registry.names import is_name

    own_name = folder.resolve().name
    files = adapter_files(folder)
    if name is None and not is_name(own_name):
        fail(f"the folder's name {own_name!r} cannot name an adapter; give one with --name.", 2)
    draft = {"name": name or own_name, "description": description, "activate": activate}
    body, is_new = push_files(files, draft, url, key, tenant, as_json)
    show(body, as_json, COLUMNS)
    if not as_json:
        _tell(body.get("report") or {})
        version, selector = body["version"], body["name"]
        is_default = body["aliases"].get("default") == version
        if not is_new:
            means = f"; the plain name means version {version} now" if is_default else ""
            typer.echo(f"nothing new: version {version} has these very bytes{means}")
        if not is_default:
            selector += f"@{version}"
        typer.echo(f'ready: ask for it with "model": "{selector}"')


@app.command("ls")
def list_adapters(tenant: TENANT = None, url: URL = DEFAULT_URL, key: KEY = None, as_json: JSON = False) -> None:
    """List adapters."""
    show(call(url, key, "GET", "/v1/adapters", params={"tenant": tenant, "limit": 1000}), as_json, COLUMNS)


@app.command("show")
def show_adapter(
    name: str, tenant: TENANT = None, url: URL = DEFAULT_URL, key: KEY = None, as_json: JSON = False
) -> None:
    """Show one adapter, who else may call it, and its versions."""
    params = {"tenant": tenant}
    body = call(url, key, "GET", f"/v1/adapters/{_quoted(name)}", params=params)
    versions, grants = (
        call(url, key, "GET", f"/v1/adapters/{_quoted(name)}/{part}", params=params) for part in ("versions", "grants")
    )
    if as_json:
        show({**body, "versions": versions["data"], "grants": grants["data"]}, True, ())
        return
    body["granted_to"] = [
        grant["tenant"] + (f"@{grant['version']}" if grant["version"] else "") for grant in grants["data"]
    ]
    show(body, False, (*COLUMNS, "description", "granted_to"))
    _tell(body.get("report") or {})
    typer.echo("")
    show(versions, False, ("version", "digest", "rank", "size_bytes", "created_at"))


@app.command("alias")
def set_aliases(
    name: str,
    aliases: Annotated[
        list[str],
        typer.Argument(metavar="ALIAS=MEANING...", help="prod=2, a canary as prod=2:90,3:10, or prod= to remove it."),
    ],
    tenant: TENANT = None,
    url: URL = DEFAULT_URL,
    key: KEY = None,
    as_json: JSON = False,
) -> None:
    """Say which version an alias means; `default` is what the plain name means, so default=1 rolls back to 1."""
    body = {"aliases": dict(_alias(text) for text in aliases)}
    path = f"/v1/adapters/{_quoted(name)}"
    show(call(url, key, "PATCH", path, json=body, params={"tenant": tenant}), as_json, COLUMNS)


@app.command()
def grant(
    name: str,
    grantee: Annotated[str, typer.Argument(help="Id of the other tenant; admins may give its name.")],
    version: Annotated[int | None, typer.Option(help="Only this version.")] = None,
    withdraw: Annotated[bool, typer.Option("--withdraw", help="Take the grant back.")] = False,
    tenant: TENANT = None,
    url: URL = DEFAULT_URL,
    key: KEY = None,
) -> None:
    """Let another tenant call an adapter as `tenant/name`, or take that back."""
    path = f"/v1/adapters/{_quoted(name)}/grants"
    if withdraw:
        call(url, key, "DELETE", f"{path}/{_quoted(grantee)}", params={"tenant": tenant, "version": version})
        typer.echo(f"{grantee} may no longer call {name}")
        return
    made = call(url, key, "POST", path, json={"tenant": grantee, "version": version}, params={"tenant": tenant})
    typer.echo(f"{made['tenant']} may call {name}" + (f"@{version}" if version else ""))


@app.command("rm")
def remove(
    name: str,
    version: Annotated[int | None, typer.Option(help="Only this version.")] = None,
    tenant: TENANT = None,
    url: URL = DEFAULT_URL,
    key: KEY = None,
) -> None:
    """Delete an adapter, or one version of it."""
    call(url, key, "DELETE", f"/v1/adapters/{_quoted(name)}", params={"tenant": tenant, "version": version})
    typer.echo(f"deleted {name}" if version is None else f"deleted {name}@{version}")


@app.command()
def pin(name: str, tenant: TENANT = None, url: URL = DEFAULT_URL, key: KEY = None) -> None:
    """Bring an adapter to the device and keep it there."""
    call(url, key, "PATCH", f"/v1/adapters/{_quoted(name)}", json={"pinned": True}, params={"tenant": tenant})
    typer.echo(f"pinned {name}")


@app.command()
def unpin(name: str, tenant: TENANT = None, url: URL = DEFAULT_URL, key: KEY = None) -> None:
    """Let an adapter be evicted again."""
    call(url, key, "PATCH", f"/v1/adapters/{_quoted(name)}", json={"pinned": False}, params={"tenant": tenant})
    typer.echo(f"unpinned {name}")


def adapter_files(folder: Path) -> tuple[Path, Path]:
    """Config and weights of an adapter; ends the command where one is missing."""
    from weft.adapters.checkpoint import folder as adapter_folder
    from weft.errors import AdapterFormatError

    try:
        return adapter_folder.adapter_files(folder)
    except AdapterFormatError as error:
        fail(error.message, 2)


def _tell(report: Mapping[str, Any]) -> None:
    """Print what the check noticed, the warnings on stderr."""
    if report.get("layout") == "mlx" or report.get("renamed"):
        renamed = f", {report['renamed']} tensors under other names than PEFT's" if report.get("renamed") else ""
        typer.echo(f"read as: {report['layout']}{renamed}")
    for warning in report.get("warnings", ()):
        typer.echo(f"warning: {warning}", err=True)


def _base(folder: Path) -> BaseShape:
    from weft.engine.model.spec import base_shape, read_spec

    return base_shape(read_spec(folder), "sha256:" + "0" * 64)


def _quoted(name: str) -> str:
    from urllib.parse import quote

    if "/" in name:
        tenant, _, own = name.partition("/")
        fail(f"expected an adapter's own name, got {name!r}. For another tenant's: {own} --tenant {tenant}", 2)
    return quote(name, safe="")


def _alias(text: str) -> tuple[str, dict[str, int] | int | None]:
    """An alias and its meaning, from `prod=2`, `prod=2:90,3:10` or `prod=`."""
    alias, equals, meaning = text.partition("=")
    shares = [part.partition(":") for part in meaning.split(",")] if meaning else []
    numbers = [number for version, colon, weight in shares for number in (version, weight if colon else "1")]
    if not equals or not all(number.isascii() and number.isdigit() for number in numbers):
        fail(f"{text!r} must be ALIAS=VERSION, ALIAS=VERSION:WEIGHT,VERSION:WEIGHT or ALIAS=.", 2)
    if not shares:
        return alias, None
    if len(shares) == 1:
        return alias, int(shares[0][0])
    return alias, {version: int(weight or 1) for version, _, weight in shares}
