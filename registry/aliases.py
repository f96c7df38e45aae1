"""Aliases: an alias such as `prod` means one version of an adapter, or several by weight (a canary)."""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Iterable, Mapping
from functools import cache
from itertools import accumulate

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncSession

from manylora.errors import ConflictError, InvalidRequestError
from manylora.registry.db.models import AdapterRow, AliasRow, GrantRow, TenantRow, VersionRow
from manylora.registry.names import DEFAULT_ALIAS, EVERY_VERSION, check_alias
from manylora.registry.records import AdapterVersion, VersionWeights

MAX_ALIASES = 100


async def point_aliases(
    session: AsyncSession, adapter_id: str, aliases: Mapping[str, VersionWeights | int | None]
) -> None:
    """Set each alias to one version, or to versions by weight; None removes it.

    Raises:
        InvalidRequestError: An alias is no name, a version does not exist, or there are too many aliases.
    """
    for alias, meaning in aliases.items():
        check_alias(alias)
        weights = {} if meaning is None else {meaning: 1} if isinstance(meaning, int) else meaning
        for version in weights:
            if await session.get(VersionRow, (adapter_id, version)) is None:
                raise InvalidRequestError(
                    f"There is no version {version} for the alias `{alias}`.", param="aliases"
                )
        await session.execute(
            sa.delete(AliasRow).where(AliasRow.adapter_id == adapter_id, AliasRow.alias == alias)
        )
        for version, weight in weights.items():
            session.add(
                AliasRow(adapter_id=adapter_id, alias=alias, version=version, weight=weight)
            )
        await session.flush()
    names = sa.select(sa.func.count(AliasRow.alias.distinct())).where(
        AliasRow.adapter_id == adapter_id
    )
    if aliases and (await session.scalar(names) or 0) > MAX_ALIASES:
        raise InvalidRequestError(
            f"An adapter takes at most {MAX_ALIASES} aliases.", param="aliases"
        )


async def check_not_split(session: AsyncSession, adapter_id: str) -> None:
    """Return if an upload may move the alias `default`: an upload does not end a split (a canary).

    Raises:
        ConflictError: `default` splits its requests among versions; code upload.ends_split.
    """
    meant = sorted((await read_aliases(session, [adapter_id]))[adapter_id].get(DEFAULT_ALIAS, ()))
    if len(meant) > 1:
        raise ConflictError(
            f"The alias `default` splits its requests among the versions {', '.join(map(str, meant))}, and this upload "
            "would end the split. Upload with activate=false, then set the alias `default`.",
            code="upload.ends_split",
            param="activate",
        )


async def read_aliases(
    session: AsyncSession, adapter_ids: Iterable[str]
) -> dict[str, dict[str, dict[int, int]]]:
    """Aliases of these adapters: by adapter and alias, the weights of the versions."""
    found: dict[str, dict[str, dict[int, int]]] = {adapter_id: {} for adapter_id in adapter_ids}
    statement = (
        sa.select(AliasRow)
        .where(AliasRow.adapter_id.in_(found))
        .order_by(AliasRow.alias, AliasRow.version)
    )
    for row in await session.scalars(statement):
        found[row.adapter_id].setdefault(row.alias, {})[row.version] = row.weight
    return found


def main_version(alias: str) -> sa.ScalarSelect[int]:
    """For statements over VersionRow: the alias's version of the largest weight, of equal ones the newest."""
    return (
        sa.select(AliasRow.version)
        .where(AliasRow.adapter_id == VersionRow.adapter_id, AliasRow.alias == alias)
        .order_by(AliasRow.weight.desc(), AliasRow.version.desc())
        .limit(1)
        .correlate(VersionRow)
        .scalar_subquery()
    )


def pick(choices: Iterable[tuple[AdapterVersion, int]], sticky: str) -> AdapterVersion:
    """One of the versions, by weight; always the same one for the same `sticky`.

    Each `sticky` has a fixed place on a line that the versions divide: a version with a growing share keeps its users.
    """
    ordered = sorted(choices, key=lambda choice: choice[0].version)
    if len(ordered) == 1:
        return ordered[0][0]
    named = f"{len(ordered[0][0].adapter_id)}:{ordered[0][0].adapter_id}{sticky}".encode(
        "utf-8", "surrogatepass"
    )
    place = int.from_bytes(hashlib.sha256(named).digest()[:8], "big")
    ends = list(accumulate(weight for _, weight in ordered))
    return ordered[bisect_right(ends, place * ends[-1] >> 64)][0]


@cache
def meant_by(by: str, *, is_own: bool) -> sa.Select[AdapterRow, VersionRow, int]:
    """The statement that finds what a selector means. Cached: building it takes as long as running it.

    Bind `name`, `caller`, `by` (the version, digest or alias) and, unless `is_own`, `owner`.
    """
    caller: sa.BindParameter[str] = sa.bindparam("caller")
    weight: sa.SQLColumnExpression[int] = sa.literal(1) if by != "alias" else AliasRow.weight
    is_meant = sa.and_(
        AliasRow.adapter_id == VersionRow.adapter_id, AliasRow.version == VersionRow.version
    )
    chosen = {
        "version": VersionRow.version == sa.bindparam("by"),
        "digest": VersionRow.digest == sa.bindparam("by"),
        "alias": sa.and_(is_meant, AliasRow.alias == sa.bindparam("by")),
    }[by]
    owner = sa.select(TenantRow.id).where(TenantRow.name == sa.bindparam("owner")).scalar_subquery()
    adapter = (
        AdapterRow.name == sa.bindparam("name"),
        AdapterRow.tenant_id == (caller if is_own else owner),
    )
    meant = sa.select(AdapterRow, VersionRow, weight).join(
        VersionRow, VersionRow.adapter_id == AdapterRow.id
    )
    return meant.where(*adapter, _may_call(caller), chosen).order_by(VersionRow.version)


def _may_call(tenant_id: sa.BindParameter[str]) -> sa.ColumnElement[bool]:
    """Condition on AdapterRow and VersionRow: the version is the tenant's own, or granted to it."""
    granted = sa.exists().where(
        GrantRow.adapter_id == AdapterRow.id,
        GrantRow.tenant_id == tenant_id,
        sa.or_(GrantRow.version == EVERY_VERSION, GrantRow.version == VersionRow.version),
    )
    return sa.or_(AdapterRow.tenant_id == tenant_id, granted)
