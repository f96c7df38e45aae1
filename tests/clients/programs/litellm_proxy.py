"""LiteLLM's proxy before Manylora, asked with the clients of OpenAI and Anthropic."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
from feature import (
    ADAPTER,
    ANSWER,
    BASE,
    CARD_QUESTION,
    KEY,
    QUESTION,
    TOOLS,
    V1,
    Card,
    equal,
    feature,
    is_scarf,
)

MASTER_KEY = "sk-proxy"
START_TIMEOUT_S = 120.0


@contextmanager
def proxy() -> Iterator[str]:
    """A running proxy; its URL."""
    port = random.SystemRandom().randrange(15_000, 30_000)
    params = {"api_base": V1, "api_key": KEY}
    models = [
        {
            "model_name": f"{prefix}/{name}",
            "litellm_params": {**params, "model": f"{prefix}/{name}"},
        }
        for prefix in ("openai", "hosted_vllm")
        for name in (BASE, ADAPTER)
    ]
    settings = {"model_list": models, "general_settings": {"master_key": MASTER_KEY}}
    with tempfile.TemporaryDirectory() as folder, (Path(folder) / "log").open("wb") as log:
        config = Path(folder) / "config.yaml"
        config.write_text(json.dumps(settings))
        program = Path(sys.executable).with_name("litellm")
        command = [
            str(program),
            "--config",
            str(config),
            "--host",
            "127.0.0.1",
            "--port",
            str(port),
        ]
        running = subprocess.Popen(
            [*command, "--telemetry", "False"],
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ},
            cwd=folder,
        )
        try:
            url = f"http://127.0.0.1:{port}"
            wait(url, running, Path(folder) / "log")
            yield url
        finally:
            running.terminate()
            running.wait(timeout=30)


def wait(url: str, running: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline and running.poll() is None:
        try:
            if httpx.get(f"{url}/health/liveliness", timeout=5).status_code == 200:
                return
        except httpx.TransportError:
            time.sleep(0.2)
    raise RuntimeError(f"the proxy did not start:\n{log.read_text()[-3000:]}")


def user(text: str) -> list[Any]:
    return [{"role": "user", "content": text}]


def ask(url: str, client: openai.OpenAI, prefix: str) -> None:
    adapter, base = f"{prefix}/{ADAPTER}", f"{prefix}/{BASE}"
    asked: Any = {"model": adapter, "messages": user(QUESTION), "temperature": 0}

    with feature(f"{prefix}/ chat"):
        equal(client.chat.completions.create(**asked).choices[0].message.content, ANSWER)

    with feature(f"{prefix}/ stream"):
        chunks = client.chat.completions.create(
            **asked, stream=True, stream_options={"include_usage": True}
        )
        equal(
            "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices),
            ANSWER,
        )

    with feature(f"{prefix}/ completions"):
        equal(
            len(client.completions.create(model=base, prompt="The shop", max_tokens=4).choices), 1
        )

    with feature(f"{prefix}/ parse"):
        filled = client.chat.completions.parse(
            model=base, messages=user(CARD_QUESTION), response_format=Card, temperature=0
        )
        equal(is_scarf(filled.choices[0].message.parsed), True)

    with feature(f"{prefix}/ tools"):
        forced = client.chat.completions.create(
            **{**asked, "model": base}, tools=TOOLS, tool_choice="required"
        )
        equal(
            forced.choices[0].message.tool_calls[0].function.name in ("where_is", "price_of"), True
        )

    with feature(f"{prefix}/ responses"):
        equal(
            client.responses.create(model=adapter, input=QUESTION, temperature=0).output_text,
            ANSWER,
        )

    with feature(f"{prefix}/ messages"):
        answer = httpx.post(
            f"{url}/v1/messages",
            json={**asked, "max_tokens": 64},
            headers={"x-api-key": MASTER_KEY},
            timeout=60,
        )
        equal(answer.json().get("content", answer.text)[0]["text"], ANSWER)


with (
    proxy() as url,
    openai.OpenAI(base_url=f"{url}/v1", api_key=MASTER_KEY, max_retries=0) as client,
):
    for prefix in ("openai", "hosted_vllm"):
        ask(url, client, prefix)
