from __future__ import annotations

import pytest

from manylora.server.limits.return_times import (
    FIRST_ONLY,
    GRACE_S,
    MAX_SLOT_S,
    MIN_CLAIMED,
    MISSED_S,
    ReturnTimes,
)

NOW_S = 500.0
PLENTY = 1_000_000


def expecting_all() -> ReturnTimes:
    """Slots of a tenant whose requests have all come back so far."""
    slots = ReturnTimes()
    slots.claimed_shares = [1.0, 1.0]
    return slots


def give(
    slots: ReturnTimes, key: int, units: float = 10, per_s: float = 10, num_left: int = PLENTY
) -> float:
    return slots.give(key, NOW_S, NOW_S + 1, units, per_s, num_left=num_left) - NOW_S


@pytest.mark.parametrize(
    ("units", "per_s", "told"),
    [
        (10, 10, [1, 2, 3, 4]),
        (5, 10, [1, 1.5, 2, 2.5]),
        (35, 10, [1, 4.5, 8, 11.5]),
        (1000, 1, [1, 1001, 2001, 3001, MAX_SLOT_S, MAX_SLOT_S]),
    ],
)
def test_slots_follow_each_other_as_fast_as_can_be_computed_up_to_an_hour(
    units: float, per_s: float, told: list[float]
) -> None:
    slots = expecting_all()
    assert [give(slots, key, units, per_s) for key in range(len(told))] == pytest.approx(told)


def test_a_turn_begins_at_the_time_and_ends_after_the_grace() -> None:
    slots = expecting_all()
    give(slots, 7)
    assert slots.turn(7, NOW_S + 0.5) == -1
    assert slots.turn(7, NOW_S + 1) == 1
    slots.expire(NOW_S + 1 + GRACE_S)
    assert slots.turn(7, NOW_S + 1 + GRACE_S) == 1
    slots.expire(NOW_S + 1.1 + GRACE_S)
    assert slots.turn(7, NOW_S + 1.1 + GRACE_S) == 0
    assert slots.turn(8, NOW_S + 1) == 0
    assert len(slots) == 0


def test_who_is_late_counts_as_missing_and_is_still_recognised() -> None:
    slots = expecting_all()
    give(slots, 7)
    slots.expire(NOW_S + 1 + MISSED_S)
    assert slots.claimed_shares[0] == 1
    slots.expire(NOW_S + 1.1 + MISSED_S)
    missing = slots.claimed_shares[0]
    assert missing < 1
    assert slots.turn(7, NOW_S + 1.1 + MISSED_S) == 1
    slots.claim(7)
    assert slots.claimed_shares[0] > missing
    slots.expire(NOW_S + 2 + GRACE_S)
    assert len(slots) == 0


def test_two_slots_of_one_body_are_missed_one_by_one() -> None:
    slots = expecting_all()
    give(slots, 7)
    give(slots, 7)
    slots.expire(NOW_S + 1.5 + MISSED_S)
    slots.claim(7)  # late for the first
    slots.expire(NOW_S + 1.5 + GRACE_S)
    assert len(slots) == 1
    slots.expire(NOW_S + 2.5 + GRACE_S)
    assert len(slots) == 0
    assert slots.claimed_shares[1] < 1, "the second slot was missed"


def test_who_always_comes_two_seconds_late_is_expected_like_the_punctual() -> None:
    slots = expecting_all()
    now_s = NOW_S
    due: list[tuple[float, int]] = []
    for key in range(2000):
        now_s += 0.05
        slots.expire(now_s)
        while due and due[0][0] <= now_s:
            slots.claim(due.pop(0)[1])
        due.append((slots.give(key, now_s, now_s + 1, 10, 1000, num_left=PLENTY) + 2, key))
    assert slots.claimed_shares[0] > 0.9


def test_who_came_in_vain_goes_before_those_without_a_slot() -> None:
    slots = expecting_all()
    for key in range(100):
        give(slots, key)
    again_s = slots.give_again(0, NOW_S + 3, 10, 10)
    assert again_s == NOW_S + 3
    assert slots.give_again(1, NOW_S + 3, 10, 10) == NOW_S + 4
    assert slots.turn(0, again_s) == 2
    assert give(slots, 200) == pytest.approx(101)


def test_the_share_of_claims_stays_between_its_bounds_and_changes_little_by_one_claim() -> None:
    slots = ReturnTimes()
    for key in range(2000):
        give(slots, key)
    slots.expire(NOW_S + MAX_SLOT_S)
    assert slots.claimed_shares[0] == MIN_CLAIMED
    shares = []
    for key in range(2000):
        slots.give(key, NOW_S + MAX_SLOT_S, NOW_S + MAX_SLOT_S + 1, 1, 10, num_left=PLENTY)
        slots.claim(key)
        shares.append(slots.claimed_shares[0])
    assert MIN_CLAIMED < shares[0] < MIN_CLAIMED + 0.005
    assert 0.99 < shares[-1] <= 1


def test_what_is_sent_again_too_early_has_a_share_of_its_own() -> None:
    slots = expecting_all()
    for key in range(40):
        give(slots, key)
        give(slots, key)  # impatient: the second slot will not be claimed
    for key in range(40):
        slots.claim(key)
    slots.expire(NOW_S + 1000)
    assert slots.claimed_shares[0] == 1
    assert slots.claimed_shares[1] < 0.35


def test_without_room_times_are_told_and_nothing_is_kept() -> None:
    slots = expecting_all()
    give(slots, 1)
    give(slots, 2, num_left=FIRST_ONLY)
    assert len(slots) == 2
    assert give(slots, 1, num_left=FIRST_ONLY) == pytest.approx(1)  # its own slot
    assert give(slots, 3, num_left=0) == pytest.approx(3)
    assert give(slots, 4, num_left=0) == pytest.approx(3)
    assert len(slots) == 2
