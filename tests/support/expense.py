"""What requests cost a running server: CPU time and memory of its process and of the children that check uploads."""

from __future__ import annotations

import contextlib
import sqlite3
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from weft_server import DEMO_MODEL, WeftServer, engines

POLL_S = 0.002


@dataclass
class Expense:
    """Complete once the block has ended."""

    server_cpu_s: float = 0.0
    server_bytes: int = 0
    """By how much the server's memory grew at its peak."""
    check_cpu_s: float = 0.0
    check_peaks: dict[int, int] = field(default_factory=dict)
    """Peak memory in bytes of each child that came and went."""


@contextlib.contextmanager
def measured(server: WeftServer) -> Iterator[Expense]:
    """Measure what happens within the block."""
    process = psutil.Process(server.process.pid)
    lasting = {child.pid for child in process.children()}
    expense, ended = Expense(), threading.Event()
    watcher = threading.Thread(target=_watch, args=(process.pid, lasting, expense, ended))
    Path(f"/proc/{process.pid}/clear_refs").write_text("5")  # the peak starts anew
    memory, cpu = process.memory_info().rss, process.cpu_times()
    watcher.start()
    try:
        yield expense
    finally:
        ended.set()
        watcher.join()
        after = process.cpu_times()
        expense.server_cpu_s = after.user + after.system - cpu.user - cpu.system
        expense.check_cpu_s = after.children_user + after.children_system - cpu.children_user - cpu.children_system
        expense.server_bytes = (_peak(process.pid) or 0) - memory


def _watch(pid: int, lasting: set[int], expense: Expense, ended: threading.Event) -> None:
    while not ended.wait(POLL_S):
        for child in map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()):
            if child not in lasting and (peak := _peak(child)):
                expense.check_peaks[child] = peak


def _peak(pid: int) -> int | None:
    """Most memory that a process had, in bytes; None once it is gone."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) << 10
    return None


@dataclass(frozen=True)
class Trace:
    """All that a refused request must leave as it was."""

    files: frozenset[str]
    rows: tuple[tuple[str, int], ...]
    """How many each table has."""
    engine: tuple[int, str, str]
    """Process id, boot id, and the base's digest."""

    @classmethod
    def of(cls, server: WeftServer) -> Trace:
        """What there is now."""
        state = server.engine()
        return cls(
            files=frozenset(
                str(path) for path in server.data_dir.rglob("*") if path.is_file() and path.suffix != ".journal"
            ),
            rows=tuple(_rows(server.data_dir / "registry.sqlite")),
            engine=(engines(server)[0].pid, state["boot_id"], state["ready"]["base"]["digest"]),
        )


def _rows(database: Path) -> Iterator[tuple[str, int]]:
    with contextlib.closing(sqlite3.connect(f"file:{database}?mode=ro", uri=True)) as connection:
        tables = connection.execute("SELECT name FROM sqlite_master WHERE type = 'table' ORDER BY name").fetchall()
        for (table,) in tables:
            if table == "audit_log" or table.startswith("usage_"):  # these tell of the good requests between
                continue
            yield table, connection.execute(f'SELECT count(*) FROM "{table}"').fetchone()[0]


def base_logprobs(server: WeftServer, tenant: str) -> list[Any]:
    """Numbers that only the very same base computes."""
    body = {"model": DEMO_MODEL.name, "prompt": "Where is my order?", "max_tokens": 8, "temperature": 0, "logprobs": 5}
    answer = server.tenant(tenant).post("/v1/completions", json={**body, "echo": True})
    assert answer.status_code == 200, answer.text
    return [answer.json()["choices"][0]["logprobs"]]
