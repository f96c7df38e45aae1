from __future__ import annotations

import pytest

from manylora.engine.fairness.service import Lengths, Prices, TenantService


def test_a_rate_once_measured_in_slow_steps_follows_the_quick_ones_that_nobody_waited_for() -> None:
    service = TenantService(Prices(), Lengths(), lambda: 0.0)
    for _ in range(3):
        service.note_step(10.0, 0.1, is_full=False)
    assert (
        service.full_rate == 0.0
    )  # not measured yet: nothing says how much more a step could have done
    service.note_step(4.0, 2.0, is_full=True)
    assert service.full_rate < 20
    for _ in range(100):
        service.note_step(10.0, 0.1, is_full=False)
    assert service.full_rate == pytest.approx(100, rel=0.05)
