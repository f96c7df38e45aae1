"""Runs one scenario against a real engine core, and looks at everything after every step."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NoReturn

from manylora.config import SchedulerConfig
from manylora.engine.request import EXPIRED, INTERNAL, NON_FINITE, RequestOutput
from manylora.engine.scheduling.request_state import ModelLimits
from manylora.errors import AdapterUnavailableError, CapacityError, EngineError, NeverFitsError
from simulation.adapters import SimulatedCopier, SimulatedLoader
from simulation.build import SimulatedEngine, small_geometry
from simulation.checks import Checks
from simulation.faults import logged_faults
from simulation.pages import DevicePages
from simulation.runner import SimulatedRunner
from simulation.scenario import Action, Scenario, draw
from simulation.truth import EOS, MAX_MODEL_LEN, VOCAB_SIZE, Truth
from simulation.virtual_time import EngineClock, VirtualExecutor, VirtualTime

MAX_IDLE_PUMPS = 1_500
"""Pumps in a row in which nothing happens, after which the engine is stuck: more time than a load that hangs takes."""
MAX_PUMPS = 20_000
IDLE_S = 0.01
"""From one pump that computes nothing to the next; every further one takes a third longer, up to `LONGEST_IDLE_S`."""
LONGEST_IDLE_S = 0.5
LOOK_IDLE_EVERY = 4
"""Pumps from one look to the next, while pumps compute nothing, tell nothing and leave the counts of pages alone."""


class SimulationError(AssertionError):
    """Something that must never happen, with the command that shows it again."""

    def __init__(
        self, seed: int, now_s: float, step: int, failures: list[str], *, overlaps: bool
    ) -> None:
        shown = "\n".join(f"  - {failure}" for failure in failures[:8])
        replay = f"scripts/simulate --seed {seed}{' --overlap' * overlaps}"
        super().__init__(
            f"seed {seed}, second {now_s:.3f}, after {step} steps:\n{shown}\nreplay: {replay}"
        )


@dataclass
class Life:
    """Life of one request: its tokens, its outputs and its end."""

    truth: Truth
    tokens: list[int] = field(default_factory=list)
    outputs: list[RequestOutput] = field(default_factory=list)
    is_aborted: bool = False

    @property
    def has_ended(self) -> bool:
        return bool(self.outputs) and self.outputs[-1].finish_reason is not None


class Simulation(SimulatedEngine):
    """One scenario.

    Args:
        scenario: Everything but the depth.
        overlaps: Whether steps overlap.
    """

    def __init__(self, scenario: Scenario, *, overlaps: bool = False) -> None:
        self.scenario = scenario
        self._overlaps = overlaps
        self.failures: list[str] = []
        self.on_event: Callable[[str], object] | None = None
        """Is told what happens, for somebody who looks for a defect."""
        self.lives: dict[str, Life] = {}
        self._truths: dict[str, Truth] = {}
        self._open: set[str] = set()
        self._deleted: set[str] = set()
        self._num_kept = 0
        """Adapters that pins kept on the device before the last pump."""
        self.num_pumps = 0
        self._num_idle = 0
        """Pumps in a row in which nothing was computed and nothing happened outside."""
        self._standing: tuple[dict[str, int], dict[str, int]] | None = None
        """Pages by state, and preemptions, after the last pump."""
        self._next_action_s: float | None = None
        rng = random.Random(scenario.seed + 1)

        self.time = VirtualTime()
        self.engine_clock = EngineClock(self.time)
        self.device = DevicePages(scenario.num_pages + 1)
        failed: set[str] = set()
        copier = SimulatedCopier(
            self.time,
            rng,
            self.device,
            scenario.faults,
            failed,
            pages_at_once=scenario.pages_at_once,
        )
        super().__init__(
            clock=self.engine_clock,
            config=SchedulerConfig(
                max_running=scenario.max_running,
                step_tokens=scenario.step_tokens,
                policy=scenario.policy,
                inner=scenario.inner,
                itl_target_ms=scenario.itl_target_ms,
            ),
            geometry=small_geometry(scenario.page_tokens, scenario.num_groups),
            limits=ModelLimits(
                max_model_len=MAX_MODEL_LEN, vocab_size=VOCAB_SIZE, eos_token_ids=frozenset([EOS])
            ),
            costs=scenario.costs,
            num_pages=scenario.num_pages,
            host_pages=scenario.host_pages,
            max_swap_pages=scenario.max_swap_pages,
            slots=scenario.slots,
            make_loader=lambda images, slab: SimulatedLoader(
                scenario, self.time, rng, images, slab, failed
            ),
            copier=copier,
            executors=(
                VirtualExecutor(self.time, scenario.load_threads),
                VirtualExecutor(self.time, 1),
            ),
            is_caching=scenario.is_caching,
            prices=scenario.prices,
            poison=self.device.poison,
        )
        self.checks = Checks(self, scenario, self.device, self.failures.append)
        self.runner = SimulatedRunner(
            self,
            scenario,
            time=self.time,
            rng=rng,
            device=self.device,
            truths=self._truths,
            see=self.checks.see,
            fail=self.failures.append,
        )
        self.core = self.start(self.runner, overlaps=overlaps)

    def run(self) -> Counter[str]:
        """Play the scenario to its end; returns how often what happened.

        Raises:
            SimulationError: Something happened that must not.
        """
        try:
            with logged_faults(self.failures):
                self._play()
                self._check_end()
        finally:
            self.time.kill_all()
        return self._counts()

    def _play(self) -> None:
        actions = list(reversed(self.scenario.actions))
        while actions or self._open:
            while actions and actions[-1].at_s <= self.time.now_s:
                self._act(actions.pop())
                self._num_idle = 0
            self._next_action_s = actions[-1].at_s if actions else None
            self._pump()
            if self._num_idle > MAX_IDLE_PUMPS:
                self._fail(f"nothing moves: {self.core.status()}")
            if self.num_pumps > MAX_PUMPS:
                self._fail(f"no end after {self.num_pumps} pumps: {self.core.status()}")
        self._next_action_s = None

    def _pump(self) -> None:
        """One pump, and some time if it computed nothing."""
        self.num_pumps += 1
        steps = self.runner.num_steps
        self._num_kept = sum(entry.is_kept for entry in self.residency.entries.values())
        try:
            outputs = self.core.pump()
        except EngineError as error:
            self._fail(f"the engine gives up: {error}")
        for output in outputs:
            self._take(output)
        is_idle = self.runner.num_steps == steps
        before, self._standing = (
            self._standing,
            (self.pool.counts(), dict(self.scheduler.table.preemptions)),
        )
        has_changed = not is_idle or bool(outputs) or self._standing != before
        if has_changed or self._num_idle % LOOK_IDLE_EVERY == 0:
            self.checks.look(self.core, self._open)
            self._check_charges()
        if is_idle:
            self.checks.look_idle(self.time.now_s)
        if self.on_event is not None:
            self.on_event(self._describe())
        if self.failures:
            self._fail()
        self._num_idle = self._num_idle + 1 if is_idle else 0
        if is_idle:
            self._pass_time(has_told=bool(outputs))

    def _check_charges(self) -> None:
        """Tenants are charged for the tokens that steps computed for requests that lived, and for no others."""
        charged = {
            name: tenant.tokens
            for name, tenant in self.scheduler.table.service.tenants.items()
            if tenant.tokens
        }
        if charged != self.runner.tokens:
            self.failures.append(
                f"tenants were charged for {charged} tokens, not {dict(self.runner.tokens)}"
            )

    def _pass_time(self, *, has_told: bool) -> None:
        """After a pump that computed nothing: until something happens, or for a while that grows."""
        num_events = self.time.num_events
        next_s = self.time.now_s + min(IDLE_S * 1.3 ** min(self._num_idle, 20), LONGEST_IDLE_S)
        events = [
            when_s for when_s in (self.time.next_event_s, self._next_action_s) if when_s is not None
        ]
        self.time.run_until(max(self.time.now_s, min([next_s, *events])))
        if has_told or self.time.num_events > num_events:
            self._num_idle = 0

    def _describe(self) -> str:
        waiting = [
            f"{state.request_id}:{state.waiting_reason}{'+hold' * state.adapter.is_holding}"
            for state in self.scheduler.table.waiting
        ]
        running = [
            f"{state.request_id}@{state.pages.num_computed}"
            for state in self.scheduler.table.running
        ]
        residents = [
            f"{resident.digest[7:11]}:{resident.tier}:{resident.pages}p,{resident.running}r,{resident.holds}h"
            for resident in self.residency.residents()
        ]
        return (
            f"{self.time.now_s:8.3f} step {self.runner.num_steps} running {running} waiting {waiting} "
            f"pages {self.pool.counts()} evictable {self.evictor.num_evictable} adapters {residents}"
        )

    def _act(self, action: Action) -> None:  # noqa: C901 - one line per verb
        ref, request = action.adapter, action.request
        if self.on_event is not None:
            self.on_event(
                f"{self.time.now_s:8.3f} {action.verb} {request or action.request_id or ref or action.seconds}"
            )
        if action.verb == "submit" and request is not None:
            self._submit(action)
        elif action.verb == "abort":
            if action.request_id in self._open:
                self.lives[action.request_id].is_aborted = True
            self.core.abort(action.request_id)
        elif action.verb == "abort_paused":
            for request_id in sorted(state.request_id for state in self.scheduler.table.paused)[:1]:
                self.lives[request_id].is_aborted = True
                self.core.abort(request_id)
        elif action.verb == "freeze":
            self.engine_clock.freeze(True)
        elif action.verb == "thaw":
            self.engine_clock.freeze(False)
        elif action.verb == "jump":
            self.engine_clock.jump(action.seconds)
        elif ref is not None:
            if action.verb == "pin" and ref.digest not in self._deleted:
                self.core.residency.pin(ref, True)
            elif action.verb == "unpin":
                self.core.residency.pin(ref, False)
            elif action.verb == "delete":
                self._deleted.add(ref.digest)
                self.loader.missing.add(ref.digest)
                self.core.residency.forget(ref.digest)
            elif action.verb == "lose":
                self.loader.missing.add(ref.digest)
            elif action.verb == "restore":
                self.loader.missing.discard(ref.digest)

    def _submit(self, action: Action) -> None:
        request = action.request
        if request is None:
            return
        truth = Truth(request)
        self._truths[request.request_id] = truth
        life = self.lives[request.request_id] = Life(
            truth, tokens=list(request.generated_token_ids)
        )
        try:
            self.core.submit(request)
        except NeverFitsError:
            if not self._never_fits(truth):
                self._fail(
                    f"{request.request_id} was refused as too large, but fits the empty pool"
                )
            del self.lives[request.request_id]
        else:
            self._open.add(request.request_id)
            if life.truth.request.params.max_tokens < len(request.generated_token_ids):
                self._fail(f"{request.request_id} was taken with more tokens than it may have")

    def _never_fits(self, truth: Truth) -> bool:
        request = truth.request
        num_tokens = len(request.prompt_token_ids) + max(request.params.max_tokens - 1, 0)
        size = self.scenario.adapters[request.adapter.digest] if request.adapter is not None else 0
        return self.geometry.pages(num_tokens) + size > self.pool.capacity

    def _take(self, output: RequestOutput) -> None:
        life = self.lives.get(output.request_id)
        if life is None or life.has_ended:
            self.failures.append(
                f"{output.request_id} gets an output though it is unknown or has ended: {output}"
            )
            return
        is_first = not life.outputs
        life.outputs.append(output)
        life.tokens += output.token_ids
        truth = life.truth
        if life.tokens != truth.output[: len(life.tokens)]:
            self.failures.append(f"{output.request_id} says {life.tokens}, not {truth.output}")
        prompt, params = truth.request.prompt_token_ids, truth.request.params
        most_cached = 0
        if is_first and params.prompt_logprobs is None and self.scenario.is_caching:
            most_cached = len(prompt) - (not truth.request.generated_token_ids)
        if not 0 <= output.cached_tokens <= most_cached:
            self.failures.append(
                f"{output.request_id} has {output.cached_tokens} cached of {len(prompt)} tokens"
            )
        if output.prompt_logprobs is not None:
            wanted = [(token, -float(index)) for index, token in enumerate(prompt[1:])]
            found = [
                (entry.token_id, entry.logprob)
                for entry in output.prompt_logprobs
                if entry is not None
            ]
            if found != wanted or output.prompt_logprobs[0] is not None:
                self.failures.append(
                    f"{output.request_id} has prompt logprobs {found}, not {wanted}"
                )
        if output.finish_reason is not None:
            self._open.discard(output.request_id)
            self._judge_end(life, output)

    def _judge_end(self, life: Life, output: RequestOutput) -> None:
        """A request ends with all its tokens, or for a reason that the scenario gave."""
        truth, request = life.truth, life.truth.request
        digest = request.adapter.digest if request.adapter is not None else ""
        reason, error = output.finish_reason, output.error
        if reason in ("stop", "length"):
            stops = life.tokens[-1:] == [EOS] and not request.params.ignore_eos
            is_right = life.tokens == truth.output and (reason == "stop") == stops
            wants_logprobs = (
                request.params.prompt_logprobs is not None and not request.generated_token_ids
            )
            if wants_logprobs and not any(part.prompt_logprobs for part in life.outputs):
                is_right = False
        elif reason == "abort":
            is_right = life.is_aborted
        elif error is None:
            is_right = False
        else:
            too_large = (
                self.scenario.adapters.get(digest, 0)
                > self.pool.capacity - self.scenario.num_groups
            )
            reasons = {
                AdapterUnavailableError.code: digest in self.loader.failed,
                EXPIRED.code: request.flow.deadline_s is not None
                and not any(part.token_ids for part in life.outputs),
                NON_FINITE.code: output.request_id in self.runner.unsound,
                INTERNAL.code: output.request_id in self.runner.hit,
                NeverFitsError.code: self._never_fits(truth) or too_large,
                CapacityError.code: self._num_kept > 0,
            }
            is_right = reasons.get(error.code, False)
        if not is_right:
            self.failures.append(
                f"{output.request_id} ends with {reason} ({error}) after {len(life.tokens)} of {len(truth.output)} "
                f"tokens {life.tokens}"
            )

    def _check_end(self) -> None:
        """Once all have ended and nothing is pinned, everything can be had again."""
        for action in self.scenario.actions:
            if action.verb == "pin" and action.adapter is not None:
                self.core.residency.pin(action.adapter, False)
        while (next_s := self.time.next_event_s) is not None:
            self.time.run_until(next_s)
            self._pump()
        for _ in range(3):
            self._pump()
        counts = self.pool.counts()
        residents = self.residency.residents()
        expectations = {
            f"pages are {counts}, {self.evictor.num_evictable} evictable": counts["kv"]
            == counts["quarantine"]
            == 0
            and self.evictor.num_available == self.pool.capacity,
            f"held or running are {residents}": not any(
                resident.holds or resident.running for resident in residents
            ),
            "the scheduler has some": len(self.scheduler.table.requests) == 0,
            "host pages are still theirs": self.swap.num_used == 0,
            "not everything can be evicted": self.evictor.make_room(self.pool.capacity),
            "host pages are lost": self.images.make_room(self.scenario.host_pages),
            "cached blocks are left without pages": len(self.prefixes) == 0,
        }
        self.failures += [
            f"all requests have ended, but {said}"
            for said, is_right in expectations.items()
            if not is_right
        ]
        self.checks.look(self.core, self._open)
        if self.failures:
            self._fail()

    def _fail(self, failure: str | None = None) -> NoReturn:
        if failure is not None:
            self.failures.append(failure)
        raise SimulationError(
            self.scenario.seed,
            self.time.now_s,
            self.runner.num_steps,
            self.failures,
            overlaps=self._overlaps,
        )

    def _counts(self) -> Counter[str]:
        status = self.core.status()
        counts: Counter[str] = Counter(
            steps=self.runner.num_steps,
            pumps=self.num_pumps,
            requests=len(self.lives),
            tokens=sum(len(life.tokens) for life in self.lives.values()),
            copies=self.runner.num_copies,
            moves=self.runner.num_moves,
            prefix_hits=status.prefix_hits,
            pauses=self.checks.num_pauses,
            fingerprint=self.runner.fingerprint,
        )
        for life in self.lives.values():
            last = life.outputs[-1]
            counts[
                f"end:{last.finish_reason}"
                + (f":{last.error.code}" if last.error is not None else "")
            ] += 1
        told = {
            "preemptions": status.preemptions,
            "evictions": status.evictions,
            "loads": status.loads,
        }
        counts.update(
            {f"{what}:{kind}": n for what, by_kind in told.items() for kind, n in by_kind.items()}
        )
        return counts


def simulate(seed: int, *, overlaps: bool = False) -> Counter[str]:
    """Run the scenario of a seed; returns how often what happened.

    Raises:
        SimulationError: Something happened that must not.
    """
    return Simulation(draw(seed), overlaps=overlaps).run()
