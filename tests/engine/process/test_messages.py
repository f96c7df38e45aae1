from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import msgspec
import pytest

from fake_engine import demo_ready
from manylora.config import Config, ModelConfig, ServerConfig
from manylora.engine.fairness.service import TenantLoad
from manylora.engine.process import messages
from manylora.engine.request import ErrorInfo, RequestOutput, TokenLogprobs
from manylora.engine.status import EngineLoad, EngineStatus, ResidentAdapter, StepBatches, StepStats
from manylora.errors import ConfigError
from manylora.memory.pool import PageMap, PageUse
from simulation.driven import adapter, request

LOGPROBS = TokenLogprobs(
    token_id=3, logprob=-0.5, rank=1, top_ids=[3, 4], top_logprobs=[-0.5, -1.5]
)
OUTPUT = RequestOutput(
    request_id="x",
    token_ids=[3],
    logprobs=[LOGPROBS],
    prompt_logprobs=[None, LOGPROBS],
    finish_reason="error",
    error=ErrorInfo(code="c", message="m", kind="capacity"),
    adapter_state="host",
    queue_s=0.5,
)
STATUS = EngineStatus(
    boot_id="b",
    running=1,
    waiting=2,
    residents=[ResidentAdapter(digest="d", tier="device", pages=3, running=1)],
    last_steps=[
        StepStats(
            step=1, seconds=0.1, requests=1, tokens=2, prefill_tokens=2, adapters=1, base_requests=0
        )
    ],
    load_p95_s={"host>device": 0.25},
    tenants={"": TenantLoad(running=1, waiting=2, reasons={"NEW": 2})},
    page_map=PageMap(
        pages_per_cell=2,
        uses=[PageUse(kind="kv", owner=3), PageUse(kind="free")],
        runs=[(4, 0), (1, 1)],
    ),
    batches=StepBatches(adapters=["d"], steps=[[1, 0, 1, 0]]),
)


@pytest.mark.parametrize(
    "message",
    [
        messages.Submit(
            request("x", ref=adapter("a"), logit_bias={3: -1.5}, stop=("a", "b"), seed=-(1 << 63))
        ),
        messages.Abort("x"),
        messages.DropAdapter("d"),
        messages.PinAdapter(adapter("a"), True),
        messages.AskStatus(),
        messages.AskStatus(is_detailed=True),
    ],
)
def test_what_goes_to_the_engine_comes_back_equal(message: messages.ToEngine) -> None:
    assert messages.decode_to_engine(messages.encode(message)) == message


@pytest.mark.parametrize(
    "message",
    [
        messages.Outputs([OUTPUT, RequestOutput(request_id="y")]),
        messages.Status(STATUS),
        messages.Load(
            EngineLoad(
                rate=3.5,
                tenants={"t": TenantLoad(waiting=1, reasons={"NEW": 1})},
            )
        ),
        messages.Ready(demo_ready(), "plan"),
        messages.StartFailed("no", "config_invalid", True, "model.path"),
    ],
)
def test_what_comes_from_the_engine_comes_back_equal(message: messages.FromEngine) -> None:
    assert messages.decode_from_engine(messages.encode(message)) == message


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"\xff" * 100,
        pickle.dumps({"type": "close"}),
        msgspec.msgpack.encode({"type": "unheard of"}),
        msgspec.msgpack.encode({"type": "submit", "request": 3}),
        msgspec.msgpack.encode({"type": "abort", "request_id": 3}),
        b"\x91" * 100_000,
    ],
)
def test_junk_is_refused(frame: bytes) -> None:
    with pytest.raises((msgspec.DecodeError, RecursionError)):
        messages.decode_to_engine(frame)


def test_a_message_beyond_the_limit_is_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messages, "MAX_MESSAGE_BYTES", 100)
    with pytest.raises(ValueError, match="may have at most 100 bytes"):
        messages.encode(messages.Abort("x" * 200))


def test_the_launch_line_carries_all_settings() -> None:
    config = Config(
        model=ModelConfig(path="/some where"), server=ServerConfig(data_dir=Path("/data"))
    )
    line = messages.encode_launch(messages.Launch(config, "ipc:///tmp/x", 5))
    assert line.count(b"\n") == 1
    assert messages.decode_launch(line) == messages.Launch(config, "ipc:///tmp/x", 5)


def test_a_launch_line_with_a_wrong_setting_is_refused() -> None:
    line: dict[str, Any] = {"config": {"model": {"path": "m", "threads": -1}}, "address": "a"}
    with pytest.raises(ConfigError, match=r"model\.threads"):
        messages.decode_launch(msgspec.json.encode(line))
