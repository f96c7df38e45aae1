"""Tenants' turns at the database of this process: whoever writes or reads much waits behind its own."""

from __future__ import annotations

from manylora.registry.db.database import Turns
from manylora.server.limits.fair_semaphore import FairSemaphore
from manylora.server.threads import FairThreads, acting


def database_turns() -> Turns:
    """Turns by the weight of the tenant that the current task acts for."""
    writer = FairSemaphore(1)
    return Turns(lambda: writer.place(*acting.get()), FairThreads)
