"""Batches as openai-python's users run them, against the real server, which is killed on the way."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import openai
import pytest
from openai.types import Batch

from idleness import wait_until
from manylora_server import DEMO_NAMES, ManyloraServer, engines, expected_answers, manylora_server

ANSWERS = expected_answers()
ENDED = ("completed", "failed", "expired", "cancelled")
CHAT: Final = "/v1/chat/completions"


@pytest.fixture(scope="module")
def client(shop: ManyloraServer) -> Iterator[openai.OpenAI]:
    with client_of(shop, "shop") as client:
        yield client


def client_of(server: ManyloraServer, tenant: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=server.tenants[tenant], max_retries=0)


def line(custom_id: str, body: dict[str, Any], url: str = CHAT) -> dict[str, Any]:
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}


def question(model: str, number: int = 0) -> dict[str, Any]:
    messages = [{"role": "user", "content": ANSWERS["questions"][number]["question"]}]
    return {"model": model, "messages": messages, "temperature": 0, "max_tokens": 64}


def endless(number: int, tokens: int) -> dict[str, Any]:
    """A request for so many tokens, for certain."""
    prompt = [5 + number % 50, 6, 7]
    model = DEMO_NAMES[number % len(DEMO_NAMES)]
    return {
        "model": model,
        "prompt": prompt,
        "max_tokens": tokens,
        "ignore_eos": True,
        "temperature": 1,
    }


def start(client: openai.OpenAI, lines: list[dict[str, Any]], endpoint: Any = CHAT) -> Batch:
    content = "\n".join(map(json.dumps, lines)).encode()
    file = client.files.create(file=("requests.jsonl", io.BytesIO(content)), purpose="batch")
    said = (file.bytes, file.filename, file.purpose, file.status)
    assert said == (len(content), "requests.jsonl", "batch", "processed")
    return client.batches.create(
        input_file_id=file.id,
        endpoint=endpoint,
        completion_window="24h",
        metadata={"job": "nightly"},
    )


def until(client: openai.OpenAI, batch: Batch, *statuses: str) -> Batch:
    found = [batch]

    def has_come() -> bool:
        found.append(client.batches.retrieve(batch.id))
        return found[-1].status in statuses

    wait_until(has_come)
    return found[-1]


def results(client: openai.OpenAI, file_id: str | None) -> dict[str, dict[str, Any]]:
    """A result file by custom id, each of which stands there once."""
    if file_id is None:
        return {}
    lines = [json.loads(each) for each in client.files.content(file_id).text.splitlines()]
    found = {each["custom_id"]: each for each in lines}
    assert len(found) == len(lines)
    return found


def batch_events(server: ManyloraServer, tenant: str) -> list[dict[str, Any]]:
    answer = server.admin.get(
        "/v1/usage/events", params={"tenant": tenant, "service_class": "batch", "limit": 10_000}
    )
    return list(answer.json()["data"])


def test_lines_for_many_adapters_get_the_reference_answers(
    shop: ManyloraServer, client: openai.OpenAI
) -> None:
    lines = [line(f"{name}-{each}", question(name, each)) for name in DEMO_NAMES for each in (0, 1)]
    lines.append(line("none", question("no-such-adapter")))
    lines.append(line("wrong", {**question("pirate"), "temperature": -1}))
    batch = start(client, lines)
    said = (batch.object, batch.endpoint, batch.completion_window, batch.metadata)
    assert said == ("batch", CHAT, "24h", {"job": "nightly"})
    assert batch.expires_at == batch.created_at + 86_400
    done = until(client, batch, *ENDED)
    assert done.status == "completed", done
    assert done.request_counts is not None
    assert done.request_counts.model_dump() == {
        "total": len(lines),
        "completed": len(lines) - 2,
        "failed": 2,
    }
    assert done.in_progress_at <= done.finalizing_at <= done.completed_at  # type: ignore[operator]
    assert done.id in [each.id for each in client.batches.list(limit=1)]
    found = results(client, done.output_file_id)
    for each in (0, 1):
        for name in DEMO_NAMES:
            response = found[f"{name}-{each}"]["response"]
            assert response["status_code"] == 200
            answer = response["body"]["choices"][0]["message"]["content"]
            assert answer == ANSWERS["questions"][each]["answers"][name]
    failed = results(client, done.error_file_id)
    assert {name: each["response"]["status_code"] for name, each in failed.items()} == {
        "none": 404,
        "wrong": 400,
    }
    assert failed["none"]["response"]["body"]["error"]["code"] == "model_not_found"
    events = [
        each for each in batch_events(shop, "shop") if each["request_id"].startswith(f"{done.id}-")
    ]
    usage = [each["response"]["body"]["usage"] for each in found.values()]
    assert len(events) == len(usage)
    for name in ("prompt_tokens", "completion_tokens"):
        assert sum(event[name] for event in events) == sum(each[name] for each in usage)
    grouped = shop.admin.get(
        "/v1/usage", params={"tenant": "shop", "group_by": "service_class"}
    ).json()
    assert {row["service_class"] for row in grouped["data"]} >= {"batch"}
    assert sum(row["requests"] for row in grouped["data"]) == grouped["totals"]["requests"]


def test_files_are_listed_read_and_deleted(client: openai.OpenAI) -> None:
    content = (json.dumps(line("a", question("pirate"))) + "\n").encode()
    files = [client.files.create(file=(f"{n}.jsonl", content), purpose="batch") for n in range(3)]
    listed = [
        file.id for file in client.files.list(limit=2, purpose="batch")
    ]  # pages until the end
    assert [each for each in listed if each in {file.id for file in files}] == [
        file.id for file in reversed(files)
    ]
    assert client.files.content(files[0].id).read() == content
    assert client.files.retrieve(files[0].id).bytes == len(content)
    assert client.files.delete(files[0].id).deleted
    with pytest.raises(openai.NotFoundError):
        client.files.retrieve(files[0].id)
    assert client.files.content(files[1].id).read() == content  # the same bytes
    with pytest.raises(openai.BadRequestError):
        client.files.create(file=("x.jsonl", content), purpose="fine-tune")


def test_a_cancelled_batch_keeps_its_results(shop: ManyloraServer, client: openai.OpenAI) -> None:
    lines = [line("first", endless(0, 4), "/v1/completions")]
    lines += [line(f"long-{n}", endless(n, 900), "/v1/completions") for n in range(300)]
    batch = start(client, lines, "/v1/completions")
    completed = until_done(client, batch, 1, len(lines))
    with pytest.raises(openai.ConflictError):
        client.files.delete(batch.input_file_id)
    assert client.batches.cancel(batch.id).status == "cancelling"
    done = until(client, batch, *ENDED)
    assert done.status == "cancelled"
    good, bad = results(client, done.output_file_id), results(client, done.error_file_id)
    assert len(good) >= completed, (
        "a result that was counted was lost; which lines end first is not promised"
    )
    assert len(good) + len(bad) == len(lines)
    assert set(good).isdisjoint(bad)
    assert {each["error"]["code"] for each in bad.values()} == {"batch_cancelled"}
    assert client.batches.cancel(batch.id).status == "cancelled"
    wait_until(
        lambda: not shop.engine()["running"]
    )  # the engine is told, and a step may be under way


@pytest.mark.timeout(600)
def test_kill_9_leaves_every_line_once_in_the_result_and_once_in_the_bill(tmp_path: Path) -> None:
    lines = [line(f"l{n}", endless(n, 20 + n % 40), "/v1/completions") for n in range(240)]
    with life(tmp_path, {}) as server:
        server.publish("acme", *DEMO_NAMES)
        keys = server.tenants
        with client_of(server, "acme") as client:
            batch = start(client, lines, "/v1/completions")
            until_done(client, batch, 50, len(lines))
        kill(server)
    with life(tmp_path, keys) as server, client_of(server, "acme") as client:
        until_done(client, batch, 100, len(lines))
        (engine,) = engines(server)
        engine.kill()  # its lines run again
        wait_until(lambda: engines(server) not in ([], [engine]))
        kill(server)
    with life(tmp_path, keys) as server, client_of(server, "acme") as client:
        until_done(client, batch, 150, len(lines))
        assert server.stop() == 0  # the batch leaves off at once
    with life(tmp_path, keys) as server, client_of(server, "acme") as client:
        done = until(client, batch, *ENDED)
        assert (done.status, done.error_file_id) == ("completed", None)
        check_bill(server, done, lines, results(client, done.output_file_id))
        assert "Traceback" not in server.log.read_text()


@contextmanager
def life(folder: Path, keys: dict[str, str]) -> Iterator[ManyloraServer]:
    with manylora_server(folder, "--set", "memory.gib=0.1") as server:
        server.tenants.update(keys)
        yield server


def kill(server: ManyloraServer) -> None:
    server.process.kill()
    server.process.wait()


def until_done(client: openai.OpenAI, batch: Batch, goal: int, total: int) -> int:
    """Wait until so many lines are done; returns how many are, which must not be all."""

    def completed() -> int:
        counts = client.batches.retrieve(batch.id).request_counts
        return counts.completed if counts is not None else 0

    wait_until(lambda: completed() >= goal)
    done = completed()
    assert goal <= done < total
    return done


def check_bill(
    server: ManyloraServer,
    batch: Batch,
    lines: list[dict[str, Any]],
    found: dict[str, dict[str, Any]],
) -> None:
    assert set(found) == {each["custom_id"] for each in lines}
    events = {each["id"]: each for each in batch_events(server, "acme")}
    assert len(events) == len(lines)
    for number, each in enumerate(lines, 1):
        usage = found[each["custom_id"]]["response"]["body"]["usage"]
        event = events[f"{batch.id}-{number}"]
        assert (
            usage["completion_tokens"] == each["body"]["max_tokens"] == event["completion_tokens"]
        )
        assert usage["prompt_tokens"] == event["prompt_tokens"]
    totals = server.admin.get("/v1/usage", params={"group_by": "service_class"}).json()
    assert {row["service_class"]: row["requests"] for row in totals["data"]} == {
        "batch": len(lines)
    }
