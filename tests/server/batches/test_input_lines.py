from __future__ import annotations

import json
import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from blob_io import store
from manylora.adapters.blobs.local import LocalBlobs
from manylora.server.batches import input_lines
from manylora.server.batches.input_lines import check_input, read_lines
from manylora.server.process.threads import LongWork

pytestmark = pytest.mark.anyio
URL = "/v1/completions"


def line(**changes: Any) -> bytes:
    return json.dumps(
        {"custom_id": "a", "method": "POST", "url": URL, "body": {}, **changes}
    ).encode()


async def check(
    folder: Path, content: bytes, max_lines: int = 10, max_bytes: int = 300
) -> tuple[int, list[Any]]:
    blobs, work = LocalBlobs(folder), partial(LongWork(2).run, tenant="t")
    sha256 = store(blobs, content)
    return await check_input(
        blobs, sha256, URL, max_lines=max_lines, max_bytes=max_bytes, work=work
    )


@pytest.mark.parametrize(
    ("content", "code", "number"),
    [
        (b"", "empty_file", None),
        (b"\n \n", "empty_file", None),
        (line() + b"\n\n" + line(), "duplicate_custom_id", 3),
        (b'{"a": 1, "a": 2}', "invalid_json_line", 1),
        (b"[]", "invalid_json_line", 1),
        (b'{"custom_id": "a"}', "missing_required_parameter", 1),
        (line(model="x"), "unsupported_parameter", 1),
        (line(custom_id=7), "invalid_value", 1),
        (line(custom_id="x" * 513), "line_too_long", 1),
        (line(method="GET"), "invalid_value", 1),
        (line(url="/v1/chat/completions"), "invalid_value", 1),
        (line(body=[]), "invalid_value", 1),
        (line(body={"stream": True}), "invalid_value", 1),
        (b"\n".join(line(custom_id=str(n)) for n in range(11)), "too_many_lines", 11),
        (line() + b"\n" + b"x" * 5000 + b"\n" + line(custom_id="b"), "line_too_long", 2),
    ],
)
async def test_what_is_wrong_with_an_input_is_told_with_its_line(
    content: bytes, code: str, number: int | None, tmp_path: Path
) -> None:
    _, errors = await check(tmp_path, content)
    assert [(error["code"], error["line"]) for error in errors] == [(code, number)]


async def test_a_sound_input_is_counted_whatever_its_line_ends(tmp_path: Path) -> None:
    content = (
        b"\r\n".join(line(custom_id=str(n), body={"prompt": "\0"}) for n in range(3)) + b"\n\n"
    )
    assert await check(tmp_path, content) == (3, [])


async def test_lines_are_cut_at_their_limit_wherever_pieces_end(tmp_path: Path) -> None:
    blobs = LocalBlobs(tmp_path)
    content = b"\n".join([b"a" * 700_000, b"b" * 3_000_000, b"c" * 10, b"d" * 1_500_000])
    groups = read_lines(blobs, store(blobs, content), 1_000_000)
    found = [(number, raw[:1], len(raw)) async for lines in groups for number, raw in lines]
    assert found == [(1, b"a", 700_000), (2, b"b", 1_000_001), (3, b"c", 10), (4, b"d", 1_000_001)]


async def test_errors_are_told_only_so_many(tmp_path: Path) -> None:
    _, errors = await check(tmp_path, b"{}\n" * 9_999, max_lines=10_000)
    assert len(errors) == 50


async def test_a_large_file_is_checked_off_the_event_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, parse = set[threading.Thread](), input_lines.parse_line

    def watched(*args: Any) -> Any:
        seen.add(threading.current_thread())
        return parse(*args)

    monkeypatch.setattr(input_lines, "parse_line", watched)
    content = (
        b"\n".join(line(custom_id=str(n), body={"prompt": "x" * 500}) for n in range(4_000))
        + b"\n" * 1_000_000
    )
    assert await check(tmp_path, content, max_lines=5_000, max_bytes=1_000) == (4_000, [])
    assert threading.main_thread() not in seen
