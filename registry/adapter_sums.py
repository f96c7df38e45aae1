"""All that was ever asked of an adapter, by key: what lists of adapters show, without a look at its whole history."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from sqlalchemy import BigInteger, ColumnElement, case, cast, func, or_, select, union_all
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.ext.asyncio import AsyncSession

from weft.registry.clock import from_micros
from weft.registry.models import UsageAdapterRow, UsageRollupRow
from weft.registry.records import AdapterUsage

_KEYS = ("adapter_id", "key_id")
_SUMS = ("requests", "prompt_tokens", "cached_tokens", "completion_tokens")
_adapters = UsageAdapterRow.__table__.c
_hours = UsageRollupRow.__table__.c


async def add_to_adapters(
    session: AsyncSession,
    insert: Callable[[type[UsageAdapterRow]], postgresql.Insert | sqlite.Insert],
    hours: Iterable[dict[str, Any]],
) -> None:
    """Add what was added to hourly sums in this transaction; `insert` is the database's own."""
    sums: dict[tuple[str, ...], dict[str, Any]] = {}
    for hour in hours:
        if not hour["adapter_id"]:
            continue
        keys = {name: hour[name] for name in _KEYS}
        adapter = sums.setdefault(tuple(keys.values()), {**keys, **dict.fromkeys((*_SUMS, "last_at"), 0)})
        for name in _SUMS:
            adapter[name] += hour[name]
        adapter["last_at"] = max(adapter["last_at"], hour["last_at"])
    if sums:
        upsert = insert(UsageAdapterRow)
        changes: dict[str, ColumnElement[Any]] = {name: _adapters[name] + upsert.excluded[name] for name in _SUMS}
        later = upsert.excluded.last_at > _adapters.last_at
        changes["last_at"] = case((later, upsert.excluded.last_at), else_=_adapters.last_at)
        await session.execute(upsert.on_conflict_do_update(index_elements=_KEYS, set_=changes), list(sums.values()))


async def summary(session: AsyncSession, adapter_ids: Iterable[str]) -> dict[str, AdapterUsage]:
    """All that was ever asked of these adapters, by whomever; ids without usage are missing."""
    sums = [cast(func.sum(_adapters[name]), BigInteger).label(name) for name in _SUMS]
    statement = select(_adapters.adapter_id, func.max(_adapters.last_at).label("last_at"), *sums)
    statement = statement.where(_adapters.adapter_id.in_(set(adapter_ids))).group_by(_adapters.adapter_id)
    found = (await session.execute(statement)).mappings()
    return {
        row["adapter_id"]: AdapterUsage(last_used_at=from_micros(row["last_at"]), **{name: row[name] for name in _SUMS})
        for row in found
    }


async def count_wrong_adapters(session: AsyncSession) -> int:
    """How many sums differ from those of their hours; 0 unless there is a bug."""
    summed = select(*(_hours[name] for name in (*_KEYS, *_SUMS))).where(_hours.adapter_id != "")
    negated = select(*(_adapters[name] for name in _KEYS), *((-_adapters[name]).label(name) for name in _SUMS))
    both = union_all(summed, negated).subquery()
    differs = or_(*(func.sum(both.c[name]) != 0 for name in _SUMS))
    wrong = select(both.c.key_id).group_by(*(both.c[name] for name in _KEYS)).having(differs).subquery()
    return await session.scalar(select(func.count()).select_from(wrong)) or 0
