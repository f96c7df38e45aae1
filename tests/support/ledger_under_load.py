"""Records usage as fast as it can until it is killed, and prints the id of each event once it is acknowledged.

Run as a program with a data folder and a number that makes ids unique between runs.
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

from manylora.registry.db.database import Database
from manylora.registry.usage.journal import Journal
from manylora.registry.usage.ledger import UsageLedger
from registry_samples import usage_event

WRITERS = 16


async def main(data_dir: Path, run: str) -> None:
    database = await Database.open(None, data_dir)
    ledger = UsageLedger(database, await Journal.open(data_dir / "usage"), interval_s=0.02)
    await ledger.start()
    os.write(1, b"ready\n")

    async def write(writer: int) -> None:
        number = 0
        while True:
            event_id = f"use_{run}_{writer}_{number}"
            key_id = f"key_{writer % 3}"
            for tokens in (32, 64):
                ledger.progress(usage_event(event_id, key_id=key_id, completion_tokens=tokens))
            await ledger.record(usage_event(event_id, key_id=key_id, completion_tokens=70))
            os.write(1, f"{event_id}\n".encode())
            number += 1

    await asyncio.gather(*(write(writer) for writer in range(WRITERS)))


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), sys.argv[2]))
