"""The callers of overload.py, in a process of their own."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Coroutine, Iterable
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from typing import Any

import grpc

from tokenpod_client.protos.generate.v3 import generate_pb2 as pb
from tokenpod_client.protos.generate.v3 import generate_pb2_grpc as rpc

REFUSALS = (grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNAVAILABLE)
NEW_TOKENS = 32
CHANNELS = 8
#: Deadline in the closed loop: the peak is what the server can do without one.
CLOSED_SECONDS = 60.0


@dataclass(frozen=True)
class Segment:
    """A load: closed with so many clients, or open with so many calls per second."""

    seconds: float
    #: Before the seconds that count.
    lead: float
    clients: int = 0
    calls_per_second: float = 0.0
    #: Refused callers come again after the hint.
    heeds: bool = False

    def share(self, at: int, count: int) -> Segment:
        """What process `at` of `count` makes of it."""
        clients = (self.clients + count - 1 - at) // count
        return replace(self, clients=clients, calls_per_second=self.calls_per_second / count)


@dataclass(frozen=True)
class Finished:
    """A call that ended OK, by CLOCK_MONOTONIC."""

    arrived: float
    ended: float
    tokens: int


@dataclass
class Load:
    """What became of the calls of one load. Seconds of CLOCK_MONOTONIC."""

    began: float
    ended: float
    finished: list[Finished] = field(default_factory=list)
    #: Seconds that a refusal took.
    refused: list[float] = field(default_factory=list)
    codes: Counter[str] = field(default_factory=Counter)
    lags: list[float] = field(default_factory=list)

    @classmethod
    def sum(cls, parts: Iterable[Load]) -> Load:
        """Of several processes at the same time."""
        each = list(parts)
        whole = cls(max(part.began for part in each), min(part.ended for part in each))
        for part in each:
            whole.finished += part.finished
            whole.refused += part.refused
            whole.codes += part.codes
            whole.lags += part.lags
        return whole

    def goodput(self) -> float:
        """Tokens per second of calls that ended OK while it counted."""
        inside = (call for call in self.finished if self.began <= call.ended <= self.ended)
        return sum(call.tokens for call in inside) / (self.ended - self.began)

    def latencies(self) -> list[float]:
        """Seconds that calls took which ended OK."""
        return [call.ended - call.arrived for call in self.finished]


def generate(address: str, deadline: float, seed: int, parent: Connection) -> None:
    """Make the loads that are asked for, for ever."""

    async def main() -> None:
        # Channels belong to the loop in which they are made.
        await Callers(address, deadline, seed).serve(parent)

    asyncio.run(main())


class Callers:
    """Calls on a few connections."""

    def __init__(self, address: str, deadline: float, seed: int) -> None:
        options = [("grpc.use_local_subchannel_pool", 1)]
        channels = [grpc.aio.insecure_channel(address, options) for _ in range(CHANNELS)]
        self._stubs = [rpc.TextGenerationServiceStub(channel) for channel in channels]
        self._deadline = deadline
        self._chance = random.Random(seed)
        self._running: set[asyncio.Task[None]] = set()

    async def serve(self, parent: Connection) -> None:
        """Loads of each message, in a row; answers once all of their calls have ended."""
        while True:
            segments: list[Segment] = await asyncio.to_thread(parent.recv)
            loads = [await self._make(segment) for segment in segments]
            await asyncio.gather(*self._running)
            parent.send(loads)

    async def _make(self, segment: Segment) -> Load:
        counts_from = time.monotonic() + segment.lead
        load = Load(counts_from, counts_from + segment.seconds)
        if segment.clients:
            await asyncio.gather(*(self._client(load) for _ in range(segment.clients)))
        else:
            await self._poisson(load, segment)
        return load

    async def _client(self, load: Load) -> None:
        while time.monotonic() < load.ended:
            if (pause := await self._call(load, CLOSED_SECONDS)) is not None:
                await asyncio.sleep(pause)

    async def _poisson(self, load: Load, segment: Segment) -> None:
        at = load.began - segment.lead
        while (at := at + self._chance.expovariate(segment.calls_per_second)) < load.ended:
            # At least once: calls that exist move before there are more.
            await asyncio.sleep(max(at - time.monotonic(), 0))
            load.lags.append(max(time.monotonic() - at, 0))
            self._start(self._caller(load, heeds=segment.heeds))

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    async def _caller(self, load: Load, *, heeds: bool) -> None:
        end = time.monotonic() + self._deadline
        while (left := end - time.monotonic()) > 0:
            pause = await self._call(load, left)
            if pause is None or not heeds:
                return
            await asyncio.sleep(pause)

    async def _call(self, load: Load, deadline: float) -> float | None:
        """One call, noted in `load`; seconds that a refusal asks to wait."""
        chance = self._chance
        ids = [chance.randint(10, 3000) for _ in range(chance.randint(16, 64))]
        stopping = pb.StoppingOptions(max_new_tokens=NEW_TOKENS, ignore_eos=True)
        request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=ids), stopping=stopping)
        arrived, tokens = time.monotonic(), 0
        try:
            async for event in chance.choice(self._stubs).Generate(request, timeout=deadline):
                tokens += len(event.tokens.token_ids)
        except grpc.aio.AioRpcError as error:
            load.codes[error.code().name] += 1
            if error.code() not in REFUSALS:
                return None
            load.refused.append(time.monotonic() - arrived)
            hint = dict(error.trailing_metadata() or ()).get("grpc-retry-pushback-ms", 1000)
            # Those who were refused together don't come back together.
            return int(hint) / 1000 * chance.uniform(1, 1.5)
        load.codes["OK"] += 1
        load.finished.append(Finished(arrived, time.monotonic(), tokens))
        return None
