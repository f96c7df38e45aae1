"""The course of `weft demo`: start a server, play the round, show it, send traffic, and serve on."""

from __future__ import annotations

import asyncio
import signal
import time
from pathlib import Path

from rich.console import Console

from weft import demo
from weft.cli.demo.check import check_usage
from weft.cli.demo.round import BASE_NAME, play
from weft.cli.demo.show import show_answers, show_how_to_go_on, show_traffic, show_traffic_begins
from weft.cli.demo.traffic import replay
from weft.errors import WeftError
from weft.server.server_process import server_process

SERVE_OPTIONS = (
    *("--model", str(demo.MODEL), "--served-model-name", BASE_NAME, "--dtype", "float32", "--memory-gib", "0.25"),
    *("--set", "memory.host_gib=0.25", "--set", "model.threads=1"),  # the model is too small to share among threads
    *("--auth", "on"),  # whatever the environment says: it is the keys that tell tenants and traffic apart
)


def run_demo(*, once: bool, with_traffic: bool, port: int | None, data_dir: Path) -> int:
    """Start, ask, show, and unless `once` send traffic and serve on; returns the exit status.

    Raises:
        WeftError: Something did not work; the message says what to do.
    """
    started = time.monotonic()
    console = Console(highlight=False)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a script's background job starts with it ignored
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:  # as nohup leaves it
            signal.signal(number, signal.default_int_handler)
    try:
        with server_process(port, data_dir, SERVE_OPTIONS) as server:
            with console.status("Starting the server with the demo model ..."):
                server.wait_ready()
            with console.status("Uploading five adapters and asking all at once ..."):
                shown = play(server.url, server.admin_key())
            show_answers(console, shown, time.monotonic() - started)
            if not once:
                show_how_to_go_on(console, shown, server.url, server.admin_key(), data_dir)
                if with_traffic:
                    _send_traffic(console, server.url, server.admin_key(), data_dir)
                status = server.wait()
                raise WeftError(f"The server ended by itself with status {status}; see {data_dir / 'serve.log'}.")
    except KeyboardInterrupt:
        console.print("Stopped; running requests were finished.")
        return 0
    return 0 if all(answer.is_expected for answer in shown.answers) else 1


def _send_traffic(console: Console, url: str, admin_key: str, data_dir: Path) -> None:
    """Replay the traffic and show what was compared; if it cannot go on, say so and leave the server to its user."""
    show_traffic_begins(console, data_dir)
    try:
        traffic = asyncio.run(replay(url, admin_key))
        check = check_usage(url, admin_key, traffic)
    except WeftError as error:
        console.print(f"The demo traffic ended early: {error.message}", style="red", soft_wrap=True)
    else:
        show_traffic(console, traffic, check)
