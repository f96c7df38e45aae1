"""HTTP by hand, for what no client library would send: on one socket, with the answer that came back."""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit


@dataclass(frozen=True)
class RawAnswer:
    """What came before the server closed, and how much it let us send."""

    raw: bytes
    sent: int
    """Body bytes that our side of the connection took."""

    @property
    def status(self) -> int:
        return int(self.raw.split(b" ", 2)[1])

    @property
    def code(self) -> str:
        body: dict[str, Any] = json.loads(self.raw.partition(b"\r\n\r\n")[2])
        return str(body["error"]["code"])


def head_of(method: str, path: str, key: str | None, **headers: str) -> bytes:
    """The head of a request, the only one of its connection; underscores in names of headers stand for hyphens."""
    lines = [f"{method} {path} HTTP/1.1", "Host: x", "Connection: close"]
    lines += [f"Authorization: Bearer {key}"] if key else []
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode()


def upload_head(key: str | None, length: int | None) -> bytes:
    """The head of an upload with boundary `b`; without a length it comes in chunks."""
    size = {"Transfer_Encoding": "chunked"} if length is None else {"Content_Length": str(length)}
    return head_of(
        "POST", "/v1/adapters", key, Content_Type="multipart/form-data; boundary=b", **size
    )


def form_part(name: str, content: bytes, filename: str | None = None) -> bytes:
    """One part of a multipart body with boundary `b`."""
    file = f'; filename="{filename}"' if filename else ""
    return (
        f'--b\r\nContent-Disposition: form-data; name="{name}"{file}\r\n\r\n'.encode()
        + content
        + b"\r\n"
    )


def form(*parts: tuple[str, bytes]) -> bytes:
    """A whole multipart body with boundary `b`."""
    return b"".join(form_part(name, content) for name, content in parts) + b"--b--\r\n"


def chunked(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """The pieces as HTTP chunks, without the last one."""
    for piece in pieces:
        yield b"%x\r\n%b\r\n" % (len(piece), piece)


@contextlib.contextmanager
def connected(url: str, timeout_s: float = 60.0, send_bytes: int = 4096) -> Iterator[socket.socket]:
    """A connection whose own side keeps about `send_bytes`; the fewer, the nearer is what it takes to what arrives."""
    address = urlsplit(url)
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_bytes)
        sock.settimeout(timeout_s)
        sock.connect((address.hostname, address.port))
        yield sock


def exchange(
    url: str, head: bytes, body: Iterable[bytes] = (), send_bytes: int = 4096
) -> RawAnswer:
    """Send until the server closes or there is no more, then read what it said."""
    with connected(url, send_bytes=send_bytes) as sock:
        sock.sendall(head)
        sent = 0
        with contextlib.suppress(ConnectionError):
            for piece in body:
                rest = memoryview(piece)
                while rest:
                    count = sock.send(rest)
                    sent, rest = sent + count, rest[count:]
        return RawAnswer(read_all(sock), sent)


def read_all(sock: socket.socket) -> bytes:
    """Everything until the server closes."""
    answer = b""
    with contextlib.suppress(ConnectionError):
        while piece := sock.recv(65536):
            answer += piece
    return answer
