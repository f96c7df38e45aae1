"""What was computed for whom, and how fast requests end. Knows tenants by id and tokens by number."""

from __future__ import annotations

from collections import Counter, deque

from weft.engine.order import AdmissionOrder
from weft.engine.plan import Chunk
from weft.engine.request_state import RequestState

NUM_KEPT_ENDS = 64
MAX_RETRY_AFTER_S = 60.0


class TenantService:
    """Counts tokens for the order of admission and for status, and ends for the time a refused client should wait.

    Args:
        order: Is told what each tenant is charged.
    """

    def __init__(self, order: AdmissionOrder) -> None:
        self._order = order
        self._tokens: Counter[str] = Counter()
        self._ends_s: deque[float] = deque(maxlen=NUM_KEPT_ENDS)

    def charge(self, state: RequestState, chunk: Chunk) -> None:
        """Count a chunk that was just committed; what is computed again after a preemption is on the house."""
        self._tokens[state.tenant] += len(chunk.token_ids)
        first_time = max(state.num_computed - max(chunk.start, state.num_charged), 0)
        state.num_charged = max(state.num_charged, state.num_computed)
        prompt_tokens = min(first_time, max(state.num_prompt - (state.num_computed - first_time), 0))
        self._order.charge(state.tenant, state.request.flow.weight, prompt_tokens, first_time - prompt_tokens)

    def tokens(self, limit: int) -> dict[str, int]:
        """Tokens computed since start, of the `limit` busiest tenants."""
        return dict(self._tokens.most_common(limit))

    def note_end(self, now_s: float) -> None:
        """A request has ended."""
        self._ends_s.append(now_s)

    def retry_after_s(self, num_waiting: int) -> float:
        """When a place in a queue may be free, from the rate at which requests end."""
        ends = self._ends_s
        if len(ends) < 2 or ends[-1] <= ends[0]:
            return 1.0
        rate = (len(ends) - 1) / (ends[-1] - ends[0])
        return min(max(num_waiting / rate, 1.0), MAX_RETRY_AFTER_S)
