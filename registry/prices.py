"""What tokens cost: whole numbers, so that the parts of a bill add up to the bill.

A price is per million tokens with at most four decimal places, so a token costs a whole number of 10^-10 of the
currency. Prices hold for the whole history: a question asked later with another table gets another answer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import BigInteger, ColumnElement, FromClause, and_, case, cast, func, literal

UNITS = 10**10
"""Units of cost in one of the currency."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Price:
    """Units that one token costs, by what it was."""

    prompt: int
    """A prompt token that was computed."""
    cached: int
    """A prompt token found in the prefix cache."""
    completion: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PriceTable:
    """Prices; the closest one counts: of the adapter, of its caller's tenant, of the base, the default."""

    currency: str
    """Such as `EUR`."""
    default: Price
    base: Price | None = None
    """Of requests without an adapter."""
    tenants: Mapping[str, Price] = field(default_factory=dict)
    adapters: Mapping[tuple[str, str], Price] = field(default_factory=dict)
    """By the caller's tenant and the adapter's name."""

    def cost(self, facts: FromClause) -> ColumnElement[int]:
        """The cost of each row of `facts`, in units."""
        columns = facts.c
        computed = columns.prompt_tokens - columns.cached_tokens
        parts = (("prompt", computed), ("cached", columns.cached_tokens), ("completion", columns.completion_tokens))
        terms = [cast(tokens, BigInteger) * self._of(kind, columns) for kind, tokens in parts]
        return terms[0] + terms[1] + terms[2]

    def _of(self, kind: str, columns: Any) -> ColumnElement[int]:  # noqa: ANN401 - a collection of columns
        def units(price: Price) -> ColumnElement[int]:
            return literal(getattr(price, kind), BigInteger)

        whens: list[tuple[ColumnElement[bool], ColumnElement[int]]] = [
            (and_(columns.tenant == tenant, columns.adapter == adapter), units(price))
            for (tenant, adapter), price in self.adapters.items()
        ]
        whens += [(columns.tenant == tenant, units(price)) for tenant, price in self.tenants.items()]
        if self.base is not None:
            whens.append((columns.adapter == "", units(self.base)))
        return case(*whens, else_=units(self.default)) if whens else units(self.default)


def sum_of_cost(prices: PriceTable | None, facts: FromClause) -> ColumnElement[int]:
    """The cost of all rows together, in units; 0 without prices."""
    if prices is None:
        return literal(0, BigInteger)
    return cast(func.coalesce(func.sum(prices.cost(facts)), 0), BigInteger)


def in_currency(units: int) -> str:
    """A cost in the currency, exactly: `0.0123`."""
    whole, rest = divmod(units, UNITS)
    return f"{whole}.{rest:010d}".rstrip("0") if rest else str(whole)
