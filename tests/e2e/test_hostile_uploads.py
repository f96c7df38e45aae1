"""Malformed uploads of every kind against a real server, each within its budget and without a trace."""

from __future__ import annotations

import contextlib
import resource
import sqlite3
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from bad_upload import EVIL_REGEX, BadUpload
from bad_uploads import bad_uploads, good_upload
from expense import Expense, Trace, base_logprobs, measured
from fake_engine import demo_ready
from lora_files import config_bytes
from manylora_server import ManyloraServer, manylora_server, upload_bytes
from mutated_adapters import mutant
from raw_http import (
    RawAnswer,
    chunked,
    connected,
    exchange,
    form_part,
    head_of,
    read_all,
    upload_head,
)

MOST_CPU = 5
"""Times the CPU time of a good upload."""
MEMORY_BYTES = 64 << 20
LIMIT = 128 << 20
"""Of the server's uploads."""
GIB = 1 << 30
SEEDS = range(160, 200)
BASE = demo_ready().base
GOOD = good_upload(BASE)
PER_CODE = 3
"""Bad files that are sent of each kind of refusal; the reader's own tests try all."""
CASES: dict[str, list[BadUpload]] = {}
for bad in bad_uploads(BASE):
    CASES.setdefault(bad.code, []).append(bad)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ManyloraServer]:
    """A server for this file; its base must compute the same before and after all tests."""
    folder = tmp_path_factory.mktemp("rows")
    with manylora_server(folder, "--set", f"server.max_upload_bytes={LIMIT}") as running:
        before = base_logprobs(running, "acme")
        yield running
        assert base_logprobs(running, "acme") == before


@pytest.fixture(scope="module")
def client(server: ManyloraServer) -> httpx.Client:
    return server.tenant("acme")


@pytest.fixture(scope="module")
def good(server: ManyloraServer, client: httpx.Client) -> Expense:
    """What the first good upload costs: most of it is the start of the process that checks it."""
    with measured(server) as expense:
        upload_good(client)
    return expense


@pytest.fixture(scope="module")
def inferring_key(server: ManyloraServer, client: httpx.Client) -> str:
    """A key of the same tenant that may not upload."""
    return server.new_key("acme", scopes=["infer"])


@pytest.fixture(autouse=True)
def without_a_trace(
    server: ManyloraServer, client: httpx.Client, inferring_key: str, good: Expense
) -> Iterator[None]:
    """Nothing stays of what a test tries, and a good upload goes in right after."""
    before = Trace.of(server)
    yield
    deadline = time.monotonic() + 10
    while Trace.of(server) != before and time.monotonic() < deadline:
        time.sleep(0.05)  # the client has its answer before the server has closed its files
    assert Trace.of(server) == before
    upload_good(client)


def upload_good(client: httpx.Client) -> None:
    answer = upload_bytes(client, "good", GOOD.config, GOOD.weights)
    assert answer.status_code == 201, answer.text
    assert client.delete("/v1/adapters/good").status_code == 204


def assert_cheap(expense: Expense, good: Expense) -> None:
    assert expense.server_cpu_s + expense.check_cpu_s < MOST_CPU * (
        good.server_cpu_s + good.check_cpu_s
    )
    assert expense.server_bytes < MEMORY_BYTES
    assert (
        max(expense.check_peaks.values(), default=0) - max(good.check_peaks.values()) < MEMORY_BYTES
    )


def outcome(answer: httpx.Response | RawAnswer) -> tuple[int, str]:
    if isinstance(answer, RawAnswer):
        return answer.status, answer.code
    return answer.status_code, answer.json()["error"]["code"]


@pytest.mark.parametrize("code", CASES)
def test_bad_files(server: ManyloraServer, client: httpx.Client, good: Expense, code: str) -> None:
    for case in CASES[code][:: -(-len(CASES[code]) // PER_CODE)]:
        upload = case.make()
        with measured(server) as expense:
            answer = upload_bytes(client, "bad", upload.config, upload.weights)
        assert outcome(answer) == (case.status, case.code), (case.name, answer.text)
        assert_cheap(expense, good)
    assert list(server.data_dir.parent.rglob("PWNED")) == []


def test_a_pattern_is_never_run(
    server: ManyloraServer, client: httpx.Client, good: Expense
) -> None:
    with measured(server) as expense:
        answer = upload_bytes(client, "bad", config_bytes(target_modules=EVIL_REGEX), GOOD.weights)
    assert answer.status_code == 201
    assert_cheap(expense, good)
    assert client.delete("/v1/adapters/bad").status_code == 204


def test_a_length_over_the_limit_is_refused_unread(server: ManyloraServer, good: Expense) -> None:
    for length in (LIMIT + (2 << 20), GIB, 10**18, 10**19, 10**40):
        with measured(server) as expense:
            answer = exchange(server.url, upload_head(server.tenants["acme"], length))
        expected = (413, "upload.too_large") if length < 2**64 else (400, "invalid_http")
        assert outcome(answer) == expected
        assert_cheap(expense, good)


def test_chunks_beyond_the_limit(server: ManyloraServer, good: Expense) -> None:
    endless = chunked([form_part("weights", b"")[:-2], *[bytes(1 << 20)] * 1024])
    with measured(server) as expense:
        answer = exchange(
            server.url, upload_head(server.tenants["acme"], None), endless, send_bytes=1 << 20
        )
    assert outcome(answer) == (413, "upload.too_large")
    assert answer.sent < LIMIT + (16 << 20)
    assert_cheap(expense, good)


@pytest.mark.parametrize("length", [GIB, None], ids=["length", "chunked"])
@pytest.mark.parametrize(
    "key", [None, "manylora_wrong", "manylora_0123456789abcdef_" + "x" * 43, "for something else"]
)
def test_a_gigabyte_without_a_key_for_it(
    server: ManyloraServer, inferring_key: str, good: Expense, key: str | None, length: int | None
) -> None:
    is_known = key == "for something else"
    pieces = [bytes(1 << 16)] * (GIB >> 16)
    with measured(server) as expense:
        head = upload_head(inferring_key if is_known else key, length)
        answer = exchange(server.url, head, pieces if length else chunked(pieces))
    assert (answer.status, answer.code == "forbidden") == (
        (403, True) if is_known else (401, False)
    )
    assert (
        answer.sent < 1 << 20
    )  # what two kernels keep between us and the server; the server itself takes less
    assert expense.server_bytes < 10 << 20
    assert_cheap(expense, good)


def test_an_upload_that_stalls(server: ManyloraServer, good: Expense) -> None:
    begun = form_part("name", b"bad") + form_part("weights", GOOD.weights)[:5000]
    with measured(server) as expense, connected(server.url) as sock:
        sock.sendall(upload_head(server.tenants["acme"], len(GOOD.weights)) + begun)
        answer = RawAnswer(read_all(sock), len(begun))
    assert outcome(answer) == (408, "upload.timeout")
    assert_cheap(expense, good)


FILENAMES = ["../../../../etc/cron.d/x", "/etc/cron.d/x", "..", "x/../../y", "C:\\x", "a" * 3000]


@pytest.mark.parametrize("filename", FILENAMES, ids=lambda filename: filename[:30])
def test_file_names_are_ignored(
    server: ManyloraServer, client: httpx.Client, filename: str
) -> None:
    parts = [form_part("name", b"bad"), form_part("config", GOOD.config, filename)]
    body = b"".join([*parts, form_part("weights", GOOD.weights, filename), b"--b--\r\n"])
    around = set(server.data_dir.parent.iterdir())
    answer = client.post(
        "/v1/adapters", content=body, headers={"content-type": "multipart/form-data; boundary=b"}
    )
    assert answer.status_code == 201, answer.text
    assert set(server.data_dir.parent.iterdir()) == around
    assert not Path("/etc/cron.d/x").exists()
    assert client.delete("/v1/adapters/bad").status_code == 204


def test_a_disk_that_is_full(server: ManyloraServer, client: httpx.Client, good: Expense) -> None:
    """No file of the server may grow beyond 4 MiB for a while: the same to a writer as a disk without room."""
    limits = resource.prlimit(server.process.pid, resource.RLIMIT_FSIZE)
    resource.prlimit(server.process.pid, resource.RLIMIT_FSIZE, (4 << 20, limits[1]))
    try:
        with measured(server) as expense:
            answer = upload_bytes(client, "bad", GOOD.config, bytes(12 << 20))
    finally:
        resource.prlimit(server.process.pid, resource.RLIMIT_FSIZE, limits)
    assert outcome(answer) == (507, "storage.full")
    assert_cheap(expense, good)


def test_a_database_that_is_away_at_commit(
    server: ManyloraServer, client: httpx.Client, good: Expense
) -> None:
    database = server.data_dir / "registry.sqlite"
    with contextlib.closing(sqlite3.connect(database, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        with measured(server) as expense:
            answer = upload_bytes(client, "bad", GOOD.config, GOOD.weights)
        other.execute("ROLLBACK")
    assert outcome(answer) == (503, "db.unavailable")
    assert int(answer.headers["retry-after"]) >= 1
    assert_cheap(expense, good)


@pytest.mark.parametrize("path", ["/v1/adapters", "/v1/completions"])
@pytest.mark.parametrize("has_key", [True, False], ids=["key", "no key"])
def test_a_million_chunks_of_a_byte(
    server: ManyloraServer, good: Expense, has_key: bool, path: str
) -> None:
    is_upload = path == "/v1/adapters"
    kind = "multipart/form-data; boundary=b" if is_upload else "application/json"
    key = server.tenants["acme"] if has_key else None
    head = head_of("POST", path, key, Content_Type=kind, Transfer_Encoding="chunked")
    begun = next(chunked([form_part("weights", b"x")])) if is_upload else b""
    with measured(server) as expense:
        answer = exchange(
            server.url, head, [begun, b"1\r\nx\r\n" * 1_000_000, b"0\r\n\r\n"], send_bytes=1 << 20
        )
    assert answer.status == (400 if has_key else 401)
    assert expense.server_cpu_s < 2 * MOST_CPU * (good.server_cpu_s + good.check_cpu_s)
    assert expense.server_bytes < MEMORY_BYTES


def test_adapters_with_a_few_changes(server: ManyloraServer, client: httpx.Client) -> None:
    """A sample of what is tried without HTTP by the tens of thousands."""
    with ThreadPoolExecutor(2) as pool:
        ends = Counter(pool.map(lambda seed: end_of(client, seed), SEEDS))
    assert set(ends) <= {201, 413, 422}
    assert ends[201] > 2
    assert ends[422] > len(SEEDS) / 2


def end_of(client: httpx.Client, seed: int) -> int:
    upload = mutant(BASE, seed)
    answer = upload_bytes(client, f"mutant-{seed}", upload.config, upload.weights)
    if answer.status_code == 201:
        body = {"model": f"mutant-{seed}", "prompt": "x", "max_tokens": 1, "logprobs": 1}
        used = client.post("/v1/completions", json=body)
        assert used.status_code == 200, used.text
        assert client.delete(f"/v1/adapters/mutant-{seed}").status_code == 204
    return answer.status_code
