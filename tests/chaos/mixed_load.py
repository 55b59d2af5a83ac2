"""Random calls of every protocol at once, none twice: most are ordinary, some odd, some are left.

It runs in a process of its own, so that whoever measures meanwhile does not wait for its threads.
Shard rpcs are made in whole batches with ids of their own: an odd request shares each batch with an
innocent one, whose text must be what it is alone.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from types import ModuleType
from typing import Any

import grpc

from support.clients import wirefuzz
from support.clients.wirefuzz import Rpc
from tokenpod_client.protos.generate.v3 import generate_pb2 as v3

#: Of rpcs that a router alone may call, or that change what others get.
_NOT_ALONE = frozenset(
    {"Prefill", "Decode", "FilterBatch", "ClearCache", "FlushCache", "LoadAdapter", "UnloadAdapter"}
)
_CALL_SECONDS = 300.0
#: Fields that say how many tokens a call makes at most.
_LENGTHS = frozenset({"max_new_tokens", "max_tokens"})
_MOST_TOKENS = 64
#: Shares of calls that are odd, and of those that their client leaves half-way.
_ODD, _LEFT = 0.45, 0.1
#: What an innocent request of a router's batch asks for.
_INNOCENT_TOKENS = 24
_WORDS = (
    *("def", "return", "import", "self", "class", "(x, y):", "\n    ", "=", "for i in range(10):"),
    *("Größe", "你好", "😀", "\t", "0x1f", '"text"', "# why", "[1, 2]", "raise", "None", "lambda"),
)
_REGEXES = ("[a-z]{{1,{0}}}", "(yes|no|{0})", "x = [0-9]{{{0}}}", "({0}){{2,5}}")


@dataclass
class Made:
    """What the calls have met since the last look."""

    #: Statuses, and of batches `router OK`, `router wrong` and `router CODE`.
    codes: Counter[str] = field(default_factory=Counter)
    #: The first errors that the contract lets no call meet.
    faults: list[str] = field(default_factory=list)


class MixedLoad:
    """So many clients, one call after the other each.

    Args:
        address: of the server.
        clients: threads.
        pause: seconds between two calls of a client, at most.
        seed: of all that is random.
    """

    def __init__(self, address: str, clients: int, pause: float, seed: int) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._ours, theirs = spawn.Pipe()
        given = (address, clients, pause, seed, theirs)
        self._process = spawn.Process(target=_run, args=given, daemon=True)
        self._process.start()
        # Closed here, so that the end of the process is heard.
        theirs.close()

    def look(self) -> Made:
        """What was met since the last look. Raises EOFError if the process has ended."""
        self._ours.send(True)
        made: Made = self._ours.recv()
        return made

    def close(self) -> Made:
        """Stop, wait for what is under way, and look."""
        self._ours.send(False)
        made: Made = self._ours.recv()
        self._process.join()
        return made


def _run(address: str, clients: int, pause: float, seed: int, link: Connection) -> None:
    # What is attacked is the server, not the processor that both share.
    os.nice(10)
    load = _Load(address, pause, seed)
    threads = [threading.Thread(target=load.run, args=(at,), daemon=True) for at in range(clients)]
    for thread in threads:
        thread.start()
    while link.recv():
        link.send(load.look())
    load.over.set()
    for thread in threads:
        thread.join()
    link.send(load.look())


class _Load:
    """What runs in the process."""

    def __init__(self, address: str, pause: float, seed: int) -> None:
        self.over = threading.Event()
        self._address = address
        self._pause = pause
        self._seed = seed
        self._lock = threading.Lock()
        self._made = Made()
        self._rpcs = [rpc for rpc in wirefuzz.rpcs() if rpc.method.name not in _NOT_ALONE]
        self._texts = [rpc for rpc in self._rpcs if rpc.method.name.startswith("Generate")]
        self._expected = self._innocent_alone()

    def look(self) -> Made:
        """What was met since the last look."""
        with self._lock:
            made, self._made = self._made, Made()
            return made

    def run(self, client: int) -> None:
        """One call after the other, with a new connection now and then."""
        draw = random.Random(f"{self._seed} {client}")
        calls = 0
        while not self.over.is_set():
            options = [("grpc.use_local_subchannel_pool", 1)]
            with grpc.insecure_channel(self._address, options=options) as channel:
                for _ in range(draw.randrange(1, 60)):
                    if self.over.wait(draw.uniform(0.0, self._pause)):
                        return
                    calls += 1
                    self._one(channel, draw, client << 32 | calls << 8)

    def _one(self, channel: grpc.Channel, draw: random.Random, number: int) -> None:
        """One call, or one batch of a router with ids from `number` on."""
        routed = draw.random() < 0.2
        what, began = "", time.monotonic()
        try:
            if routed:
                what = "router"
                same = self._batch(channel, draw, number) == self._expected
                self._note("router OK" if same else "router wrong", what)
                return
            rpc = draw.choice(self._texts if draw.random() < 0.6 else self._rpcs)
            what, request = str(rpc), _request(rpc, draw)
            if rpc.method.server_streaming and draw.random() < _LEFT:
                # Whatever is left unread when the deadline ends the call.
                rpc.send(channel, request, timeout=draw.uniform(0.005, 1.0))
            elif rpc.method.server_streaming:
                _read(rpc, channel, request)
            else:
                rpc.send(channel, request, timeout=_CALL_SECONDS)
            self._note("OK", what)
        except grpc.RpcError as error:
            code = error.code().name
            seconds = time.monotonic() - began
            self._note(
                f"router {code}" if routed else code, f"{what} {seconds:.1f} s: {error.details()}"
            )

    def _note(self, code: str, what: str) -> None:
        with self._lock:
            self._made.codes[code] += 1
            bad = code in ("INTERNAL", "UNKNOWN", "DATA_LOSS")
            if (bad or (code.startswith("router") and code != "router OK")) and len(
                self._made.faults
            ) < 5:
                self._made.faults.append(f"{code}: {what[:300]}")

    # -- a router's batches ----------------------------------------------------------------------

    def _innocent_alone(self) -> list[int]:
        with grpc.insecure_channel(self._address) as channel:
            return _steps(channel, v3, 1 << 62, [_innocent(v3, 1 << 62)], random.Random(0))

    def _batch(self, channel: grpc.Channel, draw: random.Random, number: int) -> list[int]:
        """The tokens of the innocent request of a batch in which all others are random."""
        pb = draw.choice([*wirefuzz.GENERATIONS.values()])
        requests = [_innocent(pb, number)]
        for at in range(1, draw.randrange(2, 5)):
            other = wirefuzz.batch(pb).requests[0]
            _fill(other, draw)
            if draw.random() < _ODD:
                _spoil(other, draw)
            other.id = number + at
            if pb is not wirefuzz.GENERATIONS["v1"] and draw.random() < 0.2:
                other.parameters.grammar = _regex(draw)
                other.parameters.grammar_type = 2
            requests.append(other)
        draw.shuffle(requests)
        return _steps(channel, pb, number, requests, draw)


def _innocent(pb: ModuleType, number: int) -> Any:
    request = wirefuzz.batch(pb).requests[0]
    request.id = number
    request.stopping_parameters.max_new_tokens = _INNOCENT_TOKENS
    request.stopping_parameters.ignore_eos_token = True
    if "add_special_tokens" in request.DESCRIPTOR.fields_by_name:
        request.add_special_tokens = True
    return request


def _steps(
    channel: grpc.Channel,
    pb: ModuleType,
    number: int,
    requests: list[Any],
    draw: random.Random,
) -> list[int]:
    """Prefill a batch and decode it to its end; tokens of its request with the id `number`."""
    service = pb.DESCRIPTOR.services_by_name["TextGenerationService"].full_name
    names = ("Prefill", "Decode", "FilterBatch", "ClearCache")
    prefill, decode, keep, clear = (
        channel.unary_unary(
            f"/{service}/{name}",
            request_serializer=getattr(pb, f"{name}Request").SerializeToString,
            response_deserializer=getattr(pb, f"{name}Response").FromString,
        )
        for name in names
    )
    batch = pb.Batch(id=number, requests=requests, size=len(requests), max_tokens=1000)
    answer = prefill(pb.PrefillRequest(batch=batch), timeout=_CALL_SECONDS)
    ids, live = [*_tokens(answer, number)], {request.id for request in requests}
    while True:
        live -= {g.request_id for g in answer.generations if g.HasField("generated_text")}
        if number not in live:
            clear(pb.ClearCacheRequest(id=number), timeout=_CALL_SECONDS)
            return ids
        if draw.random() < 0.05:
            # Clients of the others have left.
            live = {number}
        if live != set(answer.batch.request_ids):
            keep(pb.FilterBatchRequest(batch_id=number, request_ids=live), timeout=_CALL_SECONDS)
        batches = [pb.CachedBatch(id=number, request_ids=live, size=len(live))]
        answer = decode(pb.DecodeRequest(batches=batches), timeout=_CALL_SECONDS)
        ids += _tokens(answer, number)


def _tokens(answer: Any, number: int) -> Iterator[int]:
    for generation in answer.generations:
        if generation.request_id == number:
            if "tokens" in generation.DESCRIPTOR.fields_by_name:
                yield from generation.tokens.ids
            else:
                yield generation.token_id


# -- requests ------------------------------------------------------------------------------------


def _read(rpc: Rpc, channel: grpc.Channel, data: bytes) -> None:
    """Read a stream to its end."""
    path = f"/{rpc.method.containing_service.full_name}/{rpc.method.name}"
    for _ in channel.unary_stream(path)(data, timeout=_CALL_SECONDS):
        pass


def _request(rpc: Rpc, draw: random.Random) -> bytes:
    request = rpc.plain()
    _fill(request, draw)
    if draw.random() < _ODD:
        _spoil(request, draw)
    elif str(rpc) == "tokenpod.Generate" and draw.random() < 0.3:
        request.constraint.regex = _regex(draw)
    data: bytes = request.SerializeToString() + rpc.short
    return data


def _fill(message: Any, draw: random.Random) -> None:
    """Put a new text where the plain prompt is, and a length where there is one."""
    for each, value in message.ListFields():
        if each.message_type is None:
            if value == wirefuzz.PROMPT:
                setattr(message, each.name, _text(draw))
            elif each.name in _LENGTHS:
                setattr(message, each.name, draw.randrange(1, _MOST_TOKENS))
            elif each.name == "temperature" and draw.random() < 0.5:
                setattr(message, each.name, draw.choice([0.3, 0.8, 1.3]))
        elif each.is_repeated:
            for one in value:
                _fill(one, draw)
        else:
            _fill(value, draw)


def _spoil(message: Any, draw: random.Random) -> None:
    """Put odd values into some of its fields."""
    paths = list(wirefuzz.paths(message.DESCRIPTOR))
    for path in draw.sample(paths, min(len(paths), draw.randrange(1, 4))):
        wirefuzz.put(message, path, draw.choice(list(wirefuzz.extremes(path[-1]))))


def _text(draw: random.Random) -> str:
    """From a few words to a few hundred, with numbers that make it one of a kind."""
    words = draw.choices(_WORDS, k=draw.choice([4, 20, 60, 300]))
    return " ".join([*words, str(draw.randrange(1 << 40))])


def _regex(draw: random.Random) -> str:
    return draw.choice(_REGEXES).format(draw.randrange(1, 60))
