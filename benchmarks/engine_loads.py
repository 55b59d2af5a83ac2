"""Serves a load with an engine in process, on a GPU or on the CPU, under any policies."""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

import numpy as np
from loads import figures

from tokenpod.core.outputs import StepOutputs
from tokenpod.core.requests import Request, StoppingParams
from tokenpod.core.sampling import SamplingParams
from tokenpod.scheduler.work import Limits
from tokenpod.simulator.trace import Arrival


class Client:
    """The other end of an engine's link: hands requests in when they are due."""

    def __init__(self, load: list[Arrival], vocabulary: int) -> None:
        chance = random.Random(3)
        self._load = load
        self._prompts = [
            [chance.randrange(10, vocabulary) for _ in range(each.prompt_tokens)] for each in load
        ]
        self._began = time.perf_counter()
        self._next = 0
        self.tokens: list[list[float]] = [[] for _ in load]
        self.left = len(load)
        self.last: StepOutputs | None = None

    @property
    def now(self) -> float:
        return time.perf_counter() - self._began

    def receive(self, seconds: float | None) -> list[Request]:
        found = []
        while self._next < len(self._load):
            due = self._load[self._next].at
            if due > self.now:
                if found or seconds == 0:
                    break
                time.sleep(max(min(due - self.now, seconds or 1.0), 0))
                continue
            found.append(self._request(self._next))
            self._next += 1
        return found

    def _request(self, number: int) -> Request:
        # The length is the trace's: what a model says would differ between runs.
        output = self._load[number].output_tokens
        stopping = StoppingParams(self._load[number].max_new_tokens or output)
        return Request([number], self._prompts[number], SamplingParams(), stopping)

    def send(self, message: object) -> None:
        assert isinstance(message, StepOutputs)
        self.last, now = message, self.now
        for sequence in message.sequence_ids:
            self.tokens[sequence].append(now)

    def over(self, scheduler: Any) -> None:
        """End by a stop what has come to its length, as a front end ends it at a stop sequence."""
        assert self.last is not None
        done = [
            i for i in self.last.sequence_ids if len(self.tokens[i]) >= self._load[i].output_tokens
        ]
        self.last = None
        if done:
            scheduler.abort(done, stopped=True)
            self.left -= len(done)


def served(
    policies: dict[str, Any],
    executor: Any,
    limits: Limits,
    load: list[Arrival],
    bounds: tuple[float, float],
    *,
    overlap: bool,
    vocabulary: int,
) -> dict[str, float]:
    """One run on a real model. `policies`: what the scheduler is made with."""
    from tokenpod.engine.loop import EngineLoop
    from tokenpod.scheduler.scheduler import Scheduler

    client, scheduler = Client(load, vocabulary), Scheduler(limits, **policies)
    executor.release(range(limits.max_rows + 1))
    loop = EngineLoop(client, scheduler, executor, overlap=overlap)  # type: ignore[arg-type]
    used, turns = 0.0, 0
    while client.left:
        loop.turn()
        if client.last is not None:
            client.over(scheduler)
        state = scheduler.load()
        used += state.slots - state.free_slots - state.evictable_slots
        turns += 1
    while scheduler.busy:
        loop.turn()
    tokens = [
        np.array(came[: each.output_tokens]) for each, came in zip(load, client.tokens, strict=True)
    ]
    found = figures(load, tokens, bounds)
    return found | {
        "preemptions": scheduler.load().preemptions,
        "kv_mean": used / turns / limits.slots,
    }


def demo(rows: int) -> Any:
    """The embedded model's executor on one thread."""
    import torch

    import tokenpod.models.demo
    from tokenpod.engine.host_executor import HostExecutor
    from tokenpod.kernels.pool import KVPool, alike
    from tokenpod.models.load import load_model

    torch.set_num_threads(1)
    cpu = torch.device("cpu")
    folder = Path(tokenpod.models.demo.__file__).parent
    model = load_model(folder, dtype=torch.float32, device=cpu, progress=lambda done, of: None)
    pool = KVPool(slots=40_000, layouts=[alike(2, 64)] * 8, dtype=torch.float32, device=cpu)
    return HostExecutor(model, pool, rows=rows + 1, vocab_size=4096)
