"""A minute of traffic through the demo's server, which fills the charts of the dashboard."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

from manylora import demo
from manylora.cli.demo.round import BASE_NAME, ask
from manylora.client import Client

DURATION_S = 60
MAX_AT_ONCE = 6
RHYTHM = (2, 3, 5, 3, 0, 0, 1, 4, 8, 6, 2, 1)
"""Requests in each second, repeated."""
SPEAKERS = {
    ("pirate", "harbour"): 9,
    (BASE_NAME, "harbour"): 5,
    ("french", "atelier"): 5,
    (BASE_NAME, "atelier"): 3,
    ("shout", "harbour"): 3,
    ("json", "harbour"): 2,
    ("haiku", "atelier"): 2,
}
"""Model and tenant, by weight."""


def send_questions(url: str, keys: Mapping[str, str]) -> int:
    """Ask base and adapters questions of customers, the same each time; returns how many were answered.

    Args:
        url: A server where `play` was, without /v1.
        keys: Key of each tenant.

    Raises:
        ClientError: The server refused a question, or does not answer any more.
    """
    rng = random.Random(0)  # noqa: S311 - the same traffic each time
    questions = json.loads(demo.QUESTIONS.read_text(encoding="utf-8"))["questions"]
    clients = {tenant: Client(url, key) for tenant, key in keys.items()}
    asked = []
    threads = ThreadPoolExecutor(MAX_AT_ONCE)
    try:
        for second in range(DURATION_S):
            for _ in range(RHYTHM[second % len(RHYTHM)]):
                ((model, tenant),) = rng.choices([*SPEAKERS], [*SPEAKERS.values()])
                words = (clients[tenant], model, rng.choice(questions), rng.choice((6, 48, 96)))
                asked.append(threads.submit(ask, *words))
            time.sleep(1)
        return len([answer.result() for answer in asked])
    finally:
        threads.shutdown(cancel_futures=True)  # Ctrl-C asks none of the questions that still wait
