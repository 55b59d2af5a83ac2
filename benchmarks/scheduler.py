"""What the scheduler costs in a step that only decodes: microseconds to plan and settle it.

python -P benchmarks/scheduler.py
"""

from __future__ import annotations

import statistics
import time

from tokenpod.core.messages import Request, SamplingParams, StoppingParams
from tokenpod.scheduler.scheduler import Limits, Scheduler

STEPS = 300
PROMPT = 64


def scheduler_with(rows: int) -> Scheduler:
    """A scheduler whose rows all decode, with different prompts."""
    slots = rows * (PROMPT + 2 * STEPS)
    scheduler = Scheduler(Limits(slots, rows, 2048, prefill_tokens=rows * PROMPT))
    stopping = StoppingParams(2 * STEPS, eos_token_ids=frozenset({2}))
    for row in range(rows):
        prompt = [row] * PROMPT
        scheduler.submit(Request([row], prompt, SamplingParams(), stopping, deadline_at=1 << 62))
    while any(not work.decodes for work in turn(scheduler)):
        pass
    return scheduler


def turn(scheduler: Scheduler) -> list:
    """Plan and settle one step."""
    step = scheduler.plan(0)
    scheduler.settle(step, [1] * sum(work.needs_logits for work in step.works), 0)
    return step.works


def main() -> None:
    """Print a line for each number of rows."""
    for rows in (1, 64, 256):
        scheduler = scheduler_with(rows)
        plans, settles = [], []
        tokens = [1] * rows
        for _ in range(STEPS):
            began = time.perf_counter()
            step = scheduler.plan(0)
            planned = time.perf_counter()
            scheduler.settle(step, tokens, 0)
            plans.append(planned - began)
            settles.append(time.perf_counter() - planned)
        assert len(step.works) == rows
        plan, settle = (1e6 * statistics.median(times) for times in (plans, settles))
        print(f"{rows:4} rows: plan {plan:6.1f} us, settle {settle:6.1f} us")


if __name__ == "__main__":
    main()
