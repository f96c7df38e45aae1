"""Settings of the whole suite."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

# The same examples in every run, and no judgement by the clock: test machines are shared and slow at times.
settings.register_profile(
    "weft", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.load_profile("weft")
