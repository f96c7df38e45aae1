"""Times to the first token as counts in bins: a sum of two hours is the sum of their counts, whatever their length.

Bins are equally wide on a logarithmic scale, 20 to a factor of ten, so a bin ends at 10^(1/20) or 1.122 times where it
begins. A percentile read from the counts is therefore at most that factor off the request that it belongs to.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping

from sqlalchemy import ColumnElement, Integer, case, cast

PER_DECADE = 20
BOUNDS_S = tuple(round(0.001 * 10 ** (number / PER_DECADE), 9) for number in range(6 * PER_DECADE + 1))
"""From 1 ms to 1000 s. Bin n begins at bound n - 1 and ends before bound n; what is shorter than the first bound is bin
0, what is longer than the last the last bin. Stored counts mean these bins: a change of them is one of the schema."""
NO_TOKEN = -1
"""The bin of requests that ended before their first token."""


def bin_of(seconds: float | None) -> int:
    """The bin of a time to the first token; `NO_TOKEN` for None."""
    return NO_TOKEN if seconds is None else bisect_right(BOUNDS_S, seconds)


def bin_in_sql(seconds: ColumnElement[float | None]) -> ColumnElement[int]:
    """`bin_of` of a column."""
    bounds = ((seconds < bound, number) for number, bound in enumerate(BOUNDS_S))
    return cast(case((seconds.is_(None), NO_TOKEN), *bounds, else_=len(BOUNDS_S)), Integer)


def percentile(counts: Mapping[int, int], percent: int) -> float | None:
    """Seconds within which so many percent of the requests had their first token, at most a bin off; None for none.

    Inside a bin the requests are taken as evenly spread on the logarithmic scale. Times outside all bins count as the
    bound next to them.

    Args:
        counts: Requests by bin; `NO_TOKEN` does not count.
        percent: 1 to 100.
    """
    bins = sorted(number for number, count in counts.items() if number != NO_TOKEN and count)
    wanted, before = sum(counts[number] for number in bins) * percent, 0  # in hundredths, so that no float decides
    for number in bins:
        count = counts[number] * 100
        if before + count >= wanted:
            low, high = BOUNDS_S[max(number - 1, 0)], BOUNDS_S[min(number, len(BOUNDS_S) - 1)]
            return float(low * (high / low) ** ((wanted - before) / count))
        before += count
    return None
