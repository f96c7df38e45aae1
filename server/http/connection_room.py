"""Room for connections: how many this process can have open, and which one gives way when another comes.

Anybody can open connections, and each takes one of the process's file descriptors. Some descriptors are kept for what
requests need: database, journal, blobs, child processes. A connection over which no valid key has come gives way first.
"""

from __future__ import annotations

import os
import resource
from collections import OrderedDict
from typing import Protocol

import structlog

log = structlog.get_logger("manylora.server")
MOST_DESCRIPTORS = 1 << 20
"""More are not asked for: some systems allow a billion."""
KEPT = 64
KEPT_SHARE = 16
MOST_KEPT = 512
"""Descriptors that connections leave to other files: a base, plus a part of all, up to a maximum."""
LEAST_CONNECTIONS = 8
MOST_STRANGERS = 4096
"""Connections without a valid key, for their memory."""
WARN_S = 60.0
"""Seconds between two lines of the log about connections that had to give way."""
IS_CLOSING = "is_closing"
"""Key in a request's state of a function that says whether the connection is closing. The ASGI message about it comes
some turns of the event loop later."""
TRUST = "trust_connection"
"""Key in a request's state of a function to call once its key was found valid."""


class Connection(Protocol):
    """A transport that can be asked to close."""

    def give_way(self) -> None:
        """Close at once."""


class ConnectionRoom:
    """The connections of one server. Thread: the event loop's.

    Args:
        most: How many may be open at once.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._strangers: OrderedDict[Connection, None] = OrderedDict()
        """Without a valid key so far, those that last sent a request longest ago at the front."""
        self._idle: OrderedDict[Connection, None] = OrderedDict()
        """With one, and without a request; the longest idle at the front."""
        self._busy: set[Connection] = set()
        self._warned_s = float("-inf")

    def enter(self, connection: Connection, now_s: float) -> None:
        """Take a new connection in; it or another one is closed where there is no room."""
        self._strangers[connection] = None
        if len(self._strangers) > min(self._most, MOST_STRANGERS):
            self._send_away(self._strangers, now_s)
        elif len(self._strangers) + len(self._idle) + len(self._busy) > self._most:
            others = len(self._strangers) > 1 or not self._idle
            self._send_away(self._strangers if others else self._idle, now_s)

    def begin(self, connection: Connection) -> None:
        """Note that a request came."""
        if connection in self._strangers:
            self._strangers.move_to_end(connection)
        elif connection in self._idle:
            del self._idle[connection]
            self._busy.add(connection)

    def trust(self, connection: Connection) -> None:
        """Note that the request has a valid key."""
        if connection in self._strangers:
            del self._strangers[connection]
            self._busy.add(connection)

    def rest(self, connection: Connection) -> None:
        """Note that the request was answered."""
        if connection in self._busy:
            self._busy.remove(connection)
            self._idle[connection] = None

    def leave(self, connection: Connection) -> None:
        """Forget a connection that was closed."""
        self._strangers.pop(connection, None)
        self._idle.pop(connection, None)
        self._busy.discard(connection)

    def _send_away(self, connections: OrderedDict[Connection, None], now_s: float) -> None:
        connections.popitem(last=False)[0].give_way()
        if now_s - self._warned_s >= WARN_S:
            self._warned_s = now_s
            log.warning(
                "connections_give_way",
                most=self._most,
                hint="Raise the limit of open files (ulimit -n).",
            )


def raise_descriptor_limit() -> None:
    """Let this process, and those it starts, open as many files as the system's hard limit allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MOST_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def most_connections(descriptors_each: int = 1) -> int:
    """Number of connections that leave enough descriptors to other files, by what is open now.

    Args:
        descriptors_each: What each of them takes.
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = MOST_DESCRIPTORS if soft == resource.RLIM_INFINITY else min(soft, MOST_DESCRIPTORS)
    kept = min(KEPT + limit // KEPT_SHARE, MOST_KEPT)
    return max(LEAST_CONNECTIONS, (limit - len(os.listdir("/dev/fd")) - kept) // descriptors_each)
