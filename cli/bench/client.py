"""One client process' requests: sent when they are due, their messages timed as they come."""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field

import grpc

from tokenpod.cli.bench.arrivals import Closed, Share, arrival_times
from tokenpod.cli.bench.messages import Level, Plan, Record, Sampling
from tokenpod.cli.bench.prompts import (
    Ask,
    Listed,
    Text,
    TokenPrompts,
    arrivals_random,
    ask,
)
from tokenpod.protos.generate.v3 import generate_pb2 as v3
from tokenpod.protos.generate.v3.generate_pb2_grpc import TextGenerationServiceStub

#: Requests that are made before a level begins, so that making them costs no time within it.
_MADE_BEFORE = 2_048
#: Seconds between two looks at how late the event loop is.
_LAG_SECONDS = 0.02


@dataclass(slots=True)
class Timeline:
    """When the messages of one stream came, as it runs."""

    times: array[float] = field(default_factory=lambda: array("d"))
    tokens: array[int] = field(default_factory=lambda: array("I"))
    samples: array[int] = field(default_factory=lambda: array("I"))
    prompt_tokens: int = 0
    cached_tokens: int = 0
    queue_s: float = math.nan
    first_token_s: float = math.nan
    finished: int = 0

    def note(self, event: v3.GenerateResponse, now: float) -> None:
        """Take one event that came `now`."""
        kind = event.WhichOneof("event")
        if kind == "tokens":
            delta = event.tokens
            # Text alone, which was held back, brings no token.
            if delta.token_ids:
                self.times.append(now)
                self.tokens.append(len(delta.token_ids))
                self.samples.append(delta.index)
        elif kind == "started":
            self.prompt_tokens = event.started.prompt_tokens
            self.cached_tokens = event.started.cached_tokens
        elif kind == "finished":
            self.finished += 1
            if event.finished.index == 0:
                timings = event.finished.timings
                self.queue_s = timings.queue_ns / 1e9
                self.first_token_s = timings.time_to_first_token_ns / 1e9


class LevelRun:
    """One process' share of one level. Make it, then `run` it once.

    Args:
        stubs: by address, one for each connection.
        own: which requests are this process'.
        metadata: what identifies us on every call.
    """

    def __init__(
        self,
        plan: Plan,
        level: Level,
        own: Share,
        stubs: list[list[TextGenerationServiceStub]],
        metadata: tuple[tuple[str, str], ...],
    ) -> None:
        self._plan, self._level, self._own = plan, level, own
        self._stubs, self._metadata = stubs, metadata
        self.records: list[Record] = []
        self.lags: list[float] = []
        self.failed = 0
        self._due = self._due_times()
        requests = map(self._message, self._indices())
        self._requests = itertools.chain(list(itertools.islice(requests, _MADE_BEFORE)), requests)
        self._began = 0.0

    async def run(self, at: float) -> None:
        """Begin `at` this moment of the monotonic clock; returns when the last request has ended.

        What the requests came to is in `records`.
        """
        await _sleep_until(at)
        self._began = at
        lag = asyncio.create_task(self._watch_lag())
        try:
            if isinstance(self._level.load, Closed):
                slots = self._own.slots or 0
                await asyncio.gather(*(self._one_after_the_other() for _ in range(slots)))
            else:
                await self._when_due()
        finally:
            lag.cancel()

    def _now(self) -> float:
        return time.monotonic() - self._began

    def _indices(self) -> Iterator[int]:
        last = self._level.requests
        if last is None:
            return itertools.count(self._own.first, self._own.step)
        return iter(range(self._own.first, last, self._own.step))

    def _due_times(self) -> Iterator[float]:
        """When this process' requests are due. Every process draws all times and takes its own."""
        load, prompts = self._level.load, self._plan.prompts
        if isinstance(load, Closed):
            return itertools.repeat(0.0)
        listed = isinstance(prompts, TokenPrompts) and isinstance(prompts.lengths, Listed)
        written = prompts.lengths.at if listed else ()  # type: ignore[union-attr]
        random = arrivals_random(self._plan.seed, self._level.number)
        times = arrival_times(load, random, written)
        return itertools.islice(times, self._own.first, None, self._own.step)

    def _over(self, when: float) -> bool:
        return self._level.duration is not None and when >= self._level.duration

    async def _one_after_the_other(self) -> None:
        for index, request in self._requests:
            now = self._now()
            if self._over(now):
                return
            await self._call(index, request, due=now)

    async def _when_due(self) -> None:
        slots = asyncio.Semaphore(self._own.slots) if self._own.slots else None
        async with asyncio.TaskGroup() as calls:
            for due, (index, request) in zip(self._due, self._requests, strict=False):
                if self._over(due):
                    return
                await _sleep_until(self._began + due)
                if slots:
                    await slots.acquire()
                call = calls.create_task(self._call(index, request, due))
                if slots:
                    call.add_done_callback(lambda _: slots.release())

    async def _call(self, index: int, request: v3.GenerateRequest, due: float) -> None:
        """Send one request and read its stream to the end."""
        target = index % len(self._stubs)
        connections = self._stubs[target]
        stub = connections[index // len(self._stubs) % len(connections)]
        line = Timeline()
        code, detail = "OK", ""
        sent = self._now()
        try:
            call = stub.Generate(request, timeout=self._plan.deadline, metadata=self._metadata)
            # `read` costs less than iterating over the call.
            while isinstance(event := await call.read(), v3.GenerateResponse):
                line.note(event, self._now())
            if line.finished != self._plan.sampling.n:
                code, detail = "UNFINISHED", "the stream ended without every `finished`"
        except grpc.aio.AioRpcError as error:
            code, detail = error.code().name, error.details() or ""
        ended = self._now()
        self.failed += code != "OK"
        self.records.append(
            Record(
                index=index,
                target=target,
                due=due,
                sent=sent,
                ended=ended,
                code=code,
                detail=detail,
                prompt_tokens=line.prompt_tokens,
                cached_tokens=line.cached_tokens,
                queue_s=line.queue_s,
                first_token_s=line.first_token_s,
                times=line.times.tobytes(),
                tokens=line.tokens.tobytes(),
                samples=line.samples.tobytes(),
            )
        )

    async def _watch_lag(self) -> None:
        while True:
            before = time.monotonic()
            await asyncio.sleep(_LAG_SECONDS)
            self.lags.append(max(0.0, time.monotonic() - before - _LAG_SECONDS))

    def _message(self, index: int) -> tuple[int, v3.GenerateRequest]:
        asked = ask(self._plan.prompts, self._plan.seed, self._level.number, index)
        return index, message(asked, self._plan.sampling)


async def _sleep_until(moment: float) -> None:
    """Until the monotonic clock says so, and not a moment earlier."""
    # uvloop's timers count whole milliseconds and can end early: what is left is slept again.
    while (wait := moment - time.monotonic()) > 0:  # noqa: ASYNC110
        await asyncio.sleep(wait)


def message(asked: Ask, sampling: Sampling) -> v3.GenerateRequest:
    """The request as it is sent."""
    request = v3.GenerateRequest(
        sampling=v3.SamplingOptions(
            temperature=sampling.temperature, top_p=sampling.top_p, n=sampling.n, seed=asked.index
        ),
        stopping=v3.StoppingOptions(
            max_new_tokens=asked.max_new_tokens, ignore_eos=sampling.ignore_eos
        ),
    )
    if not isinstance(asked.prompt, Text):
        request.token_ids.ids.extend(asked.prompt)
    elif asked.prompt.messages:
        turns = [v3.ChatMessage(role=r, content=c) for r, c in asked.prompt.messages]
        request.chat.messages.extend(turns)
    else:
        request.text = asked.prompt.text
    return request
