"""The course of `manylora demo`: start a server, play the round, show it, send traffic, serve on. Prints all of it."""

from __future__ import annotations

import json
import shlex
import signal
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from manylora import demo
from manylora.cli.demo.round import ADAPTERS, BASE_NAME, Round, holds_everybody, play
from manylora.cli.demo.traffic import DURATION_S, MAX_AT_ONCE, send_questions
from manylora.client import Client
from manylora.config import environment
from manylora.errors import ConfigError, ManyloraError
from manylora.launch.server_process import HOST, running_server
from manylora.server.auth.admin_key import admin_key

USUAL_PORT = 8000
SNIPPET_QUESTION = "How much is the scarf?"
SERVE_OPTIONS = (
    "--model",
    str(demo.MODEL),
    "--served-model-name",
    BASE_NAME,
    "--dtype",
    "float32",
    "--memory-gib",
    "0.25",
    "--set",
    "memory.host_gib=0.25",
    # The model is too small to share among threads.
    "--set",
    "model.threads=1",
    # Whatever the environment says: it is the keys that tell tenants and traffic apart.
    "--auth",
    "on",
)


def run_demo(*, once: bool, with_traffic: bool, port: int | None, data_dir: Path) -> int:
    """Start, ask, show, and unless `once` send traffic and serve on; returns the exit status.

    Raises:
        ManyloraError: Something did not work; the message says what to do.
    """
    started = time.monotonic()
    console = Console(highlight=False, soft_wrap=True)
    signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # a script's background job starts with it ignored
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:  # as nohup leaves it
            signal.signal(number, signal.default_int_handler)
    try:
        with running_server(data_dir, SERVE_OPTIONS, port=choose_port(port)) as server:
            with console.status("Starting the server with the demo model ..."):
                server.wait_ready()
            with console.status("Uploading five adapters and asking all at once ..."):
                key = admin_key(data_dir, environment()).secret
                shown = play(server.url, key)
            show_answers(console, shown, time.monotonic() - started)
            if not once:
                show_how_to_go_on(console, shown, server.url, key, data_dir)
                if with_traffic:
                    send_traffic(console, server.url, shown.keys)
                status = server.wait()
                raise ManyloraError(
                    f"The server ended by itself with status {status}; see {data_dir / 'serve.log'}."
                )
    except KeyboardInterrupt:
        console.print("Stopped; running requests were finished.")
        return 0
    return 0 if all(answer.is_expected for answer in shown.answers) else 1


def choose_port(wanted: int | None) -> int:
    """A port that is free now; where none is wanted, the usual one or, if that is in use, any.

    Raises:
        ConfigError: The wanted one is in use.
    """
    for port in [USUAL_PORT, 0] if wanted is None else [wanted]:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((HOST, port))
            except OSError as error:
                reason = error.strerror
                continue
            return int(probe.getsockname()[1])
    raise ConfigError(
        f"Port {wanted} cannot be used: {reason}. Choose another --port, or leave it out.",
        param="port",
    )


def show_answers(console: Console, shown: Round, seconds: float) -> None:
    """The answers side by side, and which step made them."""
    table = Table(title=f'"{shown.question}"', title_justify="left", show_lines=True)
    for column in ("model", "tenant", "adapter", "answer"):
        table.add_column(column, overflow="fold")
    for answer in shown.answers:
        text = Text(answer.text, style="bold" if answer.model == BASE_NAME else "")
        table.add_row(answer.model, answer.tenant, answer.detail or "none: the base", text)
    console.print(table, soft_wrap=False)
    console.print(describe_step(shown.shared, len(shown.answers)))
    wrong = [answer.model for answer in shown.answers if not answer.is_expected]
    if wrong:
        console.print(f"Not the recorded reference answer: {', '.join(wrong)}.", style="red")
    console.print(f"{seconds:.1f} s from start to answers.")


def describe_step(shared: Mapping[str, Any] | None, speakers: int) -> str:
    """One sentence on the batch behind the answers."""
    if shared is None:
        return "The engine reported no step of this round."
    sentence = (
        f"Step {shared['step']} computed {shared['requests']} requests in one batch: {shared['adapters']} different "
        f"adapters and {shared['base_requests']} of the base."
    )
    if holds_everybody(shared):
        return sentence
    return f"{sentence} No step computed more; all {speakers} were never at work at once."


def show_how_to_go_on(
    console: Console, shown: Round, url: str, admin_key: str, data_dir: Path
) -> None:
    """Addresses, keys and snippets that can be pasted."""
    console.print()
    console.print(f"Serving on {url}; data and log in {data_dir.resolve()}. Ctrl-C ends it.")
    with Client(url, admin_key) as client:
        link = client.request("POST", "/v1/session/links")[
            "link"
        ]  # signs its first visitor in as admin
    console.print(f"Dashboard (opens once, within 10 minutes): {url}/?range=1h#link={link}")
    again = f"manylora dashboard --url {url} --data-dir {shlex.quote(str(data_dir))}"
    console.print(f"Another link to it: {again}")
    for tenant, key in shown.keys.items():
        models = ", ".join(answer.model for answer in shown.answers if answer.tenant == tenant)
        console.print(f"Key of {tenant}: {key}   ({models})")
    console.print(f"Admin key: {admin_key}")
    console.print("\nWith curl:\n")
    console.print(Text(curl_line(url, shown.keys[ADAPTERS["pirate"]], "pirate")))
    console.print("\nWith openai-python:\n")
    console.print(Text(openai_snippet(url, shown.keys[ADAPTERS["french"]], "french")))
    console.print()


def send_traffic(console: Console, url: str, keys: Mapping[str, str]) -> None:
    """Send the traffic, and say how many requests were answered.

    If it cannot go on, this is said, and the server is left to its user.
    """
    console.print(
        f"Demo traffic now runs for {DURATION_S} s, to fill the charts: at most {MAX_AT_ONCE} questions at once."
    )
    try:
        num_answers = send_questions(url, keys)
    except ManyloraError as error:
        console.print(f"The demo traffic ended early: {error.message}", style="red")
        return
    console.print(f"Demo traffic is done: {num_answers} answers.")


def curl_line(url: str, key: str, model: str) -> str:
    """A request as one line for a POSIX shell."""
    messages = [{"role": "user", "content": SNIPPET_QUESTION}]
    body = json.dumps({"model": model, "messages": messages, "max_tokens": 64, "temperature": 0})
    return (
        f"curl -s {url}/v1/chat/completions -H 'Authorization: Bearer {key}' "
        f"-H 'Content-Type: application/json' -d '{body}'"
    )


def openai_snippet(url: str, key: str, model: str) -> str:
    """A request with the openai package."""
    return f"""\
from openai import OpenAI

client = OpenAI(base_url="{url}/v1", api_key="{key}")
answer = client.chat.completions.create(
    model="{model}",
    messages=[{{"role": "user", "content": "{SNIPPET_QUESTION}"}}],
    max_tokens=64,
    temperature=0,
)
print(answer.choices[0].message.content)"""
