"""Messages between the engine process and its client: tagged msgpack of limited size, no pickle."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from manylora.adapters.blobs.memory import MemoryPlace
from manylora.adapters.ref import AdapterRef
from manylora.config import Config
from manylora.engine.request import GenerationRequest, RequestOutput
from manylora.engine.status import EngineLoad, EngineReady, EngineStatus, PauseMode

MAX_MESSAGE_BYTES = 256 << 20
"""Largest message. The largest real ones, prompt logprobs of a long prompt, have tens of megabytes."""
MAX_LAUNCH_BYTES = 1 << 20


class Launch(msgspec.Struct, frozen=True):
    """The first line on the engine's standard input, as JSON."""

    config: Config
    address: str
    """ZeroMQ address that the client listens on."""
    pulse_fd: int
    """Descriptor of the page of `Pulse`, which the process inherits."""


class Submit(msgspec.Struct, frozen=True, tag="submit"):
    """Take a request."""

    request: GenerationRequest


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    """End a request."""

    request_id: str


class DropAdapter(msgspec.Struct, frozen=True, tag="drop_adapter"):
    """Forget a deleted adapter."""

    digest: str


class PinAdapter(msgspec.Struct, frozen=True, tag="pin_adapter"):
    """Pin or unpin an adapter."""

    ref: AdapterRef
    is_pinned: bool


class TakeWeights(msgspec.Struct, frozen=True, tag="take_weights"):
    """Keep the weights of an ephemeral version, and bring it to host memory."""

    ref: AdapterRef
    place: MemoryPlace
    """Place of the bytes in the client's process, where they are open."""


class DropWeights(msgspec.Struct, frozen=True, tag="drop_weights"):
    """Forget the weights of an ephemeral version."""

    weights_sha256: str


class AskStatus(msgspec.Struct, frozen=True, tag="ask_status"):
    """Send a snapshot. Snapshots come in the order in which they are asked for."""

    is_detailed: bool = False
    """Include `page_map` and `batches`."""


class Pause(msgspec.Struct, frozen=True, tag="pause"):
    """Pause, or go on."""

    mode: PauseMode | None
    """Kind of pause; None goes on."""
    is_ending: bool = False
    """End all requests."""


class ResetPrefixCache(msgspec.Struct, frozen=True, tag="reset_prefix_cache"):
    """Forget the cached KV that no request uses."""


class Taken(msgspec.Struct, frozen=True, tag="taken"):
    """The client has passed on `count` more messages of outputs. An engine that is too far ahead waits for this."""

    count: int


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """The model is loaded."""

    ready: EngineReady
    memory_plan: str
    """The memory plan, written for people."""


class StartFailed(msgspec.Struct, frozen=True, tag="start_failed"):
    """The engine cannot start, and the process ends."""

    message: str
    code: str
    is_setting: bool
    """True if a setting is wrong, so that another try would fail too."""
    param: str | None = None


class Outputs(msgspec.Struct, frozen=True, tag="outputs"):
    """All outputs of one step."""

    outputs: list[RequestOutput]


class Status(msgspec.Struct, frozen=True, tag="status"):
    """The snapshot that was asked for."""

    status: EngineStatus


class Load(msgspec.Struct, frozen=True, tag="load"):
    """Load of the engine, which it sends without a question."""

    load: EngineLoad


ToEngine = (
    Submit
    | Abort
    | DropAdapter
    | PinAdapter
    | TakeWeights
    | DropWeights
    | AskStatus
    | Pause
    | ResetPrefixCache
    | Taken
)
FromEngine = Ready | StartFailed | Outputs | Status | Load

_encoder = msgspec.msgpack.Encoder()

decode_to_engine: Callable[[bytes], ToEngine] = msgspec.msgpack.Decoder(ToEngine).decode
"""Decode a message from the client; raises `msgspec.DecodeError` if it is none."""
decode_from_engine: Callable[[bytes], FromEngine] = msgspec.msgpack.Decoder(FromEngine).decode
"""Decode a message from the engine; raises `msgspec.DecodeError` if it is none."""


def encode(message: ToEngine | FromEngine) -> bytes:
    """Encode a message.

    Raises:
        ValueError: It exceeds `MAX_MESSAGE_BYTES`, or has a number that is too large for msgpack.
    """
    encoded = _encoder.encode(message)
    if len(encoded) > MAX_MESSAGE_BYTES:
        raise ValueError(
            f"a message may have at most {MAX_MESSAGE_BYTES} bytes, got {len(encoded)}"
        )
    return encoded


def encode_launch(launch: Launch) -> bytes:
    """Encode the launch line, with paths as text."""
    return msgspec.json.encode(launch, enc_hook=str) + b"\n"


def decode_launch(line: bytes) -> Launch:
    """Decode the launch line.

    Raises:
        msgspec.DecodeError: It is no launch line.
        ConfigError: A setting is out of range.
    """
    return msgspec.json.decode(line, type=Launch, dec_hook=lambda kind, value: kind(value))
