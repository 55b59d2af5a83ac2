"""What the scheduler costs: to plan and settle a step, and to let requests in.

python -P benchmarks/scheduler.py
"""

from __future__ import annotations

import gc
import time

from tokenpod.core.requests import Request, StoppingParams
from tokenpod.core.sampling import SamplingParams
from tokenpod.scheduler.policies import ADMISSIONS, BATCHINGS, batching
from tokenpod.scheduler.preemption import PREEMPTIONS
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
    while turn(scheduler):
        pass
    return scheduler


def turn(scheduler: Scheduler) -> int:
    """Plan and settle one step; its prompt tokens."""
    step = scheduler.plan(0)
    scheduler.settle(step, [1] * len(step.sampled), 0)
    return step.prompt_tokens


def ask(scheduler: Scheduler, first: int, requests: int, *, prompt: int, most: int) -> None:
    """Requests with different prompts."""
    for number in range(first, first + requests):
        stopping = StoppingParams(most, eos_token_ids=frozenset({2}))
        scheduler.submit(Request([number], [number] * prompt, SamplingParams(), stopping))


def admission(requests: int) -> float:
    """Milliseconds of the first plan of an empty pod that has room for all."""
    scheduler = Scheduler(Limits(requests * 600, requests, 2048, prefill_tokens=4096))
    ask(scheduler, 0, requests, prompt=PROMPT, most=400)
    began = time.perf_counter()
    scheduler.plan(0)
    assert not scheduler.load().waiting
    return 1e3 * (time.perf_counter() - began)


def full_pod(
    rows: int, waiting: int, admission: str, turns: str, *, memory: bool, host_slots: int = 0
) -> tuple[float, float, float]:
    """Milliseconds of plans of a full pod: nobody comes or goes; one has gone; the most of these.

    Args:
        rows: sequences that run.
        waiting: requests that wait.
        admission, turns: the policies' names.
        memory: the waiting ones lack memory, and not a row.
        host_slots: tokens that the host's memory holds.
    """
    longest, new = PROMPT + 500, 500
    slots = rows * (longest + 300)
    limits = Limits(
        slots,
        (2 if memory else 1) * rows,
        slots,
        prefill_tokens=rows * PROMPT,
        host_slots=host_slots,
    )
    made = batching(turns)
    scheduler = Scheduler(limits, admission=ADMISSIONS[admission], batching=made)
    ask(scheduler, 0, rows, prompt=PROMPT, most=new)
    while turn(scheduler):
        pass
    assert scheduler.load().running == rows
    ask(scheduler, rows, waiting, prompt=slots - rows * PROMPT if memory else PROMPT, most=new)
    turn(scheduler)
    calm: list[float] = []
    moved: list[float] = []
    for number in range(60):
        for times in (calm, moved):
            if times is moved:
                scheduler.abort([number])
            began = time.perf_counter()
            step = scheduler.plan(0)
            times.append(time.perf_counter() - began)
            scheduler.settle(step, [1] * len(step.sampled), 0)
    assert scheduler.load().waiting
    return 1e3 * min(calm), 1e3 * min(moved), 1e3 * sorted(moved)[len(moved) // 2]


def crowded_pod(
    rows: int, waiting: int, admission: str, turns: str, preemption: str, *, samples: int = 1
) -> tuple[int, float, float, float]:
    """Of a pod whose pool is full: steps that preempt, and processor milliseconds of such a plan.

    The least, the median and the most of them. Nothing overlaps, so that what gives way is freed
    and queued again, or copied, within the plan.

    Args:
        rows: sequences that run.
        waiting: requests that wait.
        admission, turns, preemption: the policies' names.
        samples: of each request that runs.
    """
    prompt, grown, requests = 512, 48, rows // samples
    slots = requests * prompt + rows * grown
    host_slots = 0 if preemption == "recompute" else 1 << 20
    limits = Limits(slots, rows, 8192, prefill_tokens=slots, host_slots=host_slots)
    scheduler = Scheduler(
        limits,
        admission=ADMISSIONS[admission],
        batching=batching(turns),
        preemption=PREEMPTIONS[preemption](512),
    )
    # What past_future remembers is short: so it lets in more than fit.
    ask(scheduler, 0, 200, prompt=1, most=2)
    while turn(scheduler) or scheduler.load().running:
        pass
    stopping = StoppingParams(4096, eos_token_ids=frozenset({2}))
    for first in range(200, 200 + rows, samples):
        own = [*range(first, first + samples)]
        scheduler.submit(Request(own, [first] * prompt, SamplingParams(), stopping))
    while scheduler.load().running < rows or turn(scheduler):
        turn(scheduler)
    ask(scheduler, 200 + rows, waiting, prompt=prompt, most=500)
    times: list[float] = []
    for _ in range(grown + 60):
        before = scheduler.load().preemptions
        began = time.process_time()
        step = scheduler.plan(0)
        took = time.process_time() - began
        if scheduler.load().preemptions > before:
            times.append(1e3 * took)
        scheduler.settle(step, [1] * len(step.sampled), 0)
    assert scheduler.load().waiting >= waiting
    times.sort()
    return len(times), times[0], times[len(times) // 2], times[-1]


def main() -> None:
    """Print a line for each number of rows. The machine may be busy: the least counts."""
    # As the engine does once it has started.
    gc.collect()
    gc.freeze()
    for rows in (1, 64, 256, 512):
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
        assert step.plan.rows == rows
        plan, settle = (1e6 * min(times) for times in (plans, settles))
        print(f"{rows:4} rows: plan {plan:6.1f} us, settle {settle:6.1f} us")
    for requests in (256, 512, 1000):
        least = min(admission(requests) for _ in range(5))
        print(f"{requests:4} requests let in by the first plan: {least:6.1f} ms")
    print(" 512 rows, 1000 waiting, ms of a plan: nobody comes or goes; one has gone (median)")
    for admission_name in ADMISSIONS:
        for turns in BATCHINGS:
            for memory in (False, True):
                pair = f"{admission_name} + {turns}, {'no memory' if memory else 'no row'}"
                calm, moved, median = full_pod(512, 1000, admission_name, turns, memory=memory)
                print(f"{pair:40} {calm:.2f} {moved:.2f} ({median:.2f})", flush=True)
    print(" the same, steps that preempt: how many of 108; least, median and most ms of a plan")
    for admission_name in ("optimistic", "past_future"):
        for turns in BATCHINGS:
            for preemption in PREEMPTIONS:
                for samples in (1, 2):
                    count, *took = crowded_pod(
                        512, 1000, admission_name, turns, preemption, samples=samples
                    )
                    case = f"{admission_name} + {turns}, {preemption}, {samples} of a request"
                    print(f"{case:48}", count, *(f"{each:.2f}" for each in took), flush=True)
    for memory in (False, True):
        calm, moved, median = full_pod(
            512, 1000, "exact", "mixed", memory=memory, host_slots=1 << 20
        )
        pair = f"exact + mixed, {'no memory' if memory else 'no row'}, host's memory"
        print(f"{pair:40} {calm:.2f} {moved:.2f} ({median:.2f})")


if __name__ == "__main__":
    main()
