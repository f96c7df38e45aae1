"""Names: which texts can be stored, and which version of an adapter a name means.

The checks refuse what a database could not take: PostgreSQL takes no NUL in a text, and drivers take no integers of
more than 64 bits. A request names an adapter as `name`, `name@3`, `name@prod` or `name@sha256:...`, each also as
`tenant/name`. An alias such as `prod` means one version, or several by weight (a canary).
"""

from __future__ import annotations

import hashlib
import re
from bisect import bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from typing import TYPE_CHECKING, Literal

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncSession

from manylora.errors import ConflictError, InvalidRequestError, NotFoundError
from manylora.registry.db.models import AdapterRow, AliasRow, GrantRow, TenantRow, VersionRow

if TYPE_CHECKING:
    from manylora.registry.records import AdapterVersion, Shares

DEFAULT_ALIAS = "default"
EVERY_VERSION = 0
"""Version of a grant for all versions."""
MAX_INTEGER = (1 << 63) - 1
MAX_DESCRIPTION = 4096
MAX_VERSION = (1 << 31) - 1
MAX_ALIASES = 100
MAX_SHARES = 8
MAX_WEIGHT = 10_000

NAME_RULE = (
    "be 1 to 63 lower-case letters, digits, dots, underscores or hyphens, start and end with a letter or digit, and "
    "not contain two dots in a row"
)
_NAME = re.compile(r"[a-z0-9](?:[a-z0-9._-]{0,61}[a-z0-9])?")
_UNSTORABLE = re.compile("[\x00\ud800-\udfff]")
_VERSION = re.compile(r"[1-9][0-9]{0,8}")
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")


def is_name(text: str) -> bool:
    """Whether `text` can name a tenant, an adapter or an alias."""
    return _NAME.fullmatch(text) is not None and ".." not in text


def check_name(text: str, param: str) -> str:
    """Return `text` if it can be a name.

    Raises:
        InvalidRequestError: It cannot; the message states the rule.
    """
    if not isinstance(text, str) or not is_name(text):
        raise InvalidRequestError(f"{param} must {NAME_RULE}.", param=param)
    return text


def check_alias(text: str) -> str:
    """Return `text` if it can be an alias: a name that cannot be taken for a version number.

    Raises:
        InvalidRequestError: It cannot.
    """
    check_name(text, "aliases")
    if text.isdigit():
        raise InvalidRequestError(
            "An alias must not be a number: those are versions.", param="aliases"
        )
    return text


def no_such(kind: str, name: str, param: str | None = None) -> NotFoundError:
    """The error for a name or id that does not exist; the message repeats it."""
    return NotFoundError(f"There is no {kind} `{shown(name)}`.", param=param)


def shown(text: str) -> str:
    """`text` as a message may repeat it: printable ASCII of at most 200 characters."""
    return text.encode("unicode_escape").decode()[:200]


def check_text(text: str, param: str, max_length: int) -> str:
    """Return `text` if every database stores it.

    Raises:
        InvalidRequestError: It is no text, is too long, or holds a NUL or half a surrogate pair.
    """
    if not isinstance(text, str) or len(text) > max_length:
        raise InvalidRequestError(
            f"{param} must be text of at most {max_length} characters.", param=param
        )
    if _UNSTORABLE.search(text):
        raise InvalidRequestError(
            f"{param} must not contain NUL or unpaired surrogates.", param=param
        )
    return text


def storable(text: str, max_length: int) -> str:
    """`text`, cut to `max_length`, without the characters that no database stores."""
    return _UNSTORABLE.sub("\ufffd", text[:max_length])


def check_integer(value: object, param: str, low: int = 0, high: int = MAX_INTEGER) -> int:
    """Return `value` if it is an integer (and no bool) within the bounds.

    Raises:
        InvalidRequestError: It is not.
    """
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise InvalidRequestError(f"{param} must be an integer from {low} to {high}.", param=param)
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class Selector:
    """A parsed model name."""

    tenant: str | None
    """The owner's name; None: the caller's own adapter."""
    name: str
    by: Literal["version", "alias", "digest"] = "alias"
    """What chooses the version."""
    value: str | int = DEFAULT_ALIAS


def model_not_found(text: str) -> NotFoundError:
    """The one error for a model that is unknown, malformed or not for this caller: it does not say which."""
    message = f"The model `{shown(text)}` does not exist or you may not use it."
    return NotFoundError(message, code="model_not_found", param="model")


def parse_selector(text: str) -> Selector:
    """Parse a model name.

    Raises:
        NotFoundError: `text` cannot name an adapter; code model_not_found.
    """
    path, at, pin = text.partition("@")
    owner, slash, rest = path.partition("/")
    tenant, name = (owner, rest) if slash else (None, path)
    if not is_name(name) or (tenant is not None and not is_name(tenant)):
        raise model_not_found(text)
    if _VERSION.fullmatch(pin):
        return Selector(tenant=tenant, name=name, by="version", value=int(pin))
    if _DIGEST.fullmatch(pin):
        return Selector(tenant=tenant, name=name, by="digest", value=pin)
    alias = pin if at else DEFAULT_ALIAS
    if is_name(alias) and not alias.isdigit():
        return Selector(tenant=tenant, name=name, value=alias)
    raise model_not_found(text)


async def point_aliases(
    session: AsyncSession, adapter_id: str, aliases: Mapping[str, Shares | int | None]
) -> None:
    """Set each alias to one version, or to versions by weight; None removes it.

    Raises:
        InvalidRequestError: An alias is no name, a version does not exist, or a weight is out of range.
    """
    for alias, meaning in aliases.items():
        check_alias(alias)
        shares = {} if meaning is None else {meaning: 1} if isinstance(meaning, int) else meaning
        if meaning is not None and not 1 <= len(shares) <= MAX_SHARES:
            raise InvalidRequestError(
                f"An alias must point to 1 to {MAX_SHARES} versions.", param="aliases"
            )
        for version, weight in shares.items():
            check_integer(version, "aliases", low=1, high=MAX_VERSION)
            check_integer(weight, "aliases", low=1, high=MAX_WEIGHT)
            if await session.get(VersionRow, (adapter_id, version)) is None:
                raise InvalidRequestError(
                    f"There is no version {version} for the alias `{alias}`.", param="aliases"
                )
        await session.execute(
            sa.delete(AliasRow).where(AliasRow.adapter_id == adapter_id, AliasRow.alias == alias)
        )
        for version, weight in shares.items():
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
    shares = sa.and_(
        AliasRow.adapter_id == VersionRow.adapter_id, AliasRow.version == VersionRow.version
    )
    chosen = {
        "version": VersionRow.version == sa.bindparam("by"),
        "digest": VersionRow.digest == sa.bindparam("by"),
        "alias": sa.and_(shares, AliasRow.alias == sa.bindparam("by")),
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
