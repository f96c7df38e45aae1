"""A trainer pushes a version at every step while rollouts run: each gets the tokens of the version it began with.

The reference is transformers with PEFT in float32, on the prompt and the tokens that came: a token must be the
likeliest, unless two are too close to tell.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import torch
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict

from idleness import PATIENCE_S, wait_until
from manylora.client import Client
from manylora_server import STEADY_MALLOC, ManyloraServer, engines, manylora_server
from tiny_models import ALL_LINEAR, TINY_VOCAB_SIZE, load_reference, make_model

VERSIONS = 200
ROLLOUTS = 32
NUM_TOKENS = 112
NUM_PROMPTS = 16
PROMPT_TOKENS = 12
MIN_MARGIN = 2e-4
"""In logits: tokens that are closer to the likeliest say nothing about equality."""
SETTLED = 100
"""Versions after which memory is read for the first time."""
BETWEEN = 10
"""Versions between two looks at memory."""
STRETCH = 5
"""Looks between two that are compared. What a version costs for good is in every stretch, what fills late in some."""
MOST_GROWTH = 8 << 20
"""Bytes by which all processes may grow, in the stretch in which they grew least."""
SETTINGS = {
    "model.threads": 1,
    "model.dtype": "float32",
    "memory.gib": 0.05,
    "memory.host_gib": 0.02,
}


@dataclass(frozen=True, slots=True)
class Rollout:
    """One request, and what came."""

    prompt: int
    digest: str
    tokens: list[int]


@dataclass
class Training:
    """A policy with LoRA, its versions, and the rollouts that ran meanwhile."""

    base: Path
    server: ManyloraServer
    model: Any = None
    client: Client = field(init=False)
    weights: dict[str, dict[str, torch.Tensor]] = field(default_factory=dict)
    """By digest."""
    order: list[str] = field(default_factory=list)
    rollouts: list[Rollout] = field(default_factory=list)
    prompts: list[list[int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.connect()
        draw = random.Random(7)
        self.prompts = [
            [draw.randrange(256) for _ in range(PROMPT_TOKENS)] for _ in range(NUM_PROMPTS)
        ]
        config = LoraConfig(
            r=8, lora_alpha=16, target_modules=list(ALL_LINEAR), task_type="CAUSAL_LM"
        )
        self.model = get_peft_model(load_reference(self.base), config).eval()

    def connect(self) -> None:
        """Take a client of the server, which every push uses."""
        self.client = Client(self.server.url, self.server.tenants["acme"])

    def step(self, number: int) -> str:
        """Change the policy and push it, in the three lines of the documentation; returns the digest."""
        torch.manual_seed(number)
        for name, parameter in self.model.named_parameters():
            if "lora_" in name:
                torch.nn.init.normal_(parameter, std=0.15)
        tensors = {
            name: tensor.clone() for name, tensor in get_peft_model_state_dict(self.model).items()
        }
        made = self.client.push_ephemeral(
            "policy", tensors, self.model.peft_config["default"], keep=2
        )
        assert made["is_new"]
        self.weights[made["digest"]] = tensors
        self.order.append(made["digest"])
        return str(made["digest"])

    def roll_out(self, client: httpx.Client, stopped: threading.Event, index: int) -> None:
        """Ask without pause; each answer is kept."""
        number = index
        while not stopped.is_set():
            prompt, number = number % NUM_PROMPTS, number + 1
            body = {
                "model": "policy",
                "prompt": self.prompts[prompt],
                "max_tokens": NUM_TOKENS,
                "temperature": 0,
            }
            flags = {"ignore_eos": True, "return_token_ids": True}
            answer = client.post("/v1/completions", json={**body, **flags})
            assert answer.status_code == 200, answer.text
            (choice,) = answer.json()["choices"]
            digest = answer.headers["x-manylora-adapter-digest"]
            self.rollouts.append(Rollout(prompt, digest, choice["token_ids"]))

    def check(self) -> None:
        """Compare each rollout with its version, all of a version in one forward pass."""
        for digest in dict.fromkeys(rollout.digest for rollout in self.rollouts):
            set_peft_model_state_dict(self.model, self.weights[digest])
            distinct = {
                (own.prompt, tuple(own.tokens)) for own in self.rollouts if own.digest == digest
            }
            rows = torch.tensor(
                [[*self.prompts[prompt], *tokens] for prompt, tokens in sorted(distinct)]
            )
            with torch.inference_mode():
                logits = self.model(rows).logits[:, PROMPT_TOKENS - 1 : -1, :TINY_VOCAB_SIZE]
            chosen = logits.gather(2, rows[:, PROMPT_TOKENS:, None])[..., 0]
            assert bool((logits.max(-1).values - chosen < MIN_MARGIN).all()), digest


@pytest.fixture
def training(tmp_path: Path) -> Iterator[Training]:
    base = make_model(tmp_path / "base", "qwen2", max_position_embeddings=128, num_hidden_layers=1)
    with manylora_server(
        tmp_path / "server", model=base, settings=SETTINGS, **STEADY_MALLOC
    ) as server:
        server.tenant("acme")
        yield Training(base, server)


def size(server: ManyloraServer) -> tuple[int, int]:
    """Resident bytes and open files of the server's processes."""
    parent = psutil.Process(server.process.pid)
    family = [parent, *parent.children(recursive=True)]
    return sum(each.memory_info().rss for each in family), sum(each.num_fds() for each in family)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_rollouts_get_the_tokens_of_the_version_they_began_with(training: Training) -> None:
    server, stopped, sizes = training.server, threading.Event(), []
    training.step(0)
    clients = [server.client(server.tenants["acme"]) for _ in range(ROLLOUTS)]
    with ThreadPoolExecutor(ROLLOUTS) as threads:
        running = [
            threads.submit(training.roll_out, each, stopped, index)
            for index, each in enumerate(clients)
        ]
        try:
            for number in range(1, VERSIONS):
                training.step(number)
                if number >= SETTLED and number % BETWEEN == 0:
                    sizes.append(size(server))
        finally:
            stopped.set()
        for each in running:
            each.result()
    for client in clients:
        client.close()
    used = {rollout.digest for rollout in training.rollouts}
    assert len(training.order) == VERSIONS
    assert len(used) > VERSIONS // 4
    assert (
        len({tuple(rollout.tokens) for rollout in training.rollouts if rollout.prompt == 0})
        > len(used) // 8
    )
    training.check()
    memory, files = zip(*sizes, strict=True)
    growth = [later - earlier for earlier, later in zip(memory, memory[STRETCH:], strict=False)]
    assert min(growth) < MOST_GROWTH, growth
    assert files[-1] - files[0] < ROLLOUTS + 8  # connections come and go
    assert [version["version"] for version in training.client.list_versions("policy")] == [
        VERSIONS,
        VERSIONS - 1,
    ]
    assert list((server.data_dir / "blobs").rglob("*/*/*/*")) == []


@pytest.mark.slow
def test_versions_outlive_the_engine_and_not_the_server(training: Training) -> None:
    server = training.server
    for number in range(2):
        training.step(number)
    stopped = threading.Event()

    def ask_once() -> None:
        with server.client(server.tenants["acme"]) as client:
            stopped.clear()
            before = len(training.rollouts)
            thread = threading.Thread(target=training.roll_out, args=(client, stopped, 0))
            thread.start()
            wait_until(lambda: len(training.rollouts) > before)
            stopped.set()
            thread.join()

    (engine,) = engines(server)
    engine.kill()
    wait_until(lambda: engines(server) not in ([], [engine]))
    server.wait_ready(PATIENCE_S)
    ask_once()
    training.check()
    assert {rollout.digest for rollout in training.rollouts} == {training.order[1]}

    data = server.data_dir
    family = psutil.Process(server.process.pid).children(recursive=True)
    server.process.kill()
    server.process.wait()
    _, alive = psutil.wait_procs(family, PATIENCE_S)
    assert alive == []
    with manylora_server(data.parent, model=training.base, settings=SETTINGS) as again:
        training.server, key = again, server.tenants["acme"]
        again.tenants["acme"] = key
        training.connect()
        with again.client(key) as client:
            gone = client.post("/v1/completions", json={"model": "policy", "prompt": [1, 2]})
            assert (gone.status_code, gone.json()["error"]["code"]) == (404, "model_not_found")
            assert client.get("/v1/adapters").json()["data"] == []
        digest = training.step(2)
        server = again
        ask_once()
        training.check()
        assert training.rollouts[-1].digest == digest
