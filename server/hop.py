"""A request that a gateway passes on to this server: what the gateway decided for it, and what it wants to know.

`manylora.server.cluster` makes it as `request.state.hop`, which is None where clients reach the server by themselves.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

SESSION_HEADER = "x-session-id"
"""Where an alias splits its requests, those with one value get one version. The field `user` has precedence."""


class Counts(NamedTuple):
    """Tokens that are billed of a request."""

    prompt: int = 0
    cached: int = 0
    completion: int = 0


@dataclass(slots=True, kw_only=True)
class Hop:
    """Facts that come with a request from a gateway."""

    ledger_id: str
    """Under which the request is billed."""
    weight_share: float
    """The part of the tenant's work that this server gets: its weight here is that part of its weight."""
    sticky: str
    """Chooses the version where an alias splits requests, as the gateway has done it already."""
    billed: Callable[[], Counts] = Counts
    """Tokens that would be billed if the request ended now."""
