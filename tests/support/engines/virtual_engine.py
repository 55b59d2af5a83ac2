"""An engine in this process that has adapters: requests in, tokens and scores out."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from support.engines.engine_link import Client
from tokenpod.core.messages import AdapterFacts
from tokenpod.core.requests import Request, StoppingParams
from tokenpod.core.sampling import SamplingParams
from tokenpod.engine.adapters.adapter_reading import read_one
from tokenpod.engine.cpu.cpu_executor import CpuExecutor
from tokenpod.engine.loop import EngineLoop
from tokenpod.kernels.cache.kv_pool import KVPool
from tokenpod.models.adapters.store import Space
from tokenpod.models.load import load_model
from tokenpod.scheduler.scheduler import Limits, Scheduler
from tokenpod.service.serving.adapters import with_adapter

CPU = torch.device("cpu")
POSITIONS = 64


@dataclass
class Answer:
    """What was said of a sequence."""

    tokens: list[int]
    logprobs: list[float]
    prompt_logprobs: list[float]
    cached: int


class Engine:
    """A loop, its scheduler and an executor over a model with adapters, numbered from 1."""

    def __init__(
        self,
        base: Path,
        adapters: list[Path],
        *,
        slots: int = 400,
        rows: int = 6,
        prefill: int = 7,
        lora: int = 0,
        make: Any = None,
        **limits: Any,
    ) -> None:
        model: Any = load_model(
            base,
            dtype=torch.float32,
            device=CPU,
            progress=lambda done, total: None,
            max_total_tokens=POSITIONS,
            adapters=Space(lora, 8),
        )
        store = model.adapters
        self.facts: list[AdapterFacts] = [
            read_one(store, number, folder.name, str(folder))
            for number, folder in enumerate(adapters, start=1)
        ]
        pool = KVPool(
            slots=slots + 16, layouts=model.config.kv_layouts, dtype=model.dtype, device=CPU
        )
        for tensor in (*pool.keys, *pool.values):
            tensor.fill_(float("nan"))  # what nobody wrote must not be read
        made = make or host
        self.executor = made(model, pool, rows + 1)
        self.scheduler = Scheduler(
            Limits(
                slots=slots,
                max_rows=rows,
                max_positions=POSITIONS,
                prefill_tokens=prefill,
                adapter_slots=lora,
                adapters=frozenset(range(1, len(adapters) + 1)),
                **limits,
            )
        )
        self.link = Client()
        self.loop = EngineLoop(self.link, self.scheduler, self.executor, overlap=False)
        self._number = 0

    def ask(self, adapter: int, ids: list[int], new: int, **more: Any) -> Request:
        """A greedy request, submitted; adapter 0 is none."""
        self._number += 1
        stopping = StoppingParams(max_new_tokens=new)
        asked = Request([self._number], ids, SamplingParams(), stopping, logprobs=True, **more)
        asked = with_adapter(asked, self.facts[adapter - 1] if adapter else None)
        self.link.inbox.append(asked)
        return asked

    def run(self, *asked: Request) -> list[Answer]:
        """Turn until these have all of their tokens."""
        for _ in range(300):
            self.loop.turn()
            self.scheduler.check()
            assert not self.link.failures, self.link.failures
            numbers = [request.sequence_ids[0] for request in asked]
            wanted = [request.stopping.max_new_tokens for request in asked]
            if [len(self.link.tokens[number]) for number in numbers] == wanted:
                return [self._answer(number) for number in numbers]
        raise AssertionError("the engine does not come to an end")

    def _answer(self, number: int) -> Answer:
        said = self.link
        return Answer(
            said.tokens[number], said.logprobs[number], said.scored[number], said.cached[number]
        )


def host(model: Any, pool: KVPool, rows: int) -> CpuExecutor:
    return CpuExecutor(
        model, pool, rows=rows, vocab_size=model.config.vocab_size, adapters=model.adapters
    )
