"""The number of replicas that Ray Serve should keep, by how long requests wait. Ray itself is not imported."""

from __future__ import annotations

import math
import statistics
from typing import Any

TARGET_WAIT_S = 1.0
"""Predicted wait of a request above which more replicas are wanted."""
LOW = 0.5
"""Below this part of the target, and of the rows of all replicas, one replica fewer is wanted."""
DOWN_AFTER_S = 60.0
WAIT = "est_wait_s"
"""Report of a replica: seconds that a request would wait."""
BUSY = "busy"
"""Report of a replica: the part of its rows that is used."""


def desired_replicas(context: Any) -> tuple[int, dict[str, Any]]:  # noqa: ANN401 - an AutoscalingContext
    """A policy of Ray Serve: more replicas, in proportion to how far the wait is above its target, or one fewer.

    Ray waits `DOWN_AFTER_S` before it takes one away, and keeps to the bounds.
    """
    waits, busy = (
        [point.value for points in context.raw_metrics.get(name, {}).values() for point in points]
        for name in (WAIT, BUSY)
    )
    target = context.target_num_replicas
    if not waits:
        return target, {}
    ratio = sorted(waits)[math.ceil(0.95 * len(waits)) - 1] / TARGET_WAIT_S
    if ratio < LOW and statistics.fmean(busy) < LOW:
        return max(target - 1, 1), {}
    return max(target, math.ceil(context.current_num_replicas * ratio)), {}
