"""One client process' requests: sent when they are due, their messages timed as they come."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Iterator

import grpc

from tokenpod.cli.bench.arrivals import arrival_times
from tokenpod.cli.bench.figures import ARRIVAL, Record
from tokenpod.cli.bench.messages import Begin, Outcome, Plan, Progress
from tokenpod.cli.bench.prompts import Ask, Text, arrivals_random, ask
from tokenpod.protos.generate.v3 import generate_pb2 as v3
from tokenpod.protos.generate.v3.generate_pb2_grpc import TextGenerationServiceStub

#: By server, one for each connection.
Stubs = list[list[TextGenerationServiceStub]]

#: Requests that are made before a level begins, so that making them costs no time within it.
_MADE_BEFORE = 2_048
#: Seconds between two looks at how late the event loop is; every so many looks report progress.
_LAG_SECONDS, _LOOKS = 0.02, 10


class LevelRun:
    """One process' part of one level. Make it, then `run` it once."""

    def __init__(self, plan: Plan, begin: Begin, stubs: Stubs) -> None:
        self._plan, self._level, self._own, self._stubs = plan, begin.level, begin, stubs
        self._metadata = plan.remotes[0].metadata
        self._records: list[Record] = []
        self._lags: list[float] = []
        self._failed = 0
        # Every process draws all times and takes its own.
        random = arrivals_random(plan.seed, self._level.number)
        times = arrival_times(self._level.load, random, plan.prompts.at)
        self._due = itertools.islice(times, begin.first, None, begin.step)
        requests = self._make_requests()
        self._requests = itertools.chain(list(itertools.islice(requests, _MADE_BEFORE)), requests)
        self._began = 0.0

    async def run(self, at: float, report: Callable[[Progress], None]) -> Outcome:
        """Send the requests; returns when the last one has ended.

        Args:
            at: the start, a moment of the monotonic clock.
            report: called with the progress every so often.
        """
        cpu_before = time.process_time()
        await _sleep_until(at)
        self._began = at
        watch = asyncio.create_task(self._watch(report))
        try:
            if self._level.load.mode == "closed":
                slots = self._own.slots or 0
                await asyncio.gather(*(self._one_after_the_other() for _ in range(slots)))
            else:
                await self._when_due()
        finally:
            watch.cancel()
        cpu = time.process_time() - cpu_before
        return Outcome(self._records, cpu, self._now(), self._lags)

    def _make_requests(self) -> Iterator[tuple[int, v3.GenerateRequest]]:
        numbers = itertools.count(self._own.first, self._own.step)
        last = self._level.requests
        for index in numbers if last is None else itertools.takewhile(lambda n: n < last, numbers):
            asked = ask(self._plan.prompts, self._plan.seed, self._level.number, index)
            yield index, message(asked, self._plan)

    def _now(self) -> float:
        return time.monotonic() - self._began

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
        turn, target = divmod(index, len(self._stubs))
        stub = self._stubs[target][turn % len(self._stubs[target])]
        options = self._plan.options
        record = Record(index, target, due, sent=self._now())
        finished = 0
        try:
            call = stub.Generate(request, timeout=options.deadline, metadata=self._metadata)
            # `read` costs less than iterating over the call.
            while isinstance(event := await call.read(), v3.GenerateResponse):
                finished += note(record, event, self._now())
            if finished != options.n:
                record.code = "UNFINISHED"
                record.detail = "the stream ended without every `finished`"
        except grpc.aio.AioRpcError as error:
            record.code, record.detail = error.code().name, error.details() or ""
        record.ended = self._now()
        self._failed += not record.ok
        self._records.append(record)

    async def _watch(self, report: Callable[[Progress], None]) -> None:
        for look in itertools.count(1):
            before = time.monotonic()
            await asyncio.sleep(_LAG_SECONDS)
            self._lags.append(max(0.0, time.monotonic() - before - _LAG_SECONDS))
            if look % _LOOKS == 0:
                report(Progress(len(self._records), self._failed))


def note(record: Record, event: v3.GenerateResponse, now: float) -> bool:
    """Put into a record what one event that came `now` tells; whether a sample has finished."""
    kind = event.WhichOneof("event")
    if kind == "tokens":
        delta = event.tokens
        # Text alone, which was held back, brings no token.
        if delta.token_ids:
            record.stream += ARRIVAL.pack(now, len(delta.token_ids), delta.index)
    elif kind == "started":
        record.prompt_tokens = event.started.prompt_tokens
        record.cached_tokens = event.started.cached_tokens
    elif kind == "finished" and event.finished.index == 0:
        timings = event.finished.timings
        record.queue_s = timings.queue_ns / 1e9
        record.first_token_s = timings.time_to_first_token_ns / 1e9
    return kind == "finished"


async def _sleep_until(moment: float) -> None:
    """Until the monotonic clock says so, and not a moment earlier."""
    # uvloop's timers count whole milliseconds and can end early: what is left is slept again.
    while (wait := moment - time.monotonic()) > 0:  # noqa: ASYNC110
        await asyncio.sleep(wait)


def message(asked: Ask, plan: Plan) -> v3.GenerateRequest:
    """The request as it is sent."""
    options, tokens = plan.options, asked.max_new_tokens
    request = v3.GenerateRequest(
        sampling=v3.SamplingOptions(
            temperature=options.temperature, top_p=options.top_p, n=options.n, seed=asked.index
        ),
        stopping=v3.StoppingOptions(max_new_tokens=tokens, ignore_eos=plan.ignore_eos),
    )
    if not isinstance(asked.prompt, Text):
        request.token_ids.ids.extend(asked.prompt)
    elif asked.prompt.messages:
        turns = [v3.ChatMessage(role=r, content=c) for r, c in asked.prompt.messages]
        request.chat.messages.extend(turns)
    else:
        request.text = asked.prompt.text
    return request
