"""Wall-clock time as the registry keeps it: whole microseconds since 1970, in UTC.

Knows nothing of monotonic time; what measures an age takes its own clock.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta

Clock = Callable[[], datetime]
"""Gives the present moment, with a timezone."""

MINUTE_US = 60_000_000
HOUR_US = 60 * MINUTE_US
DAY_US = 24 * HOUR_US

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)


def utc_now() -> datetime:
    """The present moment."""
    return datetime.now(UTC)


def to_micros(moment: datetime) -> int:
    """Microseconds since 1970, exactly.

    Raises:
        ValueError: `moment` has no timezone.
    """
    if moment.tzinfo is None:
        raise ValueError("expected a moment with a timezone, got one without")
    return (moment - _EPOCH) // _MICROSECOND


def to_seconds(moment: datetime) -> int:
    """Whole seconds since 1970; raises like `to_micros`."""
    return to_micros(moment) // 1_000_000


def from_micros(micros: int) -> datetime:
    """The moment `micros` microseconds after 1970, in UTC."""
    return _EPOCH + micros * _MICROSECOND


def iso(moment: datetime) -> str:
    """ISO-8601 in UTC with a Z: `2026-05-01T12:00:00.000000Z`."""
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def month_of(moment: datetime) -> datetime:
    """The first moment of its calendar month in UTC."""
    return moment.astimezone(UTC).replace(day=1, hour=0, minute=0, second=0, microsecond=0)


def month_after(month: datetime) -> datetime:
    """The first moment of the next month."""
    return month.replace(year=month.year + month.month // 12, month=month.month % 12 + 1)
