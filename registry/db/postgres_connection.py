"""A connection to PostgreSQL that waits for no answer without end.

A server whose disk or machine hangs neither answers nor goes away: its own limits do not fire, and the network sees
nothing wrong. Imported only where the driver is installed.
"""

from __future__ import annotations

import asyncio
from typing import Any, TypeVar

import psycopg
from psycopg.abc import PQGen
from psycopg.pq import TransactionStatus
from psycopg.waiting import wait_async

LIVENESS_S = 5.0
"""For the pool's question whether a connection lives; the only statement outside of transactions."""
ANSWER_S = 35.0
"""For any other statement: more than the server's own limit."""
POLL_S = 0.1

ResultT = TypeVar("ResultT")


class BoundedConnection(psycopg.AsyncConnection[tuple[Any, ...]]):
    """Ends itself when an answer does not come in time, or is not waited for any longer."""

    async def wait(self, gen: PQGen[ResultT], interval: float = POLL_S, *_: object, **__: object) -> ResultT:
        """Carry out one exchange with the server: all of the driver's go through here.

        Raises:
            OperationalError: No answer.
        """
        try:
            async with asyncio.timeout(LIVENESS_S if self.autocommit else ANSWER_S):
                return await wait_async(gen, self.pgconn.socket, interval=interval)
        except BaseException as error:
            if self.pgconn.transaction_status == TransactionStatus.ACTIVE:
                self.pgconn.finish()
            if isinstance(error, TimeoutError):
                raise psycopg.OperationalError("no answer") from error
            raise
