"""Two replicas and a gateway: the answers of one engine, few loads, and what clients see when one of them dies."""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest

from idleness import wait_until
from manylora.server.cluster.loads import ranked
from manylora_cluster import Cluster, manylora_cluster
from manylora_server import DEMO_ADAPTERS, DEMO_NAMES, ManyloraServer, upload_bytes
from postgres_server import fresh_database
from ray_cluster import RayCluster, ray_cluster

pytestmark = pytest.mark.slow

NUM_ADAPTERS = 8
PROMPTS = [
    "What is a harbour?",
    "hello",
    "Name three birds.",
    "Why is the sky blue?",
    "How are you?",
]
NUM_STREAMS = 20
STREAM_TOKENS = 500
KINDS = ("prompt_tokens", "completion_tokens")


@pytest.fixture(scope="module", params=["processes", pytest.param("ray", marks=pytest.mark.ray)])
def cluster(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Cluster]:
    if request.param == "ray":
        pytest.importorskip("ray", reason="docs/cluster.md says how to install Ray")
    folder = tmp_path_factory.mktemp("cluster")
    with (
        ray_cluster(folder, 2)
        if request.param == "ray"
        else manylora_cluster(folder, 2, fresh_database()) as running
    ):
        publish(running.gateway.tenant("acme"))
        yield running


def publish(tenant: httpx.Client) -> None:
    """The demo's adapters, and some of them again with half of their effect, so that all are different."""
    for index in range(NUM_ADAPTERS):
        folder = DEMO_ADAPTERS / DEMO_NAMES[index % len(DEMO_NAMES)]
        config = json.loads((folder / "adapter_config.json").read_bytes())
        config["lora_alpha"] /= 1 + index // len(DEMO_NAMES)
        weights = (folder / "adapter_model.safetensors").read_bytes()
        answer = upload_bytes(tenant, f"adapter{index}", json.dumps(config).encode(), weights)
        assert answer.status_code == 201, answer.text


def ask(client: httpx.Client, model: str, prompt: str, max_tokens: int = 12) -> dict[str, Any]:
    messages = [{"role": "user", "content": prompt}]
    body = {"model": model, "messages": messages, "temperature": 0, "max_tokens": max_tokens}
    answer = client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


@dataclass
class Streamed:
    """What a client got of a stream."""

    text: str = ""
    usage: dict[str, int] = field(default_factory=lambda: dict.fromkeys(KINDS, 0))
    error: str | None = None
    is_done: bool = False
    started: threading.Event = field(default_factory=threading.Event)
    """Set when some tokens have come."""

    @property
    def tokens(self) -> int:
        return self.usage["completion_tokens"]

    def read(self, client: httpx.Client, model: str, prompt: str, max_tokens: int) -> None:
        body = {
            "model": model,
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        }
        with client.stream("POST", "/v1/completions", json=body) as answer:
            if answer.status_code != 200:
                refused = json.loads(answer.read())["error"]
                self.error, self.text = str(refused["code"]), str(refused["message"])
            for line in answer.iter_lines() if self.error is None else ():
                data = line.removeprefix("data: ")
                self.is_done |= data == "[DONE]"
                if line.startswith("data: {"):
                    self._take(json.loads(data))
        self.started.set()

    def _take(self, event: dict[str, Any]) -> None:
        if "error" in event:
            self.error = event["error"]["code"]
            return
        self.text += "".join(choice["text"] for choice in event["choices"])
        self.usage = {kind: event["usage"][kind] for kind in KINDS}
        if self.tokens >= 20:
            self.started.set()


def usage(server: ManyloraServer) -> dict[str, int]:
    totals = server.admin.get("/v1/usage").json()["totals"]
    return {kind: totals[kind] for kind in KINDS}


def wait_for_usage(
    server: ManyloraServer, before: dict[str, int], usages: list[dict[str, int]]
) -> None:
    """Wait until exactly this was billed since `before`: what other replicas have in their journals comes later."""
    wanted = {kind: before[kind] + sum(each[kind] for each in usages) for kind in KINDS}
    wait_until(lambda: usage(server)["completion_tokens"] >= wanted["completion_tokens"])
    wait_until(lambda: usage(server)["prompt_tokens"] >= wanted["prompt_tokens"])
    assert usage(server) == wanted


def test_answers_are_those_of_one_engine_and_adapters_stay_where_they_are(
    cluster: Cluster, server: ManyloraServer
) -> None:
    gateway = cluster.gateway.tenant("acme")
    models = [f"adapter{index}" for index in range(NUM_ADAPTERS)]
    asked = [(model, prompt) for model in models for prompt in PROMPTS]
    one = server.tenant("alone")
    publish(one)
    expected = {pair: ask(one, *pair)["choices"] for pair in asked}
    assert len({json.dumps(choices) for choices in expected.values()}) > len(PROMPTS)
    before = usage(cluster.gateway)
    answers = [ask(gateway, *pair) for pair in asked]
    loads = [  # where several are asked at once, a slow machine brings adapters of busy replicas to the other one
        count
        for name in cluster.replicas
        for path, count in cluster.engine(name)["loads"].items()
        if path.startswith("stored>") and path.endswith(":ok")
    ]
    assert NUM_ADAPTERS <= sum(loads) <= 1.7 * NUM_ADAPTERS
    assert all(len(cluster.engine(name)["residents"]) > 0 for name in cluster.replicas)
    again = random.Random(1).sample(asked, len(asked))
    with ThreadPoolExecutor(4) as pool:
        answers += pool.map(lambda pair: ask(gateway, *pair), again)
    assert [answer["choices"] for answer in answers] == [expected[pair] for pair in asked + again]
    wait_for_usage(cluster.gateway, before, [answer["usage"] for answer in answers])


def test_every_replica_follows_pins_and_deletes(cluster: Cluster) -> None:
    gateway = cluster.gateway.publish("pinner", "pirate", "haiku")
    digest = gateway.get("/v1/adapters/pirate").json()["digest"]

    def pinned() -> list[str]:
        return [
            name
            for name in cluster.replicas
            if any(
                each["digest"] == digest and each["pinned"]
                for each in cluster.engine(name)["residents"]
            )
        ]

    assert gateway.patch("/v1/adapters/pirate", json={"pinned": True}).status_code == 200
    wait_until(lambda: len(pinned()) == 1)
    body = {"pinned": True, "pinned_copies": 2}
    assert gateway.patch("/v1/adapters/pirate", json=body).status_code == 200
    wait_until(lambda: len(pinned()) == 2)
    assert gateway.delete("/v1/adapters/pirate").status_code == 204
    wait_until(lambda: not pinned())


def test_a_killed_replica_is_noticed_by_its_own_streams_alone_and_comes_back(
    cluster: Cluster,
) -> None:
    gateway, before = cluster.gateway.tenant("acme"), usage(cluster.gateway)
    streams = [Streamed() for _ in range(NUM_STREAMS)]
    models = [f"adapter{index % NUM_ADAPTERS}" for index in range(NUM_STREAMS)]
    with ThreadPoolExecutor(NUM_STREAMS) as pool:
        prompts = [f"{number}: {PROMPTS[number % len(PROMPTS)]}" for number in range(NUM_STREAMS)]
        work = [
            pool.submit(stream.read, gateway, model, prompt, STREAM_TOKENS)
            for stream, model, prompt in zip(streams, models, prompts, strict=True)
        ]
        assert all(stream.started.wait(120) for stream in streams)
        running = {
            name: seen["running"] for name, seen in cluster.servers().items() if "running" in seen
        }
        victim = max(running, key=lambda name: running[name])
        folder = cluster.replicas[victim].data_dir.parent.name
        cluster.kill(cluster.replicas[victim])
        new = [
            ask(gateway, f"adapter{number % NUM_ADAPTERS}", "hello", max_tokens=2)
            for number in range(100)
        ]
        for each in work:
            each.result()
    lost = [stream for stream in streams if stream.error is not None]
    assert 0 < len(lost) < NUM_STREAMS
    assert {stream.error for stream in lost} == {"replica_lost"}
    assert all(
        stream.is_done and stream.tokens == STREAM_TOKENS
        for stream in streams
        if stream.error is None
    )
    sent = [stream.usage for stream in streams] + [answer["usage"] for answer in new]
    for stream, model, prompt in zip(streams, models, prompts, strict=True):
        body = {
            "model": model,
            "prompt": prompt,
            "max_tokens": stream.tokens,
            "temperature": 0,
            "ignore_eos": True,
        }
        again = gateway.post("/v1/completions", json=body).json()
        assert again["choices"][0]["text"].startswith(stream.text)
        sent.append(again["usage"])
    assert cluster.start_replica(folder) == victim
    cluster.wait_for(*cluster.replicas)
    sent += [
        ask(gateway, f"adapter{index}", "hello", max_tokens=2)["usage"]
        for index in range(NUM_ADAPTERS)
    ]
    digests = {adapter["digest"] for adapter in gateway.get("/v1/adapters").json()["data"]}
    share = {digest for digest in digests if ranked(digest, cluster.replicas)[0] == victim}
    assert len(digests) == NUM_ADAPTERS > len(share)
    assert {each["digest"] for each in cluster.engine(victim)["residents"]} == share, (
        "it has its share again"
    )
    wait_for_usage(cluster.gateway, before, sent)


def test_a_killed_gateway_leaves_nothing_running(cluster: Cluster) -> None:
    gateway = cluster.gateway.tenant("acme")
    streams = [Streamed() for _ in range(4)]

    def read(stream: Streamed) -> None:
        with pytest.raises(httpx.TransportError):
            stream.read(gateway, "manylora-demo", "go on", 1000)
        stream.started.set()

    with ThreadPoolExecutor(len(streams)) as pool:
        work = [pool.submit(read, stream) for stream in streams]
        assert all(stream.started.wait(120) for stream in streams)
        cluster.kill(cluster.gateway)
        for each in work:
            each.result()
    for replica in cluster.replicas.values():
        wait_until(lambda replica=replica: not replica.api.engine()["running"])  # type: ignore[misc]
        assert not replica.api.engine()["pages"]["kv"]
    lost = cluster.gateways.pop()
    cluster.start_gateway("another-gateway").take_over(lost)
    cluster.wait_for(*cluster.replicas)
    assert ask(cluster.gateway.tenant("acme"), "manylora-demo", "hello")["choices"]


def test_a_rolling_restart_is_not_seen_by_clients(cluster: Cluster) -> None:
    if isinstance(cluster, RayCluster):
        pytest.skip("Ray starts and ends its replicas by itself: nobody else can restart them")
    gateway, is_over = cluster.gateway.tenant("acme"), threading.Event()

    def ask_on(number: int) -> int:
        """Ask short and long requests until the end; returns how many."""
        count = 0
        while not is_over.wait(0.05):
            model = f"adapter{(number + count) % NUM_ADAPTERS}" if count % 3 else "manylora-demo"
            stream = Streamed()
            stream.read(gateway, model, f"{number} {count}", 8 if count % 2 else 200)
            assert stream.error is None, stream
            assert stream.is_done, stream
            count += 1
        return count

    with ThreadPoolExecutor(4) as pool:
        askers = [pool.submit(ask_on, number) for number in range(4)]
        try:
            for name, replica in list(cluster.replicas.items()):
                assert replica.stop() == 0
                cluster.wait_for(*cluster.replicas.keys() - {name})
                assert cluster.start_replica(replica.data_dir.parent.name) == name
                cluster.wait_for(*cluster.replicas)
        finally:
            is_over.set()
        assert all(asker.result() > 3 for asker in askers)
