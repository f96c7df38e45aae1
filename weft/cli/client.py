"""What the client commands share: options, HTTP calls with errors as messages, tables and JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from weft.cli.table import print_rows

if TYPE_CHECKING:
    import httpx

URL = Annotated[str, typer.Option("--url", envvar="WEFT_URL", help="Where the server listens.")]
KEY = Annotated[str | None, typer.Option("--key", envvar="WEFT_KEY", help="API key.")]
JSON = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
LIMIT = Annotated[list[str] | None, typer.Option("--limit", help="name=NUMBER, as requests_per_minute=60; repeat.")]
TENANT = Annotated[str | None, typer.Option("--tenant", help="For the admin key: the tenant to act for.")]
FILES = {"config": "adapter_config.json", "weights": "adapter_model.safetensors"}
"""An adapter's files as the server knows them, by the beginning of the codes of what is wrong with them."""
DEFAULT_URL = "http://127.0.0.1:8000"
TIMEOUT_S = 600.0
BAD_INPUT = frozenset({400, 413, 422})
NO_CONTENT = 204


def call(url: str, key: str | None, method: str, path: str, **arguments: Any) -> Any:  # noqa: ANN401 - JSON
    """Call the server.

    Args:
        url: Where it listens.
        key: The API key.
        method: HTTP method.
        path: Path of the route.
        arguments: As httpx takes them: `json`, `params`, `data`, `files`. Parameters that are None are left out.

    Returns:
        The parsed body; None when there is none.

    Raises:
        typer.Exit: It refused (2 for bad input, 1 for all else) or cannot be reached (1); the reason was printed.
    """
    return body_of(reach(url, key, method, path, **arguments), url, key)


def reach(url: str, key: str | None, method: str, path: str, **arguments: Any) -> httpx.Response:  # noqa: ANN401 - JSON
    """Call the server as `call` does, for its answer whatever that says; where there is none, the command ends."""
    import httpx

    try:
        return send(url, key, method, path, **arguments)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        fail(unreachable(url, error), 1)


def unreachable(url: str, error: Exception) -> str:
    """Why there is no answer, and what to do."""
    return f"cannot reach {url}: {str(error).rstrip('.')}. Is `weft serve` running there? Set --url or WEFT_URL."


def send(url: str, key: str | None, method: str, path: str, **arguments: Any) -> httpx.Response:  # noqa: ANN401 - JSON
    """Call the server as `call` does, and leave it to the caller what to make of the answer, or of there being none.

    Raises:
        httpx.HTTPError, httpx.InvalidURL: There is none.
    """
    import httpx

    arguments["params"] = {name: value for name, value in (arguments.get("params") or {}).items() if value is not None}
    headers = {**authorization(key), **arguments.pop("headers", {})}
    return httpx.request(method, url.rstrip("/") + path, headers=headers, timeout=TIMEOUT_S, **arguments)


def authorization(key: str | None) -> dict[str, str]:
    """The header that carries a key; a key that no header can carry ends the command."""
    if key and not (key.isascii() and key.isprintable()):
        fail("the API key must be printable ASCII; set --key or WEFT_KEY to the key as it was shown.", 2)
    return {"authorization": f"Bearer {key}"} if key else {}


def body_of(answer: httpx.Response, url: str, key: str | None, as_json: bool = False) -> Any:  # noqa: ANN401 - JSON
    """The parsed body, None when there is none; a refusal ends the command.

    `as_json` prints what is wrong with an adapter as JSON, too.
    """
    if answer.is_error:
        if findings := _findings(answer):
            refuse("the adapter", findings, as_json)
        fail(reason_of(answer, key), 2 if answer.status_code in BAD_INPUT else 1)
    return _body(answer, url) if answer.status_code != NO_CONTENT else None


def limits_of(words: Sequence[str]) -> dict[str, int | None]:
    """Limits given as `name=value`, where `none` takes a limit away.

    Raises:
        typer.Exit: A word is not of this form; the reason was printed.
    """
    limits: dict[str, int | None] = {}
    for word in words:
        name, _, value = word.partition("=")
        if not name or not (value == "none" or (value.isascii() and value.isdigit())):
            fail(f"a limit is name=NUMBER or name=none, got {word!r}.", 2)
        limits[name] = None if value == "none" else int(value)
    return limits


def fail(message: str, code: int) -> NoReturn:
    """Print the reason on stderr and exit."""
    typer.echo(f"weft: {message}", err=True)
    raise typer.Exit(code)


def refuse(
    adapter: str, findings: Sequence[Mapping[str, Any]], as_json: bool, files: Mapping[str, str] = FILES
) -> NoReturn:
    """Print all that is wrong with an adapter, on stderr as a numbered list, and exit with 2."""
    first = findings[0]
    if as_json:
        message = f"{first['message']} {first['hint']}"
        typer.echo(json.dumps({"valid": False, "code": first["code"], "message": message, "findings": findings}))
    lines = [f"{adapter} cannot be served:"]
    for number, finding in enumerate(findings, 1):
        file = files.get(finding["code"].partition(".")[0], "")
        where = "" if not file or finding["message"].startswith(file) else f"{file}: "
        lines.append(f"{number:3}. {where}{finding['message']} ({finding['code']})")
        lines.append(f"     Hint: {finding['hint']}")
    fail("\n".join(lines), 2)


def show(body: Any, as_json: bool, columns: Sequence[str]) -> None:  # noqa: ANN401 - JSON
    """Print a body: as JSON, or these columns, as a table of a list and as lines of one object.

    Nothing is cut or folded, so that keys and digests can be copied whole.
    """
    if as_json:
        typer.echo(json.dumps(body, indent=2, ensure_ascii=False))
    elif isinstance(body, dict) and body.get("object") == "list":
        print_rows(
            [[column.upper() for column in columns], *([_cell(row.get(c)) for c in columns] for row in body["data"])]
        )
    else:
        print_rows([[column, _cell(body.get(column))] for column in columns])


def _cell(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, dict):
        return " ".join(f"{name}={_inner(inner)}" for name, inner in value.items()) or "-"
    return _inner(value) or "-"


def _inner(value: object) -> str:
    """What stands behind a name, as the commands take it: `1:95,2:5`, `none`."""
    if isinstance(value, dict):
        parts = {
            name: f"({_inner(inner)})" if isinstance(inner, dict) else _inner(inner) for name, inner in value.items()
        }
        return ",".join(f"{name}:{part}" for name, part in parts.items())
    if isinstance(value, list):
        return ",".join(map(str, value))
    if isinstance(value, float):
        return f"{value:.3f}"
    return {None: "none", True: "yes", False: "no"}[value] if value is None or isinstance(value, bool) else str(value)


def _body(answer: httpx.Response, url: str) -> dict[str, Any]:
    try:
        body = answer.json()
    except ValueError:
        body = None
    if not isinstance(body, dict):
        fail(f"what answers at {url} is no Weft server. Set --url or WEFT_URL.", 1)
    return body


def _findings(answer: httpx.Response) -> list[dict[str, Any]]:
    try:
        return list(answer.json()["error"].get("findings") or ())
    except (ValueError, KeyError, TypeError, AttributeError):
        return []


def reason_of(answer: httpx.Response, key: str | None) -> str:
    """Why the server refused, as it says itself."""
    try:
        error = answer.json()["error"]
        reason, param = f"{error['message']} ({error['code']})", error.get("param")
    except (ValueError, KeyError, TypeError):
        reason, param = f"the server answered {answer.status_code}; is it Weft? Set --url or WEFT_URL.", None
    if answer.status_code == 401 and not key:
        reason += " Set --key or WEFT_KEY."
    if answer.status_code in BAD_INPUT and param == "tenant":
        reason += " Here that is --tenant."
    return reason
