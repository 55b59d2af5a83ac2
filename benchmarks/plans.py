"""What it costs to tell the other ranks a step's plan, without a model.

    python benchmarks/plans.py [--steps 500] [--followers 1]

Followers are processes of their own on the same machine. `leader` is the step loop's own time
(encode, put into the queues); `arrives` is from before that until a follower has the plan decoded;
`busy` is the leader process's CPU time in all, its gRPC threads included. Steps come at the pace
that a GPU would set.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import statistics
import time
from multiprocessing.connection import Connection

import numpy as np

from tokenpod.core.errors import EngineError
from tokenpod.core.group_messages import Drain
from tokenpod.core.placement import Placement
from tokenpod.core.plan import PlanRow, StepPlan, plan_of
from tokenpod.engine.shards.follower import PlanStream
from tokenpod.engine.shards.leader import PlanServer
from tokenpod_client.protos.tokenpod.shard.v1 import shard_pb2 as pb

#: Rows of a decode step, and the seconds that such a step takes on one H200 (an 8B shape).
STEPS = [(1, 0.004), (64, 0.008), (256, 0.014)]
ADDRESS = "unix-abstract:tokenpod-benchmark-plans"


def decode_step(step: int, rows: int) -> StepPlan:
    each = [PlanRow(row, 500 + row, [1000 + row], output=step) for row in range(rows)]
    return plan_of(step, each)


def placement(rank: int, world: int) -> Placement:
    return Placement(
        rank=rank,
        world=world,
        local_rank=rank,
        plans=ADDRESS,
        rendezvous="127.0.0.1",
        rendezvous_port=0,
        leader_address="",
    )


def ignore(said: str | Drain, fault: bool = False) -> None:
    """No front end is there to receive it."""


def follow(rank: int, world: int, pipe: Connection) -> None:
    """Note when each plan is there."""
    stream = PlanStream(placement(rank, world), {}, on_lost=ignore, on_drain=ignore)
    stream.join(ignore)
    stream.come_up(1)
    arrived: list[int] = []
    with contextlib.suppress(EngineError):
        arrived.extend(time.monotonic_ns() for _ in stream.plans())
    pipe.send(arrived)


def measure(rows: int, seconds: float, steps: int, followers: int) -> list[float]:
    world = followers + 1
    server = PlanServer(placement(0, world), {}, on_lost=ignore, on_drain=ignore)
    pipes = [multiprocessing.Pipe() for _ in range(followers)]
    processes = [
        multiprocessing.get_context("spawn").Process(target=follow, args=(rank, world, end))
        for rank, (_, end) in enumerate(pipes, start=1)
    ]
    for process in processes:
        process.start()
    server.gather(ignore)
    server.form(1)
    server.come_up(1)
    began, took = [], []
    cpu = time.process_time_ns()
    for step in range(steps):
        plan = decode_step(step, rows)
        at = time.monotonic_ns()
        server.send_plan(plan)
        began.append(at)
        took.append(time.monotonic_ns() - at)
        time.sleep(seconds)
    cpu = time.process_time_ns() - cpu
    server.close("done")
    arrived = [mine.recv() for mine, _ in pipes]
    for process in processes:
        process.join()
    late = [there[at] - began[at] for there in arrived for at in range(steps)]
    return [
        statistics.median(took) / 1e3,
        statistics.median(late) / 1e3,
        float(np.percentile(late, 99)) / 1e3,
        cpu / steps / 1e3,
    ]


def codec(rows: int) -> tuple[float, float, int]:
    """Microseconds to encode and to decode, and bytes."""
    plan, times = decode_step(1, rows), ([], [])
    for _ in range(300):
        at = time.perf_counter_ns()
        frame = pb.Plan(number=1, columns=plan.to_bytes()).SerializeToString()
        between = time.perf_counter_ns()
        message = pb.Plan.FromString(frame)
        read_at = time.perf_counter_ns()
        StepPlan.from_bytes(message.columns)
        times[1].append(time.perf_counter_ns() - read_at)
        times[0].append(between - at)
    return statistics.median(times[0]) / 1e3, statistics.median(times[1]) / 1e3, len(frame)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--followers", type=int, default=1)
    arguments = parser.parse_args()
    print("rows  bytes  encode  decode | leader  arrives  99 %  busy | share of the step (us)")
    for rows, seconds in STEPS:
        encode, decode, size = codec(rows)
        leader, arrives, slow, busy = measure(rows, seconds, arguments.steps, arguments.followers)
        print(
            f"{rows:4} {size:6} {encode:7.0f} {decode:7.0f} | {leader:6.0f} {arrives:8.0f}"
            f" {slow:5.0f} {busy:5.0f} | {leader / seconds / 1e4:.2f} %"
        )


if __name__ == "__main__":
    main()
