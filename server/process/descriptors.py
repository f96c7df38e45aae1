"""File descriptors of this process: raising their limit, and the number of connections that leave enough of them.

Anybody can open connections, and each takes a descriptor. Some are kept for what requests need: database, journal,
blobs, child processes.
"""

from __future__ import annotations

import os
import resource

MOST_DESCRIPTORS = 1 << 20
"""More are not asked for: some systems allow a billion."""
KEPT = 64
KEPT_SHARE = 16
MOST_KEPT = 512
"""Descriptors that connections leave to other files: a base, plus a part of all, up to a maximum."""
LEAST_CONNECTIONS = 8


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
