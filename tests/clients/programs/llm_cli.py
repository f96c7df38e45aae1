"""The `llm` command with an entry in extra-openai-models.yaml: prompts, conversations, schemas and tools."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from feature import (
    ADAPTER,
    AGENT_QUESTION,
    ANSWER,
    BASE,
    CARD_QUESTION,
    KEY,
    QUESTION,
    V1,
    Card,
    equal,
    feature,
    has_both,
    is_scarf,
)

FUNCTIONS = """
def where_is(item: str) -> str:
    "Tells where an item is."
    return "shelf 8"

def price_of(item: str) -> str:
    "Tells the price of an item."
    return "44"
"""
folder = Path(tempfile.mkdtemp())
common = {
    "api_base": V1,
    "api_key_name": "manylora",
    "supports_tools": True,
    "supports_schema": True,
}
models = [{"model_id": name, "model_name": name, **common} for name in (BASE, ADAPTER)]
models.append(
    {
        "model_id": "plain",
        "model_name": BASE,
        "api_base": V1,
        "api_key_name": "manylora",
        "completion": True,
    }
)
(folder / "extra-openai-models.yaml").write_text(json.dumps(models))
(folder / "keys.json").write_text(json.dumps({"manylora": KEY}))


def llm(*arguments: str) -> str:
    """What the command prints."""
    command = [str(Path(sys.executable).with_name("llm")), *arguments]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        env={**os.environ, "LLM_USER_PATH": str(folder)},
        check=False,
    )
    if done.returncode:
        raise AssertionError(done.stderr[-400:])
    return done.stdout.strip()


greedy = ("-o", "temperature", "0")

with feature("prompt"):
    equal(llm("-m", ADAPTER, *greedy, QUESTION), ANSWER)

with feature("--no-stream"):
    equal(llm("-m", ADAPTER, *greedy, "--no-stream", QUESTION), ANSWER)

with feature("-c"):
    equal(bool(llm("-m", ADAPTER, *greedy, "-c", QUESTION)), True)

with feature("completion"):
    equal(bool(llm("-m", "plain", "-o", "max_tokens", "8", "The shop")), True)

with feature("--schema"):
    equal(
        is_scarf(
            llm(
                "-m", BASE, *greedy, "--schema", json.dumps(Card.model_json_schema()), CARD_QUESTION
            )
        ),
        True,
    )

with feature("--schema streamed off"):
    concise = "item, material, price int, in_stock bool"
    equal(
        is_scarf(llm("-m", BASE, *greedy, "--no-stream", "--schema", concise, CARD_QUESTION)), True
    )

with feature("--functions"):
    equal(has_both(llm("-m", BASE, *greedy, "--functions", FUNCTIONS, AGENT_QUESTION)), True)

with feature("-T"):
    told = llm("-m", BASE, *greedy, "-T", "llm_version", "--td", "What is the llm_version of llm?")
    equal(bool(told), True)
