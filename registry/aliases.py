"""Names for versions: each means one version, or several by weight (a canary). Runs in the caller's transaction.

A request names an adapter as `name`, `name@3`, `name@prod` or `name@sha256:...`, each also as `tenant/name`. A text
that is no selector is answered like an unknown name, so that nobody learns which is which.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from sqlalchemy import ScalarSelect, delete, func, select
from sqlalchemy.ext.asyncio import AsyncSession

from weft.errors import ConflictError, InvalidRequestError, NotFoundError
from weft.registry.db.models import AliasRow, VersionRow
from weft.registry.names import check_alias, check_integer, is_name, shown
from weft.registry.records import AdapterVersion, Shares

MAX_ALIASES = 100
MAX_SHARES = 8
MAX_WEIGHT = 10_000
_LARGEST_VERSION = (1 << 31) - 1


async def point_aliases(session: AsyncSession, adapter_id: str, aliases: Mapping[str, Shares | int | None]) -> None:
    """Let each alias mean a version, or versions by weight, and nothing else; None removes it.

    Raises:
        InvalidRequestError: An alias is no name, a version does not exist, or a weight is out of range.
    """
    for alias, meaning in aliases.items():
        check_alias(alias)
        shares = {} if meaning is None else {meaning: 1} if isinstance(meaning, int) else meaning
        if meaning is not None and not 1 <= len(shares) <= MAX_SHARES:
            raise InvalidRequestError(f"An alias must point to 1 to {MAX_SHARES} versions.", param="aliases")
        for version, weight in shares.items():
            check_integer(version, "aliases", low=1, high=_LARGEST_VERSION)
            check_integer(weight, "aliases", low=1, high=MAX_WEIGHT)
            if await session.get(VersionRow, (adapter_id, version)) is None:
                raise InvalidRequestError(f"There is no version {version} for the alias `{alias}`.", param="aliases")
        await session.execute(delete(AliasRow).where(AliasRow.adapter_id == adapter_id, AliasRow.alias == alias))
        for version, weight in shares.items():
            session.add(AliasRow(adapter_id=adapter_id, alias=alias, version=version, weight=weight))
        await session.flush()
    names = select(func.count(AliasRow.alias.distinct())).where(AliasRow.adapter_id == adapter_id)
    if aliases and (await session.scalar(names) or 0) > MAX_ALIASES:
        raise InvalidRequestError(f"An adapter takes at most {MAX_ALIASES} aliases.", param="aliases")


async def check_not_split(session: AsyncSession, adapter_id: str) -> None:
    """Return if an upload may move the alias `default`; a split (a canary) ends only where somebody says so.

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


async def read_aliases(session: AsyncSession, adapter_ids: Iterable[str]) -> dict[str, dict[str, dict[int, int]]]:
    """By adapter: its aliases by name, each with its versions' weights."""
    found: dict[str, dict[str, dict[int, int]]] = {adapter_id: {} for adapter_id in adapter_ids}
    statement = select(AliasRow).where(AliasRow.adapter_id.in_(found)).order_by(AliasRow.alias, AliasRow.version)
    for row in await session.scalars(statement):
        found[row.adapter_id].setdefault(row.alias, {})[row.version] = row.weight
    return found


def main_version(alias: str) -> ScalarSelect[int]:
    """The version with the alias's largest weight, the newest of equals; for statements over VersionRow."""
    return (
        select(AliasRow.version)
        .where(AliasRow.adapter_id == VersionRow.adapter_id, AliasRow.alias == alias)
        .order_by(AliasRow.weight.desc(), AliasRow.version.desc())
        .limit(1)
        .correlate(VersionRow)
        .scalar_subquery()
    )


def pick(choices: Iterable[tuple[AdapterVersion, int]], sticky: str) -> AdapterVersion:
    """One of the versions, by weight, and always the same for the same `sticky`.

    A version whose share grows keeps those it had, since each has a fixed place on a line that the versions divide.
    """
    ordered = sorted(choices, key=lambda choice: choice[0].version)
    if len(ordered) == 1:
        return ordered[0][0]
    named = f"{len(ordered[0][0].adapter_id)}:{ordered[0][0].adapter_id}{sticky}".encode("utf-8", "surrogatepass")
    place = int.from_bytes(hashlib.sha256(named).digest()[:8], "big")
    rest = place * sum(weight for _, weight in ordered) >> 64
    for version, weight in ordered:
        rest -= weight
        if rest < 0:
            return version
    raise AssertionError("a place lies within the sum of all weights")


DEFAULT_ALIAS = "default"

_VERSION = re.compile(r"[1-9][0-9]{0,8}")
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Selector:
    """A parsed selector; exactly one of version, alias and digest is set."""

    tenant: str | None
    """Name of the owner; None means the caller."""
    name: str
    version: int | None = None
    alias: str | None = None
    digest: str | None = None


def model_not_found(text: str) -> NotFoundError:
    """The one answer to a model that is unknown, malformed, or not for this caller."""
    return NotFoundError(
        f"The model `{shown(text)}` does not exist or you may not use it.", code="model_not_found", param="model"
    )


def parse_selector(text: str) -> Selector:
    """Take a selector apart.

    Raises:
        NotFoundError: `text` cannot name an adapter; code model_not_found.
    """
    path, at, pin = text.partition("@")
    owner, slash, rest = path.partition("/")
    tenant, name = (owner, rest) if slash else (None, path)
    if not is_name(name) or (tenant is not None and not is_name(tenant)):
        raise model_not_found(text)
    if not at:
        return Selector(tenant=tenant, name=name, alias=DEFAULT_ALIAS)
    if _VERSION.fullmatch(pin):
        return Selector(tenant=tenant, name=name, version=int(pin))
    if _DIGEST.fullmatch(pin):
        return Selector(tenant=tenant, name=name, digest=pin)
    if is_name(pin) and not pin.isdigit():
        return Selector(tenant=tenant, name=name, alias=pin)
    raise model_not_found(text)
