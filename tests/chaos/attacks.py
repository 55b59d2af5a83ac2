"""The attacks. Each takes a scene and a measure, and says what the attacker saw.

It raises AssertionError if that is not what the contract promises, and leaves a pod that serves.
What the bystanders saw is looked at by campaign.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import multiprocessing
import os
import random
import signal
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import grpc

from chaos.scene import OPTIONS, Pod, answer, gone
from chaos.waiting import wait_for
from support.clients import constraint_fuzz, floods, wirefuzz
from support.clients.public_api import text_request
from support.pods.harness import SERVING
from tokenpod_client.protos.tokenpod.v1 import chat_pb2
from tokenpod_client.protos.tokenpod.v1 import generation_pb2 as v1
from tokenpod_client.protos.tokenpod.v1.generation_service_pb2_grpc import (
    GenerationServiceStub,
)

_CONNECTIONS = 8
_CALL_SECONDS = 300.0
LONG = {"max_new_tokens": 1500, "ignore_eos": True}
_OK = "OK"


@dataclass(frozen=True)
class Attack:
    """One way to do harm.

    Args:
        name: for the table.
        strike: does it; `amount` is how much of it.
        amount: in the long form.
        least: in the short form; 0: it has no part in that.
        ends: the pod ends by it, and is started again: probes are lost meanwhile.
        cuts_router: what a router runs may be cut off. It is where the pod ends.
        plays_router: the attacker has a router's rpcs, and takes batches away: routers keep away.
    """

    name: str
    strike: Callable[[Pod, random.Random, int], str]
    amount: int
    least: int
    ends: bool = False
    cuts_router: bool = False
    plays_router: bool = False


# -- clients -------------------------------------------------------------------------------------


def cancels(pod: Pod, draw: random.Random, amount: int) -> str:
    """Calls that are left at any moment."""

    async def leave(stub: Any, wait: float, events: int) -> str:
        call = stub.Generate(text_request("import os\n", stopping=LONG), timeout=_CALL_SECONDS)
        with contextlib.suppress(asyncio.CancelledError):
            for _ in range(events):
                await call.read()
            await asyncio.sleep(wait)
        call.cancel()
        return _OK

    return _many(
        pod, amount, lambda stub: leave(stub, draw.choice([0, 0, 0.01]), draw.randrange(8)), {_OK}
    )


def deadlines(pod: Pod, draw: random.Random, amount: int) -> str:
    """Calls with less time than they need."""
    allowed = {_OK, "DEADLINE_EXCEEDED", "RESOURCE_EXHAUSTED"}
    return _many(pod, amount, lambda stub: _finish(stub, draw.uniform(0.001, 0.3), 40), allowed)


def burst(pod: Pod, draw: random.Random, amount: int) -> str:
    """Many calls at one moment."""
    allowed = {_OK, "RESOURCE_EXHAUSTED", "UNAVAILABLE"}
    seen = _many(pod, amount, lambda stub: _finish(stub, _CALL_SECONDS, 3), allowed, at_once=amount)
    assert _OK in seen, f"nobody was served: {seen}"
    return seen


def stalled(pod: Pod, draw: random.Random, amount: int) -> str:
    """Readers that stop reading, each on a connection with a small window."""
    options = [*OPTIONS, ("grpc.http2.bdp_probe", 0)]
    request = text_request(
        "import os\n",
        stopping={"max_new_tokens": 1900, "ignore_eos": True},
        sampling={"temperature": 1.0, "seed": draw.randrange(1 << 30)},
        output={"top_n_tokens": 5, "return_logprobs": True},
    )

    async def strike() -> str:
        channels = [grpc.aio.insecure_channel(pod.address, options) for _ in range(amount)]
        try:
            stubs = [GenerationServiceStub(channel) for channel in channels]
            calls = [stub.Generate(request, timeout=_CALL_SECONDS) for stub in stubs]
            events = await asyncio.gather(*(call.read() for call in calls))
            assert all(event.WhichOneof("event") == "started" for event in events)
            await asyncio.sleep(2.0)
            return f"{amount} stopped"
        finally:
            await asyncio.gather(*(channel.close() for channel in channels))

    return pod.attackers.run(strike())


def fuzz(pod: Pod, draw: random.Random, amount: int) -> str:
    """Messages with odd values, and bytes that are none."""
    every = wirefuzz.rpcs()
    codes: Counter[str] = Counter()
    with grpc.insecure_channel(pod.address, options=OPTIONS) as channel:
        for _ in range(amount):
            each = draw.choice(every)
            request = each.plain()
            paths = list(wirefuzz.paths(each.method.input_type))
            for path in draw.sample(paths, min(len(paths), draw.randrange(4))):
                wirefuzz.put(request, path, draw.choice(list(wirefuzz.extremes(path[-1]))))
            data = request.SerializeToString()
            if draw.random() < 0.3:
                at = draw.randrange(len(data) + 1)
                data = data[:at] + draw.randbytes(draw.randrange(1, 40)) + data[at + 2 :]
            try:
                each.send(channel, data, timeout=_CALL_SECONDS)
                codes[_OK] += 1
            except grpc.RpcError as error:
                codes[error.code().name] += 1
        wirefuzz.clear(channel)
    allowed = {_OK, "INVALID_ARGUMENT", "NOT_FOUND", "RESOURCE_EXHAUSTED", "CANCELLED"}
    # Of tokenpod.v1: fields that are not built.
    allowed |= {"UNIMPLEMENTED", "FAILED_PRECONDITION"}
    return _said(codes, allowed)


def tools(pod: Pod, draw: random.Random, amount: int) -> str:
    """Tools whose schemas are many, long or odd, of which the model may or must call some."""
    allowed = {_OK, "INVALID_ARGUMENT", "RESOURCE_EXHAUSTED"}
    requests = [_odd_tools(draw) for _ in range(amount)]
    return _many(
        pod,
        amount,
        lambda stub: _chat(stub, requests.pop()),
        allowed,
        service=GenerationServiceStub,
    )


def _odd_tools(draw: random.Random) -> v1.GenerateRequest:
    few, many = draw.randrange(1, 20), draw.choice([300, 2000, 9000, 100_000])
    schema = draw.choice(
        [
            {"properties": {f"p{at}": {"format": "date-time"} for at in range(many)}},
            {"anyOf": [{}] * many},
            {"required": [f"p{at}" for at in range(many)], "type": "object"},
            {"$defs": {"a": {"enum": ["x"] * few}}, "properties": {"x": {"$ref": "#/$defs/a"}}},
            {"properties": {"x": {"format": []}}},
            {"anyOf": [{"type": "string"}], "$ref": "#/anyOf/²"},
            {"pattern": "(a*)*b" * few},
            {"type": {}, "minItems": 1e300, "enum": [float(few)]},
        ]
    )
    odd = draw.choice(["[" * many, '"\\ud800"', "1e999"])
    text = json.dumps(schema) if draw.random() < 0.7 else odd
    said = [{"role": "user", "content": [{"text": "hello"}]}]
    request = v1.GenerateRequest(chat={"messages": said}, stopping={"max_new_tokens": 8})
    for at in range(draw.choice([1, 2, 400]) if many < 1000 else 1):
        request.chat.tools.add(name=f"f{at}", parameters_schema=text)
    if draw.random() < 0.5:
        request.chat.tool_choice.mode = chat_pb2.TOOL_MODE_REQUIRED
    return request


async def _chat(stub: Any, request: v1.GenerateRequest) -> str:
    try:
        async for _ in stub.Generate(request, timeout=_CALL_SECONDS):
            pass
    except grpc.aio.AioRpcError as error:
        return str(error.code().name)
    return _OK


def constraints(pod: Pod, draw: random.Random, amount: int) -> str:
    """Schemas, regexes, grammars and tools that are nearly right, beside innocent requests."""
    work = constraint_fuzz.fuzz(pod.address, pod.socket, draw.randrange(1 << 30), amount)
    return _said(pod.attackers.run(work), {*constraint_fuzz.ALLOWED, constraint_fuzz.ROUTED})


def flood(pod: Pod, draw: random.Random, amount: int) -> str:
    """Frames as fast as they can be sent, so many seconds of each kind."""
    kinds = [*floods.ONGOING, *floods.CLOSED]
    draw.shuffle(kinds)
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    flooding = spawn.Process(target=_flood, args=(pod.port, kinds, amount, theirs))
    flooding.start()
    # Its own end is closed here, so that it is heard if the process ends.
    theirs.close()
    sent: dict[str, int] = ours.recv()
    flooding.join()
    for kind in floods.ONGOING:
        assert sent[kind] > 1 << 20, f"there was no flood of {kind}: {sent[kind]} bytes"
    return ", ".join(f"{count / 1e6:.0f} MB of {kind}" for kind, count in sorted(sent.items()))


def _flood(port: int, kinds: list[str], seconds: float, told: Connection) -> None:
    """In a process of its own: bystanders are not to wait for its thread."""
    # What is attacked is the server, not the processor that both share.
    os.nice(10)
    sent = dict.fromkeys(kinds, 0)
    frames = {**floods.ONGOING, **floods.CLOSED}
    for kind in kinds:
        over = threading.Event()
        threading.Timer(seconds, over.set).start()
        while not over.is_set():
            with contextlib.suppress(OSError):
                sent[kind] += floods.flood(port, frames[kind](), over)
    told.send(sent)


def connections(pod: Pod, draw: random.Random, amount: int) -> str:
    """Connections that say nothing, garbage, or half of a greeting, and are reset."""
    preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
    opened = []
    for _ in range(amount):
        connection = socket.create_connection(("127.0.0.1", pod.port), 10)
        words = draw.choice([b"", preface, preface[:9], draw.randbytes(200), b"GET / HTTP/1.1\r\n"])
        with contextlib.suppress(OSError):
            connection.sendall(words + (draw.randbytes(50) if draw.random() < 0.5 else b""))
        opened.append(connection)
    answer(pod.address)
    for connection in opened:
        reset = struct.pack("ii", 1, 0)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, reset)
        connection.close()
    return f"{amount} opened and reset"


# -- processes -----------------------------------------------------------------------------------


def stop_engine(pod: Pod, draw: random.Random, amount: int) -> str:
    """SIGSTOP of the engine for a second or so, again and again."""
    (engine,) = pod.engines()
    return _stop_for_a_while(engine, draw, amount)


def stop_first(pod: Pod, draw: random.Random, amount: int) -> str:
    """SIGSTOP of the first front end for a second or so."""
    return _stop_for_a_while(pod.server.process.pid, draw, amount)


def hang_front_end(pod: Pod, draw: random.Random, amount: int) -> str:
    """SIGSTOP of a further front end: it must be replaced."""
    for _ in range(amount):
        before, replaced = pod.further(), _replacements(pod)
        hung = draw.choice(before)
        os.kill(hung, signal.SIGSTOP)
        wait_for(lambda pid=hung: gone(pid), "a hung front end was not ended")
        wait_for(lambda n=replaced: _replacements(pod) > n, "a hung front end was not replaced")
        assert len(pod.further()) == len(before)
    return f"{amount} replaced"


def kill_text_workers(pod: Pod, draw: random.Random, amount: int) -> str:
    """kill -9 of every text worker while it is idle, and chats at once, which need one."""
    said = [{"role": "user", "content": [{"text": "hello"}]}]
    request = v1.GenerateRequest(chat={"messages": said}, stopping={"max_new_tokens": 4})
    seen = ""
    for _ in range(amount):
        killed = {*pod.text_workers()}
        for pid in killed:
            os.kill(pid, signal.SIGKILL)
        seen = _many(
            pod, 16, lambda stub: _chat(stub, request), {_OK}, service=GenerationServiceStub
        )
        wait_for(
            lambda old=killed: len({*pod.text_workers()} - old) == len(old),
            "a text worker was not replaced",
        )
    return f"{amount} times, then {seen}"


def kill_engine(pod: Pod, draw: random.Random, amount: int) -> str:
    """kill -9 of the engine."""
    return _end(pod, amount, lambda: os.kill(draw.choice(pod.engines()), signal.SIGKILL), 1)


def kill_front_end(pod: Pod, draw: random.Random, amount: int) -> str:
    """kill -9 of a further front end: the pod drains and ends."""
    return _end(pod, amount, lambda: os.kill(draw.choice(pod.further()), signal.SIGKILL), 1)


def kill_first(pod: Pod, draw: random.Random, amount: int) -> str:
    """kill -9 of the first front end: all end with it."""
    return _end(pod, amount, lambda: pod.signal(signal.SIGKILL), -signal.SIGKILL)


def terminate(pod: Pod, draw: random.Random, amount: int) -> str:
    """A SIGTERM, delivered once or twice within milliseconds: what runs comes to its end."""

    def strike() -> None:
        for _ in range(draw.choice([1, 2])):
            pod.signal(draw.choice([signal.SIGTERM, signal.SIGINT]))

    return _end(pod, amount, strike, 0)


def terminate_twice(pod: Pod, draw: random.Random, amount: int) -> str:
    """A second signal a second after the first, while the engine stands still."""

    def strike() -> None:
        os.kill(pod.engines()[0], signal.SIGSTOP)
        pod.signal()
        time.sleep(1.2)
        pod.signal()

    return _end(pod, amount, strike, 0)


def lose_rank(pod: Pod, draw: random.Random, amount: int) -> str:
    """kill -9 or SIGSTOP of a rank: the group forms again in place."""
    for _ in range(amount):
        before = pod.engines()
        number = draw.choice([signal.SIGKILL, signal.SIGSTOP])
        os.kill(draw.choice(before), number)
        wait_for(lambda: pod.server.health() != SERVING, "a lost rank was not seen")
        wait_for(lambda: pod.server.health() == SERVING, "the group did not form again")
        wait_for(lambda then=before: all(gone(pid) for pid in then), "a rank is left over")
    return f"{amount} lost"


#: In the long form's first order; the seed shuffles them.
ATTACKS = (
    Attack("cancels at random moments", cancels, 1000, 50),
    Attack("deadlines that are too short", deadlines, 300, 20),
    Attack("calls at one moment", burst, 800, 150),
    Attack("stalled readers", stalled, 40, 8),
    Attack("odd messages and bytes", fuzz, 1500, 60, plays_router=True),
    Attack("odd constraints", constraints, 3000, 25, plays_router=True),
    Attack("odd connections", connections, 300, 15),
    Attack("odd tools", tools, 200, 10),
    Attack("kill -9, text workers", kill_text_workers, 5, 1),
    Attack("floods", flood, 5, 1),
    Attack("SIGSTOP, engine, 1 s", stop_engine, 3, 1),
    Attack("SIGSTOP, first front end, 1 s", stop_first, 3, 1),
    Attack("SIGSTOP, further front end", hang_front_end, 2, 0),
    Attack("kill -9, engine", kill_engine, 2, 0, ends=True),
    Attack("kill -9, further front end", kill_front_end, 2, 0, ends=True),
    Attack("kill -9, first front end", kill_first, 2, 0, ends=True),
    Attack("SIGTERM under load", terminate, 2, 0, ends=True),
    Attack("a second signal, engine stopped", terminate_twice, 2, 0, ends=True),
)
#: On a pod of two ranks.
GROUP_ATTACKS = (Attack("kill -9 or SIGSTOP, rank", lose_rank, 4, 0, cuts_router=True),)


# -- ways ----------------------------------------------------------------------------------------


def _many(
    pod: Pod,
    amount: int,
    act: Callable[[Any], Awaitable[str]],
    allowed: Iterable[str],
    at_once: int = 32,
    service: Any = GenerationServiceStub,
) -> str:
    """So many calls over a few connections; the codes that they ended with."""

    async def strike() -> Counter[str]:
        channels = [grpc.aio.insecure_channel(pod.address, OPTIONS) for _ in range(_CONNECTIONS)]
        stubs = [service(channel) for channel in channels]
        free = asyncio.Semaphore(at_once)

        async def one(at: int) -> str:
            async with free:
                return await act(stubs[at % _CONNECTIONS])

        try:
            return Counter(await asyncio.gather(*(one(at) for at in range(amount))))
        finally:
            await asyncio.gather(*(channel.close() for channel in channels))

    return _said(pod.attackers.run(strike()), allowed)


async def _finish(stub: Any, seconds: float, tokens: int) -> str:
    request = text_request("x = 1\n", stopping={"max_new_tokens": tokens, "ignore_eos": True})
    try:
        async for _ in stub.Generate(request, timeout=seconds):
            pass
    except grpc.aio.AioRpcError as error:
        return str(error.code().name)
    return _OK


def _said(codes: Counter[str], allowed: Iterable[str]) -> str:
    text = ", ".join(f"{count} {code}" for code, count in codes.most_common())
    assert not codes.keys() - set(allowed), f"not allowed: {text}"
    return text


def _replacements(pod: Pod) -> int:
    return pod.server.log.read_text().count("a front end serves again")


def _stop_for_a_while(pid: int, draw: random.Random, amount: int) -> str:
    for _ in range(amount):
        os.kill(pid, signal.SIGSTOP)
        try:
            time.sleep(draw.uniform(0.5, 1.5))
        finally:
            os.kill(pid, signal.SIGCONT)
        time.sleep(0.5)
    return f"{amount} times"


def _end(pod: Pod, amount: int, strike: Callable[[], object], status: int) -> str:
    """Strike, see the pod's processes end as they should, and start it again."""
    for _ in range(amount):
        processes = [pod.server.process.pid, *pod.server.children()]
        strike()
        pod.await_end(status, processes)
        pod.restart()
    return f"{amount} times, status {status}"
