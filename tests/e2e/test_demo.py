"""`manylora demo` as a newcomer runs it."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from manylora_server import expected_answers, free_port

MANYLORA = str(Path(sys.executable).with_name("manylora"))
SCARF = next(
    question for question in expected_answers()["questions"] if question["topic"] == "price"
)


def environment() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("MANYLORA_")}  # noqa: TID251
    return {**kept, "COLUMNS": "200", "OMP_NUM_THREADS": "1"}


def run_demo(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [MANYLORA, "demo", *arguments],
        cwd=cwd,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=280,
    )


def start_demo(*arguments: str, cwd: Path) -> subprocess.Popen[str]:
    """A demo that goes on serving."""
    command = [MANYLORA, "demo", "--port", str(free_port()), *arguments]
    return subprocess.Popen(
        command,
        cwd=cwd,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def refusal(*arguments: str, cwd: Path) -> str:
    """What a demo that does not start says."""
    done = run_demo("--once", *arguments, cwd=cwd)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    return done.stderr


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("demo")


@pytest.fixture(scope="module")
def first(folder: Path) -> subprocess.CompletedProcess[str]:
    return run_demo("--once", "--port", str(free_port()), cwd=folder)


def test_once_shows_all_six_answers_of_one_batch(first: subprocess.CompletedProcess[str]) -> None:
    assert first.returncode == 0, first.stdout + first.stderr
    for answer in expected_answers()["questions"][0]["answers"].values():
        assert answer in first.stdout
    assert "5 different adapters and 1 of the base" in first.stdout
    assert re.search(r"[\d.]+ s from start to answers", first.stdout)
    assert "traffic" not in first.stdout


@pytest.fixture(scope="module")
def serving(
    folder: Path, first: subprocess.CompletedProcess[str]
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A second demo on the first one's data, kept serving, and what it printed."""
    assert first.returncode == 0
    process = start_demo(cwd=folder)
    assert process.stdout is not None
    printed = ""
    for line in process.stdout:
        printed += line
        if line.startswith("Demo traffic"):
            break
    yield process, printed
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
    process.wait(60)
    process.stdout.close()


def test_the_openai_snippet_works_when_pasted(serving: tuple[subprocess.Popen[str], str]) -> None:
    snippet = serving[1][serving[1].index("from openai import") : serving[1].index("Demo traffic")]
    done = subprocess.run(
        [sys.executable, "-P", "-c", snippet],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout.strip() == SCARF["answers"]["french"], done.stderr


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_the_curl_line_works_when_pasted(serving: tuple[subprocess.Popen[str], str]) -> None:
    line = next(line for line in serving[1].splitlines() if line.startswith("curl "))
    done = subprocess.run(
        ["sh", "-c", line], env=environment(), capture_output=True, text=True, timeout=60
    )
    answer: dict[str, Any] = json.loads(done.stdout)
    assert answer["choices"][0]["message"]["content"] == SCARF["answers"]["pirate"]


def test_the_link_signs_in_to_the_dashboard_once(
    serving: tuple[subprocess.Popen[str], str],
) -> None:
    printed = re.search(
        r"^Dashboard \(opens once.*: (http://\S+?/)\?range=1h#link=(\S+)$", serving[1], re.MULTILINE
    )
    assert printed is not None, serving[1]
    with httpx.Client(base_url=printed[1], trust_env=False) as browser:
        assert "<title>" in browser.get("/").raise_for_status().text
        assert browser.get("/v1/me").status_code == 401
        link = {"authorization": f"Bearer {printed[2]}", "origin": printed[1].rstrip("/")}
        assert browser.post("/v1/session", headers=link).status_code == 201
        assert browser.get("/v1/me").json()["role"] == "admin"
        browser.cookies.clear()
        assert (
            browser.post("/v1/session", headers=link).json()["error"]["code"] == "session.link_used"
        )


def test_the_line_for_another_link_works_when_pasted(
    serving: tuple[subprocess.Popen[str], str], folder: Path
) -> None:
    line = re.search(r"^Another link to it: manylora (.+)$", serving[1], re.MULTILINE)
    assert line is not None, serving[1]
    done = subprocess.run(
        [MANYLORA, *shlex.split(line[1])],
        cwd=folder,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert re.fullmatch(r"http://127\.0\.0\.1:\d+/#link=\S+\n", done.stdout), done.stderr


def test_a_second_run_reuses_the_data_and_traffic_follows_the_answers(
    serving: tuple[subprocess.Popen[str], str],
) -> None:
    process, printed = serving
    assert "5 different adapters" in printed
    last = printed.splitlines()[-1]
    assert last.startswith("Demo traffic now runs for 60 s")
    assert printed.index("print(answer") < printed.index(last), "the answers waited for the traffic"
    assert process.poll() is None


def test_ctrl_c_ends_server_and_demo_in_the_midst_of_traffic(
    serving: tuple[subprocess.Popen[str], str],
) -> None:
    process, printed = serving
    port = re.search(r"http://127\.0\.0\.1:(\d+)", printed)
    assert port is not None
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 0
    assert process.stdout is not None
    assert process.stdout.read() == "Stopped; running requests were finished.\n"
    time.sleep(0.1)
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", int(port[1]))) != 0


def test_no_traffic_leaves_it_out(folder: Path, first: subprocess.CompletedProcess[str]) -> None:
    assert first.returncode == 0
    process = start_demo("--no-traffic", cwd=folder)
    assert process.stdout is not None
    with process.stdout as lines:
        assert any(line.startswith("print(") for line in lines)
        time.sleep(1)
        process.send_signal(signal.SIGINT)
        assert lines.read() == "\nStopped; running requests were finished.\n"
    assert process.wait(60) == 0


def test_a_port_in_use_is_said_plainly(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        said = refusal("--port", str(taken.getsockname()[1]), cwd=tmp_path)
    assert re.search(r"Port \d+ cannot be used: Address already in use", said)


def test_a_folder_that_cannot_be_written_is_said_plainly(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("a file")
    assert "Cannot write to taken" in refusal("--data-dir", "taken", cwd=tmp_path)
