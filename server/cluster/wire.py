"""Messages between gateways and replicas: headers, frames of answers, and reports of a replica's state.

All servers over one database have one pepper. A token made of it shows that a request comes from a gateway.
"""

from __future__ import annotations

import struct
from typing import Literal

import msgspec

from manylora.registry.access.keys import KeyRing
from manylora.server.hop import Counts

CLUSTER = "x-manylora-cluster"
"""Has the token that shows that a gateway asks."""
LEDGER_ID = "x-manylora-ledger-id"
WEIGHT_SHARE = "x-manylora-weight-share"
STICKY = "x-manylora-sticky"
PROBE = "x-manylora-probe"
"""Asks, without the body, whether the caller's limits let a request in: nothing is counted, and 204 says yes."""
LENGTH = "x-manylora-length"
"""In a framed answer: the Content-Length that the client is to see."""
INTERNAL = frozenset({CLUSTER, LEDGER_ID, WEIGHT_SHARE, STICKY, PROBE, LENGTH})
"""Headers that no client may send."""
SHARED = "manylora cluster 3"
"""The digest of this text under the pepper is the value of CLUSTER; the number counts up with each change of what they
say."""
STATE_PATH = "/internal/state"
REPORT_S = 0.25
SILENT_S = 5.0
"""Silence after which a replica counts as lost."""

_FRAME = struct.Struct(">IIII")


def cluster_token(keys: KeyRing) -> str:
    """Secret that all servers with the same pepper know."""
    return keys.digest(SHARED)


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """A line of a replica's state."""

    boot_id: str
    state: Literal["ready", "draining", "down"]
    """down: its engine is away, or it cannot record usage; it answers what needs neither."""
    backlog_s: float
    """Seconds of work that wait in its engine."""
    base_names: tuple[str, ...] = ()
    """Names of the base, the one that clients call it by first."""
    rate: float
    """Units per second that the engine computes; 0 until it was measured."""
    running: int
    waiting: int
    tiers: dict[str, str | None]
    """Adapters that came to a tier (device, host) since the last line, by digest; None where they are gone."""


def frame(payload: bytes, counts: Counts) -> bytes:
    """A piece of an answer, behind its length and what is billed when the client has it."""
    return _FRAME.pack(len(payload), *counts) + payload


class Frames:
    """Takes the frames out of the bytes of an answer."""

    def __init__(self) -> None:
        self.counts = Counts()
        """Counts in the last complete frame."""
        self._rest = b""

    def take(self, data: bytes) -> bytes:
        """The payloads of the frames that are complete with these bytes."""
        if self._rest:
            data = self._rest + data
        payloads = []
        at = 0
        while len(data) - at >= _FRAME.size:
            length, *counts = _FRAME.unpack_from(data, at)
            end = at + _FRAME.size + length
            if end > len(data):
                break
            payloads.append(data[at + _FRAME.size : end])
            self.counts = Counts(*counts)
            at = end
        self._rest = data[at:]
        return b"".join(payloads)
