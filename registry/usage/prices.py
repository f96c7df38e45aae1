"""Prices of tokens. Costs are whole numbers: the parts of a bill add up to the bill.

A price is per million tokens with at most four decimal places, so one token costs a whole number of 10^-10 of the
currency. The current prices apply to the whole history.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any

from sqlalchemy import BigInteger, ColumnElement, FromClause, and_, case, cast, literal

UNITS = 10**10
"""Units of cost in one of the currency."""
PART = 10**5
"""Units in the larger of the two parts in which costs are summed. 2^63 units, the largest integer of databases,
are only 900 million of a currency. In parts the sum of 9 * 10^13 tokens fits at any price."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Price:
    """Units that one token costs, by its kind."""

    prompt: int
    """A prompt token that was computed."""
    cached: int
    """A prompt token found in the prefix cache."""
    completion: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PriceTable:
    """Prices. The first that exists counts: of the adapter, of the caller's tenant, of the base, the default."""

    currency: str
    """Such as `EUR`."""
    default: Price
    base: Price | None = None
    """Price of requests without an adapter."""
    tenants: Mapping[str, Price] = field(default_factory=dict)
    adapters: Mapping[tuple[str, str], Price] = field(default_factory=dict)
    """Prices by the caller's tenant and the adapter's name."""
    batch: Decimal = Decimal(1)
    """Factor on every price for a line of a batch. A price times this factor must be a whole number of units."""

    def costs(self, facts: FromClause) -> tuple[ColumnElement[int], ColumnElement[int]]:
        """The cost of each row of `facts` in two parts: the first in `PART` units, the second in units."""
        columns = facts.c
        computed = columns.prompt_tokens - columns.cached_tokens
        kinds = (
            ("prompt", computed),
            ("cached", columns.cached_tokens),
            ("completion", columns.completion_tokens),
        )

        def cost(part: int, factor: Decimal) -> ColumnElement[int]:
            terms = [
                cast(tokens, BigInteger) * self._of(kind, part, columns, factor)
                for kind, tokens in kinds
            ]
            return terms[0] + terms[1] + terms[2]

        if self.batch == 1:
            return cost(0, self.batch), cost(1, self.batch)
        is_batch = columns.service_class == "batch"
        parts, units = (
            case((is_batch, cost(part, self.batch)), else_=cost(part, Decimal(1)))
            for part in (0, 1)
        )
        return parts, units

    def _of(self, kind: str, part: int, columns: Any, factor: Decimal) -> ColumnElement[int]:  # noqa: ANN401 - a collection of columns
        def units(price: Price) -> ColumnElement[int]:
            return literal(divmod(int(getattr(price, kind) * factor), PART)[part], BigInteger)

        whens: list[tuple[ColumnElement[bool], ColumnElement[int]]] = [
            (and_(columns.tenant == tenant, columns.adapter == adapter), units(price))
            for (tenant, adapter), price in self.adapters.items()
        ]
        whens += [
            (columns.tenant == tenant, units(price)) for tenant, price in self.tenants.items()
        ]
        if self.base is not None:
            whens.append((columns.adapter == "", units(self.base)))
        return case(*whens, else_=units(self.default)) if whens else units(self.default)


def in_currency(units: int) -> str:
    """A cost in the currency, exactly: `0.0123`."""
    whole, rest = divmod(units, UNITS)
    return f"{whole}.{rest:010d}".rstrip("0") if rest else str(whole)
