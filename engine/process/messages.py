"""Messages between the engine process and its client: tagged msgpack, with a limit on size. No pickle."""

from __future__ import annotations

import msgspec

from manylora.adapters.blobs.memory import MemoryPlace
from manylora.adapters.ref import AdapterRef
from manylora.config import Config
from manylora.engine.request import GenerationRequest, RequestOutput
from manylora.engine.status import EngineLoad, EngineReady, EngineStatus, PauseMode

MAX_MESSAGE_BYTES = 256 << 20
"""Real messages are smaller: prompt logprobs of a long prompt are tens of megabytes."""
MAX_LAUNCH_BYTES = 1 << 20


class Launch(msgspec.Struct, frozen=True):
    """The first line on the engine's standard input, as JSON."""

    config: Config
    address: str
    """ZeroMQ address that the client listens on."""
    pulse_fd: int
    """Descriptor of the page of `Pulse`, which the process inherits."""


class Submit(msgspec.Struct, frozen=True, tag="submit"):
    """Take a request in."""

    request: GenerationRequest


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    """End a request."""

    request_id: str


class DropAdapter(msgspec.Struct, frozen=True, tag="drop_adapter"):
    """Forget a deleted adapter."""

    digest: str


class PinAdapter(msgspec.Struct, frozen=True, tag="pin_adapter"):
    """Set whether an adapter stays on the device, and is brought there."""

    ref: AdapterRef
    is_pinned: bool


class TakeWeights(msgspec.Struct, frozen=True, tag="take_weights"):
    """Have the weights of an ephemeral version in memory, and bring it to host memory."""

    ref: AdapterRef
    place: MemoryPlace
    """Where the bytes are open in the client's process."""


class DropWeights(msgspec.Struct, frozen=True, tag="drop_weights"):
    """Let such weights go."""

    weights_sha256: str


class AskStatus(msgspec.Struct, frozen=True, tag="ask_status"):
    """Send a snapshot."""

    query_id: int
    is_detailed: bool = False
    """Whether it shall have what only a picture needs."""


class Pause(msgspec.Struct, frozen=True, tag="pause"):
    """Compute nothing from now on, or go on."""

    mode: PauseMode | None
    """None goes on."""
    is_ending: bool = False
    """Whether all requests end."""


class ResetPrefixCache(msgspec.Struct, frozen=True, tag="reset_prefix_cache"):
    """Forget the cached KV that no request uses."""


class Taken(msgspec.Struct, frozen=True, tag="taken"):
    """The client has passed so many more messages of outputs on; an engine that is too far ahead waits for these."""

    count: int


class Close(msgspec.Struct, frozen=True, tag="close"):
    """End the process."""


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """The model is loaded."""

    ready: EngineReady
    memory_plan: str
    """The memory plan, written for people."""


class StartFailed(msgspec.Struct, frozen=True, tag="start_failed"):
    """The engine cannot start; the process ends."""

    message: str
    code: str
    is_setting: bool
    """Whether a setting is wrong; then another try fails too."""
    param: str | None = None


class Outputs(msgspec.Struct, frozen=True, tag="outputs"):
    """All that one step did."""

    outputs: list[RequestOutput]


class Status(msgspec.Struct, frozen=True, tag="status"):
    """The snapshot that was asked for."""

    query_id: int
    status: EngineStatus


class Load(msgspec.Struct, frozen=True, tag="load"):
    """What the engine has to do; it sends this unasked."""

    load: EngineLoad


AboutAdapter = DropAdapter | PinAdapter | TakeWeights | DropWeights
ToEngine = Submit | Abort | AboutAdapter | AskStatus | Pause | ResetPrefixCache | Taken | Close
FromEngine = Ready | StartFailed | Outputs | Status | Load

_encoder = msgspec.msgpack.Encoder()

_to_engine: msgspec.msgpack.Decoder[ToEngine] = msgspec.msgpack.Decoder(ToEngine)
decode_to_engine = _to_engine.decode
"""A message from the client, read; `msgspec.DecodeError` where it is none."""
_from_engine: msgspec.msgpack.Decoder[FromEngine] = msgspec.msgpack.Decoder(FromEngine)
decode_from_engine = _from_engine.decode
"""A message from the engine, read; `msgspec.DecodeError` where it is none."""


def encode(message: ToEngine | FromEngine) -> bytes:
    """A message as bytes.

    Raises:
        ValueError: It exceeds `MAX_MESSAGE_BYTES`, or holds a number that msgpack has no room for.
    """
    encoded = _encoder.encode(message)
    if len(encoded) > MAX_MESSAGE_BYTES:
        raise ValueError(f"a message may have {MAX_MESSAGE_BYTES} bytes, got {len(encoded)}")
    return encoded


def encode_launch(launch: Launch) -> bytes:
    """The launch line; paths are written as text."""
    return msgspec.json.encode(launch, enc_hook=str) + b"\n"


def decode_launch(line: bytes) -> Launch:
    """The launch line, read.

    Raises:
        msgspec.DecodeError: It is not one.
        ConfigError: A setting is out of range.
    """
    return msgspec.json.decode(line, type=Launch, dec_hook=lambda kind, value: kind(value))
