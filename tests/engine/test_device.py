from __future__ import annotations

from weft.engine.model.device import choose_threads, usable_cores


def test_tiny_models_take_one_thread_and_others_all_cores() -> None:
    assert choose_threads(0, 2 << 20) == 1
    assert choose_threads(0, 1 << 30) == usable_cores()


def test_the_setting_wins() -> None:
    assert choose_threads(3, 2 << 20) == 3
