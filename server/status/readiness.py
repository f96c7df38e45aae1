"""Readiness of a server: if it can serve requests to their end now, and if not, why.

Parts that can no longer do their work say so, and the first that does is the reason. Each finds out by itself when it
can go on, so nothing is kept here.
"""

from __future__ import annotations

from manylora.errors import CapacityError, EngineUnavailableError
from manylora.server.services import Services


async def check_ready(services: Services) -> None:
    """Return if requests are taken.

    Raises:
        CapacityError: They are not, and why; its code is one of `NOT_READY` in metrics.py.
    """
    services.drain.check(or_near=True)
    if services.engine.ready is None:
        raise EngineUnavailableError(
            "The engine is starting; try again in a moment.", code="engine_starting"
        )
    await services.registry.check()


async def why_not_ready(services: Services) -> str | None:
    """The code of what `check_ready` raises; None if it returns."""
    try:
        await check_ready(services)
    except CapacityError as error:
        return error.code
    return None


def can_generate(services: Services) -> bool:
    """True if an answer can be computed and recorded, as far as is known without asking the database."""
    try:
        services.registry.usage.check()
    except CapacityError:
        return False
    return services.engine.ready is not None
