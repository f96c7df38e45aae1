"""Times planning alone, in real microseconds: `Scheduler.plan` and `commit` at a size where anything slow would show.

    PYTHONPATH=tests/support .venv/bin/python scripts/time_planning.py [--running 256] [--waiting 20000] ...

By default 256 requests have rows and 20,000 wait, of 1,000 tenants with 5,000 adapters, all of which are on the device,
and in every step two requests end, as many arrive, and some change places; with shorter answers more do. No tokens are
computed.
"""

from __future__ import annotations

import argparse
import gc
import random
import statistics
import sys
import time

from fairness.calls import Call
from fairness.engine import EngineSettings, VirtualEngine

WARM_UP_STEPS = 64


def options() -> argparse.Namespace:
    """Sizes, from the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--running", type=int, default=256)
    parser.add_argument("--waiting", type=int, default=20_000)
    parser.add_argument("--tenants", type=int, default=1_000)
    parser.add_argument("--adapters", type=int, default=5_000)
    parser.add_argument(
        "--output-tokens", type=int, default=128, help="of an answer, on average (default 128)"
    )
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--policy", choices=("fair", "fcfs"), default="fair")
    return parser.parse_args()


def main() -> int:
    """The command; prints medians and percentiles."""
    args = options()
    rng = random.Random(1)
    settings = EngineSettings(
        policy=args.policy,
        rows=args.running,
        step_tokens=4 * args.running,
        num_pages=args.adapters * 20 + 64 * args.running,
        host_pages=args.adapters * 20,
        slots=args.adapters,
        ranks=(8,) * args.adapters,
        on_device=range(args.adapters),
    )
    engine = VirtualEngine(settings)

    def arrive() -> None:
        adapter = rng.randrange(args.adapters)
        call = Call(
            at_s=engine.time.now_s,
            tenant=f"t{adapter % args.tenants}",
            num_prompt=rng.randint(16, 64),
            num_output=rng.randint(args.output_tokens // 2, args.output_tokens * 3 // 2),
            adapter=adapter,
        )
        engine.submit(call)

    for _ in range(args.waiting + args.running):
        arrive()
    gc.freeze()  # as the engine's process has it
    gc.set_threshold(10_000, 20)
    plan_s = []
    commit_s = []
    scheduler = engine.scheduler
    for step in range(args.steps + WARM_UP_STEPS):
        engine.residency.tick(step)
        started_s = time.perf_counter()
        plan = scheduler.plan()
        planned_s = time.perf_counter()
        if plan is None:
            raise SystemExit("nothing is planned though requests wait")
        results = engine.runner.execute(plan)
        executed_s = time.perf_counter()
        scheduler.commit(plan, results)
        outputs = scheduler.take_outputs()
        committed_s = time.perf_counter()
        scheduler.complete(plan.step)
        for _ in range(sum(output.finish_reason is not None for output in outputs)):
            arrive()
        if step >= WARM_UP_STEPS:
            plan_s.append(planned_s - started_s)
            commit_s.append(committed_s - executed_s)
    print(
        f"{len(scheduler.table.running)} run, {len(scheduler.table.waiting)} wait, "
        f"{args.tenants} tenants, {args.adapters} adapters"
    )
    both_s = [one + other for one, other in zip(plan_s, commit_s, strict=True)]
    for name, seconds in (("plan", plan_s), ("commit", commit_s), ("both", both_s)):
        cuts = statistics.quantiles(seconds, n=20)
        print(
            f"{name:8} median {1e6 * statistics.median(seconds):8.0f} us    p95 {1e6 * cuts[-1]:8.0f} us"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
