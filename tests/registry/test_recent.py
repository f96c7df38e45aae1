from __future__ import annotations

from registry_samples import StandingClock
from weft.registry.recent import Recent


def test_an_answer_is_kept_until_it_is_too_old() -> None:
    clock = StandingClock()
    recent: Recent[str, int] = Recent(clock.monotonic, max_age_s=30)
    recent.remember("a", 1, recent.epoch)
    clock.advance(29)
    assert recent.get("a") == 1
    clock.advance(1)
    assert recent.get("a") is None
    assert recent.get("b") is None


def test_a_change_drops_all_answers_and_those_under_way() -> None:
    recent: Recent[str, int] = Recent(lambda: 0.0)
    recent.remember("a", 1, recent.epoch)
    asked_at = recent.epoch
    recent.forget()
    recent.remember("b", 2, asked_at)
    assert recent.get("a") is None
    assert recent.get("b") is None


def test_it_never_grows_beyond_its_bound() -> None:
    recent: Recent[int, int] = Recent(lambda: 0.0, max_entries=3)
    for number in range(4):
        recent.remember(number, number, 0)
    assert [recent.get(number) for number in range(4)] == [None, None, None, 3]
