"""`vllm bench serve` over completions and chats, of the base and of an adapter: 20 requests of 20."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path

from feature import ADAPTER, BASE, KEY, URL, equal, feature
from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser

os.environ["OPENAI_API_KEY"] = KEY
PROMPTS, INPUT, OUTPUT = 20, 32, 16


def bench(backend: str, endpoint: str, *more: str) -> None:
    """Run it, and read its result."""
    result = Path(tempfile.mkdtemp()) / "result.json"
    where = ["--backend", backend, "--base-url", URL, "--endpoint", endpoint, "--model", BASE]
    load = ["--dataset-name", "random", f"--num-prompts={PROMPTS}", f"--random-input-len={INPUT}"]
    load += [
        f"--random-output-len={OUTPUT}",
        "--ignore-eos",
        "--tokenizer",
        os.environ["MANYLORA_MODEL_PATH"],
    ]
    saved = ["--save-result", "--result-dir", str(result.parent), "--result-filename", result.name]
    # The command itself asks for a package of the name vllm; the one for CPUs has another.
    parser = FlexibleArgumentParser()
    add_cli_args(parser)
    main(parser.parse_args([*where, *load, *saved, *more]))
    done = json.loads(result.read_text())
    equal(
        (done["completed"], done["failed"], done["total_output_tokens"]),
        (PROMPTS, 0, PROMPTS * OUTPUT),
    )


with feature("`--backend openai`"):
    bench("openai", "/v1/completions")

with feature("`--backend openai-chat`"):
    bench("openai-chat", "/v1/chat/completions")

with feature("`--lora-modules`"):
    bench("openai", "/v1/completions", "--lora-modules", ADAPTER)
