"""Prices of tokens. Costs are whole numbers: the parts of a bill add up to the bill.

A price is per million tokens with at most four decimal places, so one token costs a whole number of 10^-10 of the
currency. The current prices apply to the whole history.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from decimal import Decimal

from sqlalchemy import BigInteger, ColumnElement, FromClause, and_, case, cast, literal, true

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

    def times(self, factor: Decimal) -> Price:
        """Prices times a factor; the products must be whole numbers of units."""
        return Price(**{kind: int(units * factor) for kind, units in asdict(self).items()})


@dataclass(frozen=True, slots=True, kw_only=True)
class PriceTable:
    """Prices. The first that exists counts: of the adapter, of the caller's tenant, of the base, the default."""

    currency: str
    """Such as `EUR`."""
    prices: Mapping[str, Price]
    """By `tenant/adapter` (`tenant/owner/adapter` for one that was granted), `tenant/*`, `base` for requests without an
    adapter, and `default`, which must be there."""
    batch: Decimal = Decimal(1)
    """Factor on every price for a line of a batch. A price times this factor must be a whole number of units."""

    def costs(self, facts: FromClause) -> tuple[ColumnElement[int], ColumnElement[int]]:
        """The cost of each row of `facts` in two parts: the first in `PART` units, the second in units."""
        columns = facts.c

        def applies(name: str) -> ColumnElement[bool]:
            tenant, slash, adapter = name.partition("/")
            if not slash:
                return true() if name == "default" else columns.adapter == ""
            is_tenants = columns.tenant == tenant
            return is_tenants if adapter == "*" else and_(is_tenants, columns.adapter == adapter)

        names = sorted(self.prices, key=_rank)
        priced = [(applies(name), self.prices[name]) for name in names]
        if self.batch != 1:
            is_batch = columns.service_class == "batch"
            priced = [
                *((and_(is_batch, here), price.times(self.batch)) for here, price in priced),
                *priced,
            ]
        kinds = {
            "prompt": columns.prompt_tokens - columns.cached_tokens,
            "cached": columns.cached_tokens,
            "completion": columns.completion_tokens,
        }

        def cost(part: int) -> ColumnElement[int]:
            terms = []
            for kind, tokens in kinds.items():
                *whens, (_, otherwise) = [
                    (here, literal(divmod(getattr(price, kind), PART)[part], BigInteger))
                    for here, price in priced
                ]
                units = case(*whens, else_=otherwise) if whens else otherwise
                terms.append(cast(tokens, BigInteger) * units)
            return terms[0] + terms[1] + terms[2]

        return cost(0), cost(1)


def _rank(name: str) -> int:
    """Place of a price among those that may count: of an adapter, of a tenant, of the base, the default."""
    return {"base": 2, "default": 3}.get(name, int(name.endswith("/*")))


def in_currency(units: int) -> str:
    """A cost in the currency, exactly: `0.0123`."""
    whole, rest = divmod(units, UNITS)
    return f"{whole}.{rest:010d}".rstrip("0") if rest else str(whole)
