"""Buckets of usage: minutes, hours and days of a time zone, as SQL expressions and as moments.

A zone has a constant offset between two transitions: a bucket is arithmetic on `at` with one CASE over the transitions
of the range. Hours are real hours: where clocks go back, two hours have the same name.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta
from zoneinfo import ZoneInfo

from sqlalchemy import BigInteger, ColumnElement, case, literal

from manylora.errors import InvalidRequestError
from manylora.registry.db.clock import DAY_US, HOUR_US, MINUTE_US, from_micros
from manylora.registry.names import check_text
from manylora.registry.records import Bucket

WIDTHS: dict[Bucket | None, int] = {None: 0, "1m": MINUTE_US, "1h": HOUR_US, "1d": DAY_US}
"""Microseconds; days on which clocks change are longer or shorter."""


def zone_of(name: str) -> ZoneInfo:
    """The time zone of this IANA name.

    Raises:
        InvalidRequestError: There is no such zone.
    """
    try:
        return ZoneInfo(check_text(name, "tz", 64))
    except (KeyError, ValueError, OSError) as error:  # unknown, no relative path, a folder of zones
        message = "tz must be the IANA name of a time zone, such as Europe/Berlin."
        raise InvalidRequestError(message, param="tz") from error


@dataclass(frozen=True, slots=True)
class Buckets:
    """Buckets of one width in one zone, for one range."""

    bucket: Bucket | None
    zone: ZoneInfo
    pieces: tuple[tuple[int, int], ...] = ((0, 0),)
    """Times of constant offset: first microsecond (that of the first one does not count), and offset in microseconds
    east of UTC, for hours modulo an hour."""

    @classmethod
    def between(cls, bucket: Bucket | None, zone: ZoneInfo, first: int, last: int) -> Buckets:
        """Buckets for everything from the hour of `first` to that of `last`, in microseconds."""
        pieces: list[tuple[int, int]] = []
        for begin, offset in _pieces(zone, first // HOUR_US * HOUR_US, last + HOUR_US):
            kept = offset % HOUR_US if bucket == "1h" else offset
            if not pieces or pieces[-1][1] != kept:
                pieces.append((begin, kept))
        return cls(bucket, zone, tuple(pieces))

    @property
    def cut_hours(self) -> bool:
        """True if any hour of UTC lies in more than one bucket."""
        moments = (*(begin for begin, _ in self.pieces[1:]), *(offset for _, offset in self.pieces))
        return any(moment % HOUR_US for moment in moments)

    def key(self, at: ColumnElement[int]) -> ColumnElement[int]:
        """A number that is the same for all moments of a bucket; later buckets have larger ones."""
        if self.bucket is None:
            # Not the start: by default it moves with the clock, and cursors must not.
            return literal(0, BigInteger)
        local = at + self._offset(at)
        width = WIDTHS[self.bucket]
        return local // width * width if self.bucket == "1d" else at - local % width

    def is_cut(self, hour: ColumnElement[int]) -> ColumnElement[bool]:
        """Condition on the first microsecond of an hour of UTC: the hour lies in more than one bucket."""
        return self.key(hour) != self.key(hour + (HOUR_US - 1))

    def span(self, key: int) -> tuple[datetime, datetime]:
        """The bucket's first moment, and the first one after it, in UTC."""
        if self.bucket == "1d":
            day = from_micros(key).date()
            return self._midnight(day), self._midnight(day + timedelta(days=1))
        begin = key
        end = key + WIDTHS[self.bucket]
        for (_, before), (moment, _) in zip(self.pieces, self.pieces[1:], strict=False):
            if begin < moment < end:  # the clock jumps by a part of an hour
                begin, end = (begin, moment) if (key + before) % HOUR_US == 0 else (moment, end)
        return from_micros(begin), from_micros(end)

    def _midnight(self, day: date) -> datetime:
        """The first moment of a day, also where clocks skip midnight or have it twice."""
        return datetime.combine(day, time(), self.zone).astimezone(UTC)

    def _offset(self, at: ColumnElement[int]) -> ColumnElement[int]:
        whens = [
            (at >= begin, literal(offset, BigInteger))
            for begin, offset in reversed(self.pieces[1:])
        ]
        first = literal(self.pieces[0][1], BigInteger)
        return case(*whens, else_=first) if whens else first


def _pieces(zone: ZoneInfo, first: int, last: int) -> Iterator[tuple[int, int]]:
    """The times of constant offset: begin and offset, both in microseconds."""

    def offset(micros: int) -> int:
        return (from_micros(micros).astimezone(zone).utcoffset() or timedelta()) // timedelta(
            microseconds=1
        )

    now = offset(first)
    yield first, now
    for day in range(first, last, DAY_US):  # no zone ever changed twice within six days
        then = offset(day + DAY_US)
        if then != now:
            yield (
                day + bisect_left(range(DAY_US), True, key=lambda us: offset(day + us) == then),
                then,
            )
        now = then
