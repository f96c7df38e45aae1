"""Report of what one tenant has in the engine."""

from __future__ import annotations

from dataclasses import dataclass, field


# Frozen ones take three times as long to make, and there may be thousands.
@dataclass(slots=True, kw_only=True)
class TenantLoad:
    """Requests and work of one tenant in the engine now. Units are those of `manylora.engine.fairness.prices`."""

    weight: float = 1.0
    running: int = 0
    """Requests with pages."""
    paused: int = 0
    """Requests with pages that sat out the last step."""
    waiting: int = 0
    """Requests without pages."""
    reasons: dict[str, int] = field(default_factory=dict)
    """Waiting requests by reason, as in `EngineStatus.waiting_reasons`."""
    queued: float = 0.0
    """Units still to compute for its waiting requests, with predicted output lengths."""
    backlog: float = 0.0
    """Units still to compute for its waiting and running requests."""
    rate: float = 0.0
    """Units per second computed for it lately."""
    service: float = 0.0
    """Units computed for it since start."""
