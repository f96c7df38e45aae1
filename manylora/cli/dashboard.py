"""`manylora dashboard`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from manylora.cli.options import JSON, KEY, URL, connect, fail

DataDir = Annotated[
    Path,
    typer.Option(help="Data folder of the server. Without --key, the admin key in it is used."),
]


def dashboard(
    url: URL = None,
    key: KEY = None,
    data_dir: DataDir = Path("manylora-data"),
    as_json: JSON = False,
) -> None:
    """Print a link that opens the dashboard with the rights of the key. It works once, within ten minutes."""
    call = connect(None, url, key or _admin_key(data_dir), as_json)
    made = call.client.request("POST", "/v1/session/links")
    address = f"{call.client.url}/#link={made['link']}"
    call.tell(address, {"url": address, "expires_at": made["expires_at"]})


def _admin_key(data_dir: Path) -> str:
    from manylora.config import environment
    from manylora.server.auth.admin_key import FILE, VARIABLE

    place = data_dir / FILE
    if given := environment().get(VARIABLE):
        return given
    try:
        return place.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        fail(
            f"no key: set --key or MANYLORA_KEY, or name the server's folder with --data-dir (there is no {place})."
        )
