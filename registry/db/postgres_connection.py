"""A connection to PostgreSQL with a limit on every wait for an answer.

A server with a hanging disk or machine neither answers nor closes the connection: its own timeouts do not fire, and the
network looks fine. Imported only if the driver is installed.
"""

from __future__ import annotations

import asyncio
from typing import Any, TypeVar

import psycopg
from psycopg.abc import PQGen
from psycopg.pq import TransactionStatus
from psycopg.waiting import wait_async

LIVENESS_S = 5.0
"""Time limit of the pool's check that a connection lives, the only statement outside of transactions."""
ANSWER_S = 35.0
"""Time limit of other statements, above the server's own limit."""
POLL_S = 0.1

ResultT = TypeVar("ResultT")


class BoundedConnection(psycopg.AsyncConnection[tuple[Any, ...]]):
    """Closes itself when an answer does not come in time, or when the caller stops waiting for it."""

    async def wait(
        self, gen: PQGen[ResultT], interval: float = POLL_S, *_: object, **__: object
    ) -> ResultT:
        """One exchange with the server; the driver makes all exchanges through this method.

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
