"""Clients that send a byte now and then. usage: slow_clients.py URL KEY COUNT SECONDS

A program of its own, so that it takes no time from whoever measures the server meanwhile. Prints one JSON object: how
many connections of each kind the server ended by itself, and with which statuses.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections import Counter
from urllib.parse import urlsplit

GAP_S = 0.2


def openings(key: str) -> dict[str, tuple[bytes, bytes]]:
    """What each kind of client sends at once, and what it trickles after that."""
    form = b"Content-Type: multipart/form-data; boundary=b\r\nContent-Length: 100000\r\n"
    upload = b"POST /v1/adapters HTTP/1.1\r\nHost: x\r\n" + form
    text = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 100000\r\n"
    credential = f"Authorization: Bearer {key}\r\n\r\n".encode()
    part = b'--b\r\nContent-Disposition: form-data; name="weights"\r\n\r\n'
    return {
        "nothing": (b"", b""),
        "head": (b"GET /health HTTP/1.1\r\nX: ", b"y"),
        "upload without key": (upload + b"\r\n", b"x"),
        "text without key": (text + b"\r\n", b"x"),
        "upload": (upload + credential + part, b"x"),
        "text": (text + credential, b" "),
        "chunks": (
            upload.replace(b"Content-Length: 100000", b"Transfer-Encoding: chunked") + credential,
            b"1\r\n-\r\n",
        ),
    }


async def trickle(url: str, opening: bytes, piece: bytes, seconds: float) -> str:
    """Send until the server ends it or the time is up: the status of its answer, `closed` without one, or `open`."""
    address = urlsplit(url)
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    answer = asyncio.create_task(reader.read())
    try:
        writer.write(opening)
        async with asyncio.timeout(seconds):
            while not answer.done():
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(GAP_S)
        said = await answer
    except TimeoutError:
        return "open"
    except ConnectionError:  # what it said is lost where it was still being sent to
        return "closed"
    finally:
        writer.close()
    return said.split(b" ")[1].decode() if said else "closed"


async def run(url: str, key: str, count: int, seconds: float) -> dict[str, Counter[str]]:
    kinds = openings(key)
    names = [list(kinds)[index % len(kinds)] for index in range(count)]
    print("started", flush=True)
    ends = await asyncio.gather(*(trickle(url, *kinds[name], seconds) for name in names))
    return {
        name: Counter(end for other, end in zip(names, ends, strict=True) if other == name)
        for name in kinds
    }


if __name__ == "__main__":
    print(
        json.dumps(asyncio.run(run(sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4]))))
    )
