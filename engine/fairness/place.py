"""One request as the fair order knows it: whose it is, its expected length and cost, and its place in the order."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from manylora.engine.fairness.shares import Flow, SortKey
from manylora.engine.request import FlowKey


@dataclass(slots=True, kw_only=True, eq=False)
class RequestCost:
    """Work of one request, expected and charged. Units are those of `manylora.engine.fairness.prices`."""

    tenant: str
    """Id of the tenant that pays."""
    adapter: str | None
    """Digest of its adapter; None is the base model."""
    rank: int = 0
    """Rank of its adapter; 0 is the base model."""
    num_prompt: int
    """Tokens in its prompt."""
    predicted_tokens: int = 0
    """Output tokens that it is expected to have, from earlier answers of its tenant and adapter."""
    num_charged: int = 0
    """Tokens that were computed at least once. To compute them again after a preemption costs the tenant nothing."""
    load_units: float = 0.0
    """Price of bringing its adapter to the device; 0 while the adapter's size is unknown."""
    owes_load: bool = field(default=False, init=False)
    """True if its adapter is brought to the device for it, and the load is not charged yet."""
    queued_units: float = field(default=0.0, init=False)
    """Predicted price of the tokens still to compute, as counted when it began to wait."""


@dataclass(slots=True, kw_only=True, eq=False)
class FairPlace:
    """A request in the fair order, with a row in the step or queued for one."""

    request_id: str
    key: FlowKey
    """Lane, tenant and weight."""
    arrival_index: float
    """Counts up per engine; older means smaller. No two are the same: fractions are for beams of one search."""
    arrived_s: float
    cost: RequestCost
    priority: int = 0
    """Lower goes first, within its tenant."""
    start_by_s: float = math.inf
    """Latest second at which it can start and keep its deadline."""
    has_started: bool = False
    """True if it ever had a row, or goes on from a request that had one."""
    level: int | None = None
    """Level in the multi-level feedback queue; None before it was queued."""
    level_below_front: int = field(default=0, init=False)
    """Level to return to after a turn at the front."""
    level_units: float = field(default=0.0, init=False)
    """Units used at this level."""
    in_batch_lane: bool = field(init=False)
    """True if it gives way to interactive requests."""
    has_row: bool = field(default=False, init=False)
    """True if it is in the step."""
    is_protected: bool = field(default=False, init=False)
    """True if no other request may take its row."""
    stopped_s: float = field(default=0.0, init=False)
    """Second at which it lost its row."""
    queue_key: SortKey = field(default=(), init=False)
    """Sort key in the queue of its flow."""
    flow: Flow[FairPlace] = field(init=False, repr=False)
    """Requests of its adapter and tenant; set when it enters the order."""

    def __post_init__(self) -> None:
        self.in_batch_lane = self.key.lane > 0

    @property
    def age_key(self) -> tuple[int, float]:
        """Sorts from the oldest to the newest request, lane by lane."""
        return self.key.lane, self.arrival_index

    def fork(self, request_id: str, arrival_index: float, num_charged: int) -> FairPlace:
        """The place of a request that goes on from this one, before it enters the order."""
        return replace(
            self,
            request_id=request_id,
            arrival_index=arrival_index,
            cost=replace(self.cost, num_charged=num_charged),
            has_started=True,
        )
