"""Requests that are meant for all replicas: vLLM's routes to pause, to resume, and to forget the prefix cache."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import aiohttp

from weft.server.cluster.exchange import ReplicaLostError
from weft.server.cluster.links import Links
from weft.server.cluster.loads import Replica

FOR_ALL = frozenset({"/pause", "/resume", "/reset_prefix_cache"})


async def ask_all(
    links: Links, replicas: Sequence[Replica], path: str, headers: list[tuple[str, str]]
) -> tuple[int, bytes]:
    """Send a POST without a body to all of them.

    Args:
        links: Has the connections.
        replicas: At least one.
        path: With the query.
        headers: Of the request.

    Returns:
        Status and body of the first answer that is no success, or else of the last one.

    Raises:
        ReplicaLostError: One of them is gone; the others have done it.
    """

    async def ask(replica: Replica) -> tuple[int, bytes]:
        async with links.session.post(replica.url + path, headers=headers) as answer:
            return answer.status, await answer.read()

    answers = await asyncio.gather(*map(ask, replicas), return_exceptions=True)
    for answer in answers:
        if isinstance(answer, aiohttp.ClientError | OSError | TimeoutError):
            raise ReplicaLostError("A replica is gone, the others have done it; send the request again.") from answer
        if isinstance(answer, BaseException):
            raise answer
    told = [answer for answer in answers if not isinstance(answer, BaseException)]
    return next((answer for answer in told if answer[0] != 200), told[-1])
