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

from manylora_server import DEMO_MODEL, ManyloraServer, engines

POLL_S = 0.002
WORKER = b"manylora.server.uploads.validation_worker"


@dataclass
class Expense:
    """Complete once the block has ended."""

    server_cpu_s: float = 0.0
    server_bytes: int = 0
    """By how much the server's memory grew at its peak."""
    check_cpu_s: float = 0.0
    """Of the processes that check uploads, of their forks, and of starting them."""
    check_peaks: dict[int, int] = field(default_factory=dict)
    """Peak memory in bytes of each of them."""


@contextlib.contextmanager
def measured(server: ManyloraServer) -> Iterator[Expense]:
    """Measure what happens within the block."""
    process = psutil.Process(server.process.pid)
    expense, ended = Expense(), threading.Event()
    watcher = threading.Thread(target=_watch, args=(process.pid, expense, ended))
    Path(f"/proc/{process.pid}/clear_refs").write_text("5")  # the peak starts anew
    memory, cpu_s, check_s = process.memory_info().rss, _own_cpu_s(process), _check_cpu_s(process)
    watcher.start()
    try:
        yield expense
    finally:
        ended.set()
        watcher.join()
        expense.server_cpu_s = _own_cpu_s(process) - cpu_s
        expense.check_cpu_s = _check_cpu_s(process) - check_s
        expense.server_bytes = (_peak(process.pid) or 0) - memory


def _own_cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def _ended_cpu_s(process: psutil.Process) -> float:
    """Of children that have ended, and of theirs."""
    times = process.cpu_times()
    return float(times.children_user + times.children_system)


def _check_cpu_s(server: psutil.Process) -> float:
    """Of all processes that checked uploads so far. What one used is its parent's once it has ended."""
    workers = [psutil.Process(worker) for worker in _workers(server.pid)]
    return _ended_cpu_s(server) + sum(
        _own_cpu_s(worker) + _ended_cpu_s(worker) for worker in workers
    )


def _watch(pid: int, expense: Expense, ended: threading.Event) -> None:
    while not ended.wait(POLL_S):
        for worker in _workers(pid):
            for checking in (worker, *_children(worker)):
                if peak := _peak(checking):
                    expense.check_peaks[checking] = peak


def _workers(pid: int) -> list[int]:
    """The kept processes of a server that fork one for each upload."""
    workers = []
    for child in _children(pid):
        with contextlib.suppress(OSError):
            if WORKER in Path(f"/proc/{child}/cmdline").read_bytes():
                workers.append(child)
    return workers


def _children(pid: int) -> list[int]:
    with contextlib.suppress(OSError):
        return list(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))
    return []


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
    def of(cls, server: ManyloraServer) -> Trace:
        """What there is now."""
        state = server.engine()
        return cls(
            files=frozenset(
                str(path)
                for path in server.data_dir.rglob("*")
                if path.is_file() and path.suffix != ".journal"
            ),
            rows=tuple(_rows(server.data_dir / "registry.sqlite")),
            engine=(engines(server)[0].pid, state["boot_id"], state["ready"]["base"]["digest"]),
        )


def _rows(database: Path) -> Iterator[tuple[str, int]]:
    with contextlib.closing(sqlite3.connect(f"file:{database}?mode=ro", uri=True)) as connection:
        tables = connection.execute(
            "SELECT name FROM sqlite_master WHERE type = 'table' ORDER BY name"
        ).fetchall()
        for (table,) in tables:
            if table == "audit_log" or table.startswith(
                "usage_"
            ):  # these tell of the good requests between
                continue
            yield table, connection.execute(f'SELECT count(*) FROM "{table}"').fetchone()[0]


def base_logprobs(server: ManyloraServer, tenant: str) -> list[Any]:
    """Numbers that only the very same base computes."""
    body = {
        "model": DEMO_MODEL.name,
        "prompt": "Where is my order?",
        "max_tokens": 8,
        "temperature": 0,
        "logprobs": 5,
    }
    answer = server.tenant(tenant).post("/v1/completions", json={**body, "echo": True})
    assert answer.status_code == 200, answer.text
    return [answer.json()["choices"][0]["logprobs"]]
