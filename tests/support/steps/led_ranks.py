"""Ranks as real processes, of which the first leads: others take its plans, and know no more."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec
import torch

from support.engines.engine_link import Client
from support.steps.ranks import CPU, TIMEOUT, as_on_a_gpu, interpreted_operations
from tokenpod.core.errors import RankLost
from tokenpod.core.messages import EngineOptions
from tokenpod.core.placement import Placement
from tokenpod.core.requests import Request
from tokenpod.engine.adapters.adapters import OwnAdapters
from tokenpod.engine.loop import EngineLoop
from tokenpod.engine.run import follow
from tokenpod.engine.shards.follower import PlanStream
from tokenpod.engine.shards.join import join_group
from tokenpod.engine.shards.leader import PlanServer
from tokenpod.engine.shards.member import Leading
from tokenpod.models import load as loading
from tokenpod.models.load import load_model
from tokenpod.models.weights.shard import Shard
from tokenpod.scheduler.scheduler import Limits, Scheduler


class LedJob(msgspec.Struct):
    """What a rank of two does."""

    rank: int
    folder: str
    options: EngineOptions
    #: Of plans, and where the ranks meet.
    ports: tuple[int, int]
    #: The leader is asked them in rounds, and captures one size of steps before each.
    rounds: list[list[Request]]
    #: The follower can't capture any size behind so many.
    captures: int = 100


class LedSaid(msgspec.Struct):
    """What became of it."""

    tokens: dict[int, list[int]] = {}
    #: Sizes that it captured while serving.
    captured: int = 0
    #: Why its group is over; empty: the test was.
    lost: str = ""


class Captures:
    """Counts what an executor captures, and breaks behind so many."""

    def __init__(self, executor: Any, most: int) -> None:
        self._executor, self._most = executor, most
        self.count = 0

    def capture_next(self) -> bool:
        if self.count == self._most:
            raise RuntimeError("no memory for a graph")
        more = self._executor.capture_next()
        self.count += more
        return bool(more)


def led(job: LedJob) -> LedSaid:
    """What this process, a rank, says."""
    os.environ |= {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    torch.set_num_threads(1)
    from tokenpod.engine.gpu import graphs

    graphs._coarse = lambda size, most: size == most
    loading.operations_for = lambda device: interpreted_operations()
    plans, meeting = job.ports
    place = Placement(
        rank=job.rank,
        world=2,
        local_rank=job.rank,
        plans=f"127.0.0.1:{plans}",
        rendezvous="127.0.0.1",
        rendezvous_port=meeting,
        leader_address="leader:1",
        secret="ours",
    )
    lost: list[str] = []
    how: dict[str, Any] = {
        "on_lost": lambda reason, fault: lost.append(reason),
        "on_drain": lambda drain: None,
    }
    ways: PlanServer | PlanStream
    if job.rank == 0:
        ways = PlanServer(place, {}, **how)
        ways.gather(lambda reason: None)
        ways.form(meeting)
    else:
        ways = PlanStream(place, {}, **how)
        ways.join(lambda reason: None)
    group = join_group(job.rank, 2, "127.0.0.1", meeting, device=CPU, timeout=TIMEOUT)
    positions = job.options.max_total_tokens
    assert positions is not None
    model = load_model(
        Path(job.folder),
        dtype=None,
        device=CPU,
        progress=lambda done, total: None,
        shard=Shard(group.rank, group.world),
        group=group,
        max_total_tokens=positions,
    )
    executor = as_on_a_gpu(model, job.options, positions, group, some=True).executor
    ways.come_up(100)
    if isinstance(ways, PlanStream):
        captures = Captures(executor, job.captures)
        try:
            follow(ways, executor, OwnAdapters(None, "", job.rank), captures)  # type: ignore[arg-type]
        except RankLost:
            pass
        except RuntimeError as error:  # as the engine's process says it
            ways.close(str(error))
            group.close()
            return LedSaid(captured=captures.count, lost=str(error))
        return LedSaid(captured=captures.count)
    return _lead(job, ways, executor, positions, lost)


def _lead(
    job: LedJob, server: PlanServer, executor: Any, positions: int, lost: list[str]
) -> LedSaid:
    limits = Limits(
        slots=job.options.max_batch_total_tokens or 0,
        max_rows=job.options.max_batch_size,
        max_positions=positions,
        prefill_tokens=job.options.max_batch_prefill_tokens,
    )
    link, captures = Client(), Captures(executor, 100)
    leading = Leading(server, executor, captures)
    loop = EngineLoop(link, Scheduler(limits), leading, overlap=True, captures=leading)  # type: ignore[arg-type]
    try:
        for number, asked in enumerate(job.rounds, 1):
            loop.turn()
            assert captures.count == number, "a size of steps is captured while nothing runs"
            link.inbox += asked
            link.left = {i for request in asked for i in request.sequence_ids}
            while link.left:
                loop.turn()
            assert captures.count == number
        while loop.captures is not None:
            loop.turn()
    except RankLost as error:
        return LedSaid(captured=captures.count, lost=" ".join([*lost, str(error)]))
    server.close("the test is over")
    return LedSaid(tokens=link.tokens, captured=captures.count)
