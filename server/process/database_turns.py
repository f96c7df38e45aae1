"""Turns of tenants at the database of this process: one that writes or reads much waits behind its own requests."""

from __future__ import annotations

from manylora.registry.db.database import Turns
from manylora.server.process.fair_semaphore import FairSemaphore
from manylora.server.process.threads import FairThreads, acting

READERS = 4
"""Reads at the same time; with the spare ones and the writer, as many as there are connections."""
SPARE_READERS = 3


def database_turns() -> Turns:
    """Turns by the weight of the tenant that the current task acts for. Long reads of one leave places to others."""
    writer = FairSemaphore(1)
    readers = FairSemaphore(READERS, spare=SPARE_READERS)
    return Turns(
        lambda: writer.place(*acting.get()), lambda: readers.place(*acting.get()), FairThreads
    )
