"""What `weft adapter push` does: an upload in pieces that goes on where a broken connection left it."""

from __future__ import annotations

import hashlib
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weft.cli.client import FILES, body_of, call, fail, reach, send

if TYPE_CHECKING:
    import httpx

PAUSES_S = (0, 1, 1, 2, 4, 8, 15, 30)
"""Before each try to send a file."""
PIECE_BYTES = 1 << 18
CREATED = 201
AGAIN = frozenset({408, 409, 429, 503})
"""Answers that pass: the server has not noticed the broken connection yet, or is busy."""


def push_files(
    paths: Sequence[Path], draft: dict[str, Any], url: str, key: str | None, tenant: str | None, as_json: bool
) -> tuple[Any, bool]:
    """Upload the files of an adapter. Ends the command where that cannot be.

    Args:
        paths: Config and weights.
        draft: Name, description and whether the version becomes the current one.
        url: Where the server listens.
        key: The API key.
        tenant: For the admin key.
        as_json: Whether what is wrong with the adapter is printed as JSON, too.

    Returns:
        The adapter as JSON, and whether its version is new.
    """
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TransferSpeedColumn

    params = {"tenant": tenant}
    named = dict(zip(FILES.values(), paths, strict=True))  # whatever they are called here
    files: dict[str, Any] = {
        name: {"size": path.stat().st_size, "sha256": _sha256(path)} for name, path in named.items()
    }
    upload = _begun(call(url, key, "GET", "/v1/uploads", params=params)["data"], draft, files)
    if upload is None:
        upload = call(url, key, "POST", "/v1/uploads", json={**draft, "files": files}, params=params)
    place = f"/v1/uploads/{upload['id']}"

    def ask(method: str, end: str, **arguments: Any) -> httpx.Response:  # noqa: ANN401 - JSON
        return send(url, key, method, place + end, params=params, **arguments)

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=Console(stderr=True), disable=not sys.stderr.isatty()) as progress:
        for name, path in named.items():
            task = progress.add_task(path.name, total=files[name]["size"])

            def show(done: int, task: TaskID = task) -> None:
                progress.update(task, completed=done)

            _send(name, path, ask, show, lambda answer: body_of(answer, url, key))
    answer = reach(url, key, "POST", f"{place}/complete", params=params)
    return body_of(answer, url, key, as_json), answer.status_code == CREATED


def _begun(uploads: list[dict[str, Any]], draft: dict[str, Any], files: dict[str, Any]) -> dict[str, Any] | None:
    """The upload of the very same that an earlier run left behind."""

    def is_same(upload: dict[str, Any]) -> bool:
        announced = {name: {"size": file["size"], "sha256": file["sha256"]} for name, file in upload["files"].items()}
        is_open = upload["state"] == "uploading"
        return is_open and announced == files and all(upload[name] == value for name, value in draft.items())

    return next(filter(is_same, uploads), None)


def _send(
    name: str,
    path: Path,
    ask: Callable[..., httpx.Response],
    show: Callable[[int], None],
    read: Callable[[httpx.Response], Any],
) -> None:
    import httpx

    size = path.stat().st_size
    for pause_s in PAUSES_S:
        time.sleep(pause_s)
        try:
            upload = read(ask("GET", ""))
            start = upload["files"][name]["received"]
            show(start)
            if name not in upload["missing"]:
                return
            headers = {"content-range": f"bytes {start}-{size - 1}/{size}", "content-length": str(size - start)}
            answer = ask("PUT", f"/files/{name}", content=_pieces(path, start, show), headers=headers)
        except httpx.TransportError:
            continue
        if answer.status_code not in AGAIN:
            read(answer)
            return
    fail(f"the connection broke {len(PAUSES_S)} times; run the command again to go on.", 1)


def _pieces(path: Path, start: int, show: Callable[[int], None]) -> Iterator[bytes]:
    with path.open("rb") as file:
        file.seek(start)
        while piece := file.read(PIECE_BYTES):
            yield piece
            show(file.tell())


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
