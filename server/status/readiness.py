"""Readiness of a server: whether it can serve requests to their end now, and if not, why.

Parts that can no longer do their work say so, and the first that does is the reason. Each finds out by itself when it
can go on, so nothing is kept here.
"""

from __future__ import annotations

from manylora.errors import CapacityError, EngineUnavailableError
from manylora.server.services import Services

REASONS = (
    "server.draining",
    "engine_starting",
    "storage.full",
    "storage.unavailable",
    "db.lost",
    "db.unavailable",
)
"""Codes of the errors of `check_ready`."""


async def check_ready(services: Services) -> None:
    """Return if requests are taken.

    Raises:
        CapacityError: They are not, and why; its code is one of `REASONS`.
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
