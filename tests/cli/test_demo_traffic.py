"""The demo's traffic: questions to every model, with the keys of the tenants that have them."""

from __future__ import annotations

import json
import threading
from types import SimpleNamespace

import pytest

from manylora.cli.demo import traffic
from manylora.cli.demo.round import SPEAKERS, TENANTS
from manylora.errors import ClientError
from recording_server import Recorder

KEYS = {tenant: f"key-of-{tenant}" for tenant in TENANTS}


@pytest.fixture(autouse=True)
def slept(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    seconds: list[float] = []
    monkeypatch.setattr(traffic, "time", SimpleNamespace(sleep=seconds.append))
    return seconds


def test_a_minute_of_questions_goes_to_all_models_and_is_the_same_each_time(
    recorder: Recorder, slept: list[float]
) -> None:
    recorder.body = {"choices": [{"message": {"content": "Aye!"}}]}
    sent = []
    for _ in range(2):
        recorder.calls.clear()
        assert traffic.send_questions(recorder.url, KEYS) == len(recorder.calls) == 175
        sent.append(sorted((key or "", body) for _, _, key, body in recorder.calls))
    assert sent[0] == sent[1]
    assert slept == [1] * 120
    asked = {(json.loads(body)["model"], key.removeprefix("Bearer ")) for key, body in sent[0]}
    assert asked >= {(model, KEYS[tenant]) for model, tenant in SPEAKERS.items()}
    assert {path for _, path, _, _ in recorder.calls} == {"/v1/chat/completions"}


def test_a_refusal_is_told(recorder: Recorder) -> None:
    recorder.status = 503
    with pytest.raises(ClientError):
        traffic.send_questions(recorder.url, KEYS)


def test_ctrl_c_asks_none_of_the_questions_that_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def ask(*words: object) -> None:
        asked.append(words)
        threading.Event().wait(1)

    def interrupt(_: float) -> None:
        if len(slept_s) == 8:
            raise KeyboardInterrupt
        slept_s.append(1)

    slept_s: list[float] = []
    monkeypatch.setattr(traffic, "ask", ask)
    monkeypatch.setattr(traffic, "time", SimpleNamespace(sleep=interrupt))
    with pytest.raises(KeyboardInterrupt):
        traffic.send_questions("http://127.0.0.1:1", KEYS)
    assert len(asked) < 26  # all of nine seconds
