"""Shared parts of commands: options, the client of a server, and errors in the words of the command line."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from manylora.cli.table import show
from manylora.errors import AdapterError, ClientError, ConfigError, ManyloraError

if TYPE_CHECKING:
    from manylora.client import Client

URL = Annotated[
    str | None,
    typer.Option(
        "--url",
        envvar="MANYLORA_URL",
        help="Address of the server. [default: http://127.0.0.1:8000]",
    ),
]
KEY = Annotated[str | None, typer.Option("--key", envvar="MANYLORA_KEY", help="API key.")]
SERVER = Annotated[
    str | None,
    typer.Option("--server", help="Behind a gateway: the replica whose engine is shown."),
]
JSON = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
LIMIT = Annotated[
    list[str] | None,
    typer.Option(
        "--limit",
        metavar="NAME=NUMBER",
        help="A limit, as requests_per_minute=60; repeat for more.",
    ),
]
TENANT = Annotated[
    str | None, typer.Option("--tenant", help="With the admin key: the tenant to act for.")
]
FILES = {"config": "adapter_config.json", "weights": "adapter_model.safetensors"}
"""File of an adapter by the first part of a finding's code."""
FAILURE = 1
"""Exit status of a failure."""
BAD_INPUT = 2
"""Exit status of wrong input."""
INPUT_STATUSES = frozenset({400, 413, 422})
NO_ANSWER = frozenset(
    {"unreachable", "untrusted_certificate", "upload.interrupted", "not_manylora"}
)
WORDS = {
    "url=": "--url",
    "key=": "--key",
    "?tenant=": "--tenant ",
    "group_by": "--by",
    "activate=false": "--no-activate",
    "Push again": "Run the command again",
}
"""Words of the API and its client, with those of the command line."""
FILTERS = frozenset({"start", "end", "bucket", "tz", "top", "status", "adapter", "expires_at"})
"""Fields of the API that are options with the same name."""


@dataclass(frozen=True, slots=True)
class ServerCall:
    """A command's call of a server, made from the options that all such commands have."""

    client: Client
    as_json: bool

    def show(
        self, body: Mapping[str, Any] | Sequence[Mapping[str, Any]], columns: Sequence[str]
    ) -> None:
        """Print a body as JSON, or these columns of it."""
        show(body, self.as_json, columns)

    def tell(self, text: str, body: Mapping[str, Any] | None = None) -> None:
        """Print what was done, or the server's answer as JSON."""
        if self.as_json:
            show(body or {}, True, ())
        else:
            typer.echo(text)


def connect(
    tenant: TENANT = None, url: URL = None, key: KEY = None, as_json: JSON = False
) -> ServerCall:
    """Make the call of a server from the options of a command."""
    from manylora.client import Client

    return ServerCall(Client(url, key, tenant), as_json)


def with_options(
    command: Callable[..., None], added: Sequence[inspect.Parameter], make: Callable[..., object]
) -> Callable[..., None]:
    """Give a command further options, from which its first argument is made.

    Args:
        command: Its other parameters are options and arguments of its own.
        added: Parameters of the further options.
        make: Makes the first argument from them.
    """
    _, *own = inspect.signature(command, eval_str=True).parameters.values()
    parameters = [each.replace(kind=each.KEYWORD_ONLY) for each in (*own, *added)]

    @wraps(command)
    def run(**given: Any) -> None:  # noqa: ANN401 - as typer read them
        options = {each.name: given.pop(each.name) for each in added}
        command(make(**options), **given)

    run.__annotations__ = {each.name: each.annotation for each in parameters}
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return run


def tenant_command(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the options of `connect`; its first argument is the call that they make."""
    shared = inspect.signature(connect, eval_str=True).parameters
    return with_options(command, [*shared.values()], connect)


def admin_command(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the options of `connect` but `--tenant`; its first argument is the call that they make."""
    shared = inspect.signature(connect, eval_str=True).parameters
    return with_options(command, [*shared.values()][1:], connect)


def fail(message: str, status: int = BAD_INPUT) -> NoReturn:
    """Print a message on stderr and exit."""
    typer.echo(f"manylora: {message}", err=True)
    raise typer.Exit(status)


def fail_with(error: ManyloraError, as_json: bool = False) -> NoReturn:
    """Print an error in the words of the command line and exit. `as_json` prints an adapter's findings as JSON too."""
    if not isinstance(error, ClientError):
        fail(error.message, BAD_INPUT if isinstance(error, AdapterError | ConfigError) else FAILURE)
    if error.findings:
        refuse("the adapter", error.findings, as_json)
    reason = f"{error.message} ({error.code})" if error.status else error.message
    for word, own in WORDS.items():
        reason = reason.replace(word, own)
        error.hint = error.hint.replace(word, own)
    if error.param in FILTERS:
        reason = reason.replace(error.param, f"--{error.param.replace('_', '-')}", 1)
    is_input = (
        error.code not in NO_ANSWER if error.status is None else error.status in INPUT_STATUSES
    )
    fail(f"{reason} {error.hint}".rstrip(), BAD_INPUT if is_input else FAILURE)


def refuse(
    adapter: str,
    findings: Sequence[Mapping[str, Any]],
    as_json: bool,
    files: Mapping[str, str] = FILES,
) -> NoReturn:
    """Print all findings about an adapter, as a numbered list on stderr, and exit with 2."""
    first = findings[0]
    if as_json:
        message = f"{first['message']} {first['hint']}"
        typer.echo(
            json.dumps(
                {"valid": False, "code": first["code"], "message": message, "findings": findings}
            )
        )
    lines = [f"{adapter} cannot be served:"]
    for number, finding in enumerate(findings, 1):
        file = files.get(finding["code"].partition(".")[0], "")
        where = "" if not file or finding["message"].startswith(file) else f"{file}: "
        lines.append(f"{number:3}. {where}{finding['message']} ({finding['code']})")
        lines.append(f"     Hint: {finding['hint']}")
    fail("\n".join(lines))


def limits_of(words: Sequence[str]) -> dict[str, int | None]:
    """Read limits given as `name=value`; `none` removes a limit. Other words end the command."""
    limits: dict[str, int | None] = {}
    for word in words:
        found = re.fullmatch(r"(\w+)=(\d+|none)", word, re.ASCII)
        if found is None:
            fail(
                "a limit is written NAME=NUMBER, with a whole number from 0 as in requests_per_minute=60, or NAME=none "
                f"for no limit; got {word!r}."
            )
        limits[found[1]] = None if found[2] == "none" else int(found[2])
    return limits
