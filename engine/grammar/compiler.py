"""Compiles grammars in one thread beside the steps, in turns of the tenants, and keeps the last compiled ones.

Kept grammars belong to a tenant: nobody learns from a short wait what others asked for, and a tenant that sends many
grammars pushes out its own first.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from manylora.adapters.residency.load_threads import TaskExecutor
from manylora.engine.grammar.matcher import BYTES_PER_TOKEN, Matcher
from manylora.engine.request import INTERNAL, ErrorInfo, GenerationRequest, error_info
from manylora.errors import ManyloraError

logger = logging.getLogger(__name__)

MAX_KEPT = 256
"""Largest number of compiled grammars that are kept."""
MAX_KEPT_BYTES = 256 << 20
"""Largest memory of kept grammars. It cannot be measured, so the time of compiling gives an upper bound."""
BASE_BYTES = 100 << 10
BYTES_PER_SECOND = 200_000_000
"""Largest memory that a second of compiling fills."""
_Key = tuple[str, str]
"""Tenant and digest of a grammar."""


@dataclass(eq=False)
class _Job:
    key: _Key
    text: str
    requests: dict[str, GenerationRequest] = field(default_factory=dict)
    """Requests that wait for it."""
    result: Matcher | ErrorInfo | None = None
    """The result; None before the job ran, or if no request waited for it any more."""
    cost: int = 0
    """Upper bound of its memory in bytes."""


class Grammars:
    """Matchers for requests. All but the compiling runs in the engine's thread.

    Args:
        compiled: Compiles a grammar's text to a matcher.
        executor: An executor with one thread.
        notify: Called by that thread when a grammar is compiled.
    """

    def __init__(
        self,
        compiled: Callable[[str], Matcher],
        executor: TaskExecutor,
        notify: Callable[[], None] | None = None,
    ) -> None:
        self._compile = compiled
        self._executor = executor
        self._notify = notify
        self._lock = threading.Lock()
        self._queues: OrderedDict[str, deque[_Job]] = OrderedDict()
        """Waiting jobs by tenant; the tenant whose turn is next comes first."""
        self._jobs: dict[_Key, _Job] = {}
        self.done: deque[_Job] = deque()
        """Jobs that ended since the last `take_done`."""
        self.kept: OrderedDict[_Key, tuple[Matcher, int]] = OrderedDict()
        """Compiled grammars with their largest memory; the last used one is at the end."""

    def ask(self, request: GenerationRequest) -> Matcher | ErrorInfo | None:
        """Matcher of a request after its generated tokens; None if it must be compiled first, see `take_done`."""
        if request.grammar is None:
            raise ValueError("the request has no grammar")
        key = (request.flow.tenant, request.grammar.digest)
        if (kept := self.kept.get(key)) is not None and kept[0].is_worn:
            del self.kept[key]
        elif kept is not None:
            self.kept.move_to_end(key)
            self._hold_bounds()
            return _started(kept[0], request)
        if (job := self._jobs.get(key)) is not None:
            job.requests[request.request_id] = request
            return None
        job = self._jobs[key] = _Job(key, request.grammar.text, {request.request_id: request})
        self._begin(job)
        return None

    def forget(self, request: GenerationRequest) -> None:
        """Note that a request has ended. A grammar that only this request waited for is not compiled."""
        if request.grammar is None:
            return
        job = self._jobs.get((request.flow.tenant, request.grammar.digest))
        if job is not None:
            job.requests.pop(request.request_id, None)

    def take_done(self) -> Iterator[tuple[str, Matcher | ErrorInfo]]:
        """Requests whose grammars were compiled since the last call, each with its matcher or its error."""
        for _ in range(len(self.done)):
            job = self.done.popleft()
            result = job.result
            if result is None and job.requests:  # requests that joined after the others left
                self._begin(job)
                continue
            del self._jobs[job.key]
            if result is None:
                continue
            if isinstance(result, Matcher):
                self.kept[job.key] = (result, job.cost)
                self._hold_bounds()
            for request_id, request in job.requests.items():
                yield (
                    request_id,
                    _started(result, request) if isinstance(result, Matcher) else result,
                )

    def close(self) -> None:
        """Drop waiting jobs, and return when the running one is done."""
        with self._lock:
            self._queues.clear()
        self._executor.shutdown(wait=True, cancel_futures=True)

    def _begin(self, job: _Job) -> None:
        with self._lock:
            self._queues.setdefault(job.key[0], deque()).append(job)
        self._executor.submit(self._run_next)

    def _hold_bounds(self) -> None:
        held: dict[str, int] = {}
        for (tenant, _), (matcher, cost) in self.kept.items():
            held[tenant] = held.get(tenant, 0) + cost + matcher.wear.num_tokens * BYTES_PER_TOKEN
        while len(self.kept) > MAX_KEPT or sum(held.values()) > MAX_KEPT_BYTES:
            largest = max(held, key=held.__getitem__)
            key = next(key for key in self.kept if key[0] == largest)
            matcher, cost = self.kept.pop(key)
            held[largest] -= cost + matcher.wear.num_tokens * BYTES_PER_TOKEN

    def _run_next(self) -> None:
        with self._lock:
            if not self._queues:
                return
            tenant, queue = next(iter(self._queues.items()))
            job = queue.popleft()
            if queue:
                self._queues.move_to_end(tenant)
            else:
                del self._queues[tenant]
        if job.requests:
            started_s = time.thread_time()
            job.result = _made("compiling a grammar", lambda: self._compile(job.text))
            job.cost = BASE_BYTES + int(BYTES_PER_SECOND * (time.thread_time() - started_s))
        self.done.append(job)
        if self._notify is not None:
            self._notify()


def _made(what: str, make: Callable[[], Matcher]) -> Matcher | ErrorInfo:
    """Make a matcher, or an error if that fails; `what` names the work in the log."""
    try:
        return make()
    except ManyloraError as error:
        return error_info(error)
    except BaseException:  # a panic of llguidance is no Exception, and must end only this request
        logger.exception("%s failed", what)
        return INTERNAL


def _started(compiled: Matcher, request: GenerationRequest) -> Matcher | ErrorInfo:
    matcher = _made("copying a matcher", lambda: compiled.copy(request.params.stop_token_ids))
    generated = request.generated_token_ids
    if isinstance(matcher, ErrorInfo) or not generated or matcher.take(generated):
        return matcher
    message = "The tokens that were generated already are no beginning of a text of this grammar."
    return ErrorInfo(code="grammar_mismatch", message=message)
