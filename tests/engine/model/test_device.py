from __future__ import annotations

import pytest
import torch

from weft.engine.model.device import choose_threads, has_idle_core, usable_cores


def test_tiny_models_take_one_thread_and_others_all_cores() -> None:
    assert choose_threads(0, 2 << 20) == 1
    assert choose_threads(0, 1 << 30) == usable_cores()


def test_the_setting_wins() -> None:
    assert choose_threads(3, 2 << 20) == 3


def test_a_core_is_idle_where_steps_have_fewer_threads_than_there_are_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weft.engine.model.device.usable_cores", lambda: torch.get_num_threads())
    assert not has_idle_core()
    monkeypatch.setattr("weft.engine.model.device.usable_cores", lambda: torch.get_num_threads() + 1)
    assert has_idle_core()
