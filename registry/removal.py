"""Removing versions, and what goes with them: content that nothing refers to any more is told to the caller."""

from __future__ import annotations

from collections.abc import Iterable

from sqlalchemy import ColumnElement, Delete, delete, exists, select
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import InstrumentedAttribute

from weft.registry.db.models import AdapterRow, FileRow, GrantRow, VersionRow
from weft.registry.records import Removed

CHUNK = 500
_BLOBS = (VersionRow.weights_sha256, FileRow.sha256)
"""What refers to a blob."""


async def remove(session: AsyncSession, doomed: ColumnElement[bool], *deletions: Delete) -> Removed:
    """Run the deletions, with which the doomed versions go.

    Returns:
        What only these versions referred to; tenants may share content.
    """
    contents = (await session.execute(select(VersionRow.digest, VersionRow.weights_sha256).where(doomed))).all()
    for deletion in deletions:
        await session.execute(deletion)
    digests = await _unreferenced(session, (digest for digest, _ in contents), VersionRow.digest)
    weights = await unreferenced_blobs(session, (weights for _, weights in contents))
    return Removed(digests=tuple(sorted(digests)), weights=tuple(sorted(weights)))


async def remove_versions(session: AsyncSession, doomed: ColumnElement[bool]) -> Removed:
    """Delete versions of any adapters, with their aliases and grants; an adapter without versions goes, too."""
    adapters = set(await session.scalars(select(VersionRow.adapter_id).where(doomed)))
    same = VersionRow.adapter_id == GrantRow.adapter_id, VersionRow.version == GrantRow.version
    has_versions = exists().where(VersionRow.adapter_id == AdapterRow.id)
    return await remove(
        session,
        doomed,
        delete(GrantRow).where(exists().where(*same, doomed)),
        delete(VersionRow).where(doomed),
        delete(AdapterRow).where(AdapterRow.id.in_(adapters), ~has_versions),
    )


async def unreferenced_blobs(session: AsyncSession, weights: Iterable[str]) -> frozenset[str]:
    """Those of the blobs (64 hex digits) that nothing refers to now."""
    return await _unreferenced(session, weights, *_BLOBS)


async def _unreferenced(
    session: AsyncSession, contents: Iterable[str], *columns: InstrumentedAttribute[str]
) -> frozenset[str]:
    """The digests that no row has in these columns."""
    rest = set(contents)
    candidates = sorted(rest)
    for start in range(0, len(candidates), CHUNK):
        chunk = candidates[start : start + CHUNK]
        for column in columns:
            rest -= set(await session.scalars(select(column).where(column.in_(chunk))))
    return frozenset(rest)
