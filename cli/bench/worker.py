"""`python -m tokenpod_client.cli.bench.worker`: one client process, which does what its pipe says.

The pipe is read and written between levels, and for short reports of progress, so a blocking one
does. The event loop lives on between levels, and the connections with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection

import grpc
import numpy as np
import uvloop

from tokenpod_client.cli.bench.figures import ARRIVAL, Record
from tokenpod_client.cli.bench.messages import Begin, Load, Outcome, Plan, Progress
from tokenpod_client.cli.connection import Remote
from tokenpod_client.cli.remote import open_channel
from tokenpod_client.protos.generate.v3 import generate_pb2 as v3
from tokenpod_client.protos.generate.v3.generate_pb2_grpc import TextGenerationServiceStub

#: By server, one for each connection.
Stubs = list[list[TextGenerationServiceStub]]

#: Which stream of random numbers: none of them may repeat another.
_REQUEST, _PREFIX, _ARRIVALS = range(3)
#: Requests that are made before a level begins, so that making them costs no time within it.
_MADE_BEFORE = 2_048
#: Seconds between two looks at how late the event loop is; every so many looks report progress.
_LAG_SECONDS, _LOOKS = 0.02, 10


def serve(pipe: Connection) -> None:
    """Work through the plan that comes first; `messages` says what follows. Raises EOFError."""

    def answer(message: Progress | Outcome) -> None:
        try:
            pipe.send(message)
        except ConnectionError:
            # The command is gone, and a load that nobody measures must not go on.
            os._exit(1)

    plan: Plan = pipe.recv()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        channels = contextlib.AsyncExitStack()
        stubs = runner.run(_connect(plan, channels))
        try:
            while True:
                begin: Begin = pipe.recv()
                run = LevelRun(plan, begin, stubs)
                # The collector would stop the clock now and then to look at requests that live on.
                gc.collect()
                gc.freeze()
                answer(Progress())
                answer(runner.run(run.run(pipe.recv(), answer)))
        finally:
            runner.run(channels.aclose())


async def _connect(plan: Plan, channels: contextlib.AsyncExitStack) -> Stubs:
    async def stub(remote: Remote) -> TextGenerationServiceStub:
        # Channels to one address would use one connection otherwise.
        channel = open_channel(remote, ("grpc.use_local_subchannel_pool", 1))
        return TextGenerationServiceStub(await channels.enter_async_context(channel))

    connections = range(plan.options.connections)
    return [[await stub(remote) for _ in connections] for remote in plan.remotes]


class LevelRun:
    """One process' part of one level. Make it, then `run` it once."""

    def __init__(self, plan: Plan, begin: Begin, stubs: Stubs) -> None:
        self._plan, self._level, self._own, self._stubs = plan, begin.level, begin, stubs
        self._records: list[Record] = []
        self._lags: list[float] = []
        self._failed, self._began = 0, 0.0
        # Every process draws all times and takes its own.
        random = np.random.default_rng([plan.seed, self._level.number, _ARRIVALS])
        times = arrival_times(self._level.load, random, plan.prompts.at)
        self._due = itertools.islice(times, begin.first, None, begin.step)
        requests = self._make_requests()
        self._requests = itertools.chain(list(itertools.islice(requests, _MADE_BEFORE)), requests)

    async def run(self, at: float, report: Callable[[Progress], None]) -> Outcome:
        """Send the requests from the moment `at` of the monotonic clock until the last has ended.

        `report` is called with the progress every so often.
        """
        cpu_before = time.process_time()
        await _sleep_until(at)
        self._began = at
        watch = asyncio.create_task(self._watch(report))
        try:
            await self._send_all()
        finally:
            watch.cancel()
        cpu_seconds = time.process_time() - cpu_before
        return Outcome(self._records, cpu_seconds, self._now(), self._lags)

    def _make_requests(self) -> Iterator[tuple[int, v3.GenerateRequest]]:
        last = sys.maxsize if self._level.requests is None else self._level.requests
        for index in range(self._own.first, last, self._own.step):
            yield index, make_request(self._plan, self._level.number, index)

    def _now(self) -> float:
        return time.monotonic() - self._began

    async def _send_all(self) -> None:
        closed = self._level.load.mode == "closed"
        end = self._level.duration or math.inf
        slots = asyncio.Semaphore(self._own.slots or sys.maxsize)
        async with asyncio.TaskGroup() as calls:
            for due, (index, request) in zip(self._due, self._requests, strict=False):
                if due < end:
                    await _sleep_until(self._began + due)
                    await slots.acquire()
                    # In a closed loop a request is due when a client is free.
                    due = self._now() if closed else due
                if due >= end:
                    return
                call = calls.create_task(self._call(index, request, due))
                call.add_done_callback(lambda _: slots.release())

    async def _call(self, index: int, request: v3.GenerateRequest, due: float) -> None:
        """Send one request and read its stream to the end."""
        turn, target = divmod(index, len(self._stubs))
        stub = self._stubs[target][turn % len(self._stubs[target])]
        options, metadata = self._plan.options, self._plan.remotes[0].metadata
        record = Record(index, target, due, sent=self._now())
        finished = 0
        try:
            call = stub.Generate(request, timeout=options.deadline, metadata=metadata)
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


def arrival_times(
    load: Load, random: np.random.Generator, written: Sequence[float] = ()
) -> Iterator[float]:
    """Seconds from the start at which each request is due; without end, never decreasing.

    Args:
        random: where the gaps are drawn from.
        written: for replay: the file's times, in units of 1 / rate. After the last one they begin
            again, one unit later.
    """
    rate, shape = load.request_rate, load.burstiness
    if rate is None:
        yield from itertools.repeat(0.0)
    elif shape is None:
        period = written[-1] + 1.0
        for turn in itertools.count():
            for time in written:
                yield (turn * period + time) / rate
    else:
        now = 0.0
        while True:
            now += float(random.gamma(shape, 1.0 / (rate * shape)))
            yield now


def make_request(plan: Plan, level: int, index: int) -> v3.GenerateRequest:
    """Request `index` of a level: a function of the plan, its seed, and these two.

    Two levels have no prompt and no prefix in common.
    """
    prompts, options = plan.prompts, plan.options
    random = np.random.default_rng([plan.seed, level, _REQUEST, index])
    request = v3.GenerateRequest(
        sampling=v3.SamplingOptions(
            temperature=options.temperature, top_p=options.top_p, n=options.n, seed=index
        ),
        stopping=v3.StoppingOptions(ignore_eos=plan.ignore_eos),
    )
    if prompts.texts:
        text = prompts.texts[index % len(prompts.texts)]
        request.stopping.max_new_tokens = text.max_new_tokens or prompts.output.draw(random)
        if text.messages:
            turns = [v3.ChatMessage(role=role, content=said) for role, said in text.messages]
            request.chat.messages.extend(turns)
        else:
            request.text = text.text
        return request
    if prompts.pairs:
        length, output = prompts.pairs[index % len(prompts.pairs)]
    else:
        length, output = prompts.input.draw(random), prompts.output.draw(random)
    request.stopping.max_new_tokens = output
    if prompts.prefix_tokens:
        group = int(random.integers(0, prompts.prefix_groups))
        of_group = np.random.default_rng([plan.seed, level, _PREFIX, group])
        prefix = of_group.integers(*prompts.token_range, prompts.prefix_tokens)
        request.token_ids.ids.extend(prefix.tolist())
    request.token_ids.ids.extend(random.integers(*prompts.token_range, length).tolist())
    return request


if __name__ == "__main__":
    with contextlib.suppress(EOFError, ConnectionError):
        serve(Connection(sys.stdin.fileno()))
