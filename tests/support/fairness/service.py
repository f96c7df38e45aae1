"""Service in units of one computed prompt token, counted from the plans and not taken from the scheduler's books."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from manylora.engine.fairness.service import Prices
from manylora.engine.scheduling.plan import StepPlan

UNIT_PRICES = Prices(prompt_context=0.0)
"""What is charged; it follows from `CostModel`: a unit is 19 us of a step, and a chunk reads its context once."""


@dataclass
class ServiceLog:
    """Units per tenant and step. Recomputed tokens are free: preempting was the engine's choice.

    Args:
        prices: Of a token.
        ranks: Of each adapter, by digest.
    """

    prices: Prices
    ranks: Mapping[str, int]
    times_s: list[float] = field(default_factory=list)
    """When each step ended."""
    sums: list[dict[str, float]] = field(default_factory=list)
    """After each step: units of every tenant since the start."""
    _charged: dict[str, int] = field(default_factory=dict)
    """Tokens of each request that were computed at least once."""

    def note(self, plan: StepPlan, ended_s: float, owners: Mapping[str, tuple[str, int]]) -> None:
        """Count a step.

        Args:
            plan: What ran.
            ended_s: When it ended.
            owners: Tenant and prompt length of each request.
        """
        prices = self.prices
        sums = dict(self.sums[-1]) if self.sums else {}
        rows = Counter(chunk.adapter.digest for chunk in plan.chunks if chunk.adapter is not None)
        for chunk in plan.chunks:
            tenant, num_prompt = owners[chunk.request_id]
            end = chunk.start + len(chunk.token_ids)
            first = max(chunk.start, self._charged.get(chunk.request_id, 0))
            self._charged[chunk.request_id] = max(first, end)
            num_output = max(end - max(first, num_prompt), 0)
            num_prompt_tokens = max(end - first, 0) - num_output
            units = prices.prompt_context * num_prompt_tokens * (first + end - num_output) / 2
            units += prices.prompt * num_prompt_tokens + num_output * (
                prices.output + prices.context * end
            )
            if chunk.adapter is not None:
                units += prices.rank * self.ranks[chunk.adapter.digest] / rows[chunk.adapter.digest]
            sums[tenant] = sums.get(tenant, 0.0) + units
        self.times_s.append(ended_s)
        self.sums.append(sums)

    def served(self, tenant: str, start_s: float, end_s: float) -> float:
        """Units of the steps that ended after `start_s` and until `end_s`."""
        return self._sum(tenant, end_s) - self._sum(tenant, start_s)

    def shares(self, start_s: float, end_s: float) -> dict[str, float]:
        """Each tenant's share of what was served between two seconds."""
        served = {tenant: self.served(tenant, start_s, end_s) for tenant in self.sums[-1]}
        total = sum(served.values())
        return {tenant: units / total for tenant, units in served.items()}

    def max_gap(
        self, one: str, other: str, weights: Mapping[str, float], start_s: float, end_s: float
    ) -> float:
        """Largest difference of service per weight between two tenants over any window inside two seconds.

        The service of a window is a difference of sums, so the largest gap over all windows is the range that the
        difference of both tenants' sums runs through.
        """
        first, last = bisect_left(self.times_s, start_s), bisect_right(self.times_s, end_s)
        ahead = [
            sums.get(one, 0.0) / weights[one] - sums.get(other, 0.0) / weights[other]
            for sums in self.sums[first:last]
        ]
        return max(ahead) - min(ahead)

    def least_share(self, tenant: str, window_s: float, start_s: float, end_s: float) -> float:
        """The smallest share of a tenant in any window of so many seconds that ends with a step."""
        first, last = (
            bisect_left(self.times_s, start_s + window_s),
            bisect_right(self.times_s, end_s),
        )
        return min(
            self.shares(now_s - window_s, now_s)[tenant] for now_s in self.times_s[first:last]
        )

    def _sum(self, tenant: str, until_s: float) -> float:
        index = bisect_right(self.times_s, until_s) - 1
        return self.sums[index].get(tenant, 0.0) if index >= 0 else 0.0


def max_min_shares(
    demands: Mapping[str, float], total: float, weights: Mapping[str, float]
) -> dict[str, float]:
    """What each tenant should get of `total` units: as much as it asks for, or an equal level per weight."""
    left, open_tenants = total, dict(demands)
    shares: dict[str, float] = {}
    while open_tenants:
        level = left / sum(weights[tenant] for tenant in open_tenants)
        content = [
            tenant for tenant, demand in open_tenants.items() if demand <= level * weights[tenant]
        ]
        if not content:
            return shares | {tenant: level * weights[tenant] for tenant in open_tenants}
        for tenant in content:
            shares[tenant] = open_tenants.pop(tenant)
            left -= shares[tenant]
    return shares


def jain_index(ratios: Sequence[float]) -> float:
    """Jain, Chiu and Hawe (1984): 1 where all are equal, 1/n where one has everything."""
    return sum(ratios) ** 2 / (len(ratios) * sum(ratio**2 for ratio in ratios))
