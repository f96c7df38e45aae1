"""Finds the content that nothing refers to after a delete. Content is shared: two tenants may upload the same bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from sqlalchemy import ColumnElement, exists, not_, select
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import InstrumentedAttribute, aliased

from weft.registry.db.models import FileRow, VersionRow
from weft.registry.records import Removed

_CHUNK = 500

Doomed = Callable[[type[VersionRow]], ColumnElement[bool]]
"""Says of a version (or an alias of its table) whether it is about to be deleted."""


async def only_referenced_by(session: AsyncSession, doomed: Doomed) -> Removed:
    """Digests and blobs that only the doomed versions refer to. Call it before deleting them."""
    return Removed(
        digests=await _only_there(session, doomed, VersionRow.digest),
        weights=await _only_there(session, doomed, VersionRow.weights_sha256),
    )


async def unreferenced_weights(session: AsyncSession, weights: Iterable[str]) -> frozenset[str]:
    """Which of these blobs no version and no file refers to."""
    rest = set(weights)
    candidates = sorted(rest)
    for start in range(0, len(candidates), _CHUNK):
        chunk = candidates[start : start + _CHUNK]
        for column in (VersionRow.weights_sha256, FileRow.sha256):
            rest -= set(await session.scalars(select(column).where(column.in_(chunk))))
    return frozenset(rest)


async def _only_there(session: AsyncSession, doomed: Doomed, column: InstrumentedAttribute[str]) -> tuple[str, ...]:
    other = aliased(VersionRow)
    elsewhere = exists().where(getattr(other, column.key) == column, not_(doomed(other)))
    statement = select(column).where(doomed(VersionRow), not_(elsewhere)).distinct().order_by(column)
    return tuple(await session.scalars(statement))
