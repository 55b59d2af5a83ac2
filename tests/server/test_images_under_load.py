"""Images beside streams of text: every answer is right or refused, whoever else gives up or lies.

Sixteen callers of text and eight of images at two front ends, with a cache of few images. Callers
of images send the same ones again, new ones, hostile ones, and hang up while theirs are read.
"""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest

from support.images.calls import asked, said, server_files, truth
from support.images.files import file_of, hostile, picture
from support.images.seeing import Seeing
from support.pods.harness import ServerProcess, free_port, serve
from support.pods.metrics import Pod
from support.waiting import wait_for
from tokenpod_client.protos.tokenpod.v1.generation_service_pb2_grpc import GenerationServiceStub

pytestmark = pytest.mark.slow

SECONDS = 8.0
TEXTS = ["only text", "def f(x):", "import sys"]
#: Of mixed sizes; some are decoded for longer than a caller waits.
IMAGES = [picture(20 + 31 * at, 20 + 17 * at, at) for at in range(6)]
_METHOD = "tokenpod.v1.GenerationService/Generate"
_RATE = "rpc_server_call_duration_seconds_count"


class Callers:
    """All of them, and what became of their calls."""

    def __init__(self, seeing: Seeing, server: ServerProcess) -> None:
        self._server, self._files = server, [file_of(image) for image in IMAGES]
        self._texts = [truth(seeing, text) for text in TEXTS]
        self._seen = [truth(seeing, "what? ", image) for image in IMAGES]
        self._lies = [*hostile(300, 9)]
        self.codes, self.wrong = Counter[str](), list[Any]()
        self.stop, self._lock = threading.Event(), threading.Lock()

    def run(self, seconds: float, middle: Callable[[], None] = lambda: None) -> None:
        """All at once, for so long; `middle` is called by another thread."""
        with ThreadPoolExecutor(25) as pool:
            ends = [pool.submit(self._speak, seed) for seed in range(16)]
            ends += [pool.submit(self._show, seed) for seed in range(8)]
            time.sleep(seconds / 2)
            middle()
            time.sleep(seconds / 2)
            self.stop.set()
            for end in ends:
                end.result(timeout=60)

    def _speak(self, seed: int) -> None:
        draw, stub = random.Random(seed), self._stub()
        while not self.stop.is_set():
            which = draw.randrange(len(TEXTS))
            self._end(lambda which=which: said(stub, TEXTS[which]), self._texts[which])

    def _show(self, seed: int) -> None:
        draw, stub = random.Random(100 + seed), self._stub()
        while not self.stop.is_set():
            which = draw.randrange(len(IMAGES))
            match draw.choice(("known", "known", "new", "lie", "leave")):
                case "known":
                    data = self._files[which]
                    self._end(lambda data=data: said(stub, "what? ", data), self._seen[which])
                case "new":
                    data = file_of(IMAGES[which], compress_level=draw.randrange(1, 9))
                    self._end(lambda data=data: said(stub, "what? ", data), self._seen[which])
                case "lie":
                    data = draw.choice(self._lies)
                    self._end(lambda data=data: said(stub, "what? ", data), None)
                case "leave":
                    data = file_of(picture(700, 900, draw.randrange(1 << 20)), "JPEG")
                    call = stub.Generate(asked("what? ", data), timeout=60)
                    time.sleep(draw.choice((0.003, 0.01, 0.03, 0.1)))
                    call.cancel()
                    self._count("CANCELLED")

    def _end(self, ask: Callable[[], list[int]], right: list[int] | None) -> None:
        try:
            tokens = ask()
        except grpc.RpcError as error:
            self._count(error.code().name)
            return
        self._count("OK")
        if right is not None and tokens != right:
            self.wrong.append((tokens, right))

    def _count(self, code: str) -> None:
        with self._lock:
            self.codes[code] += 1

    def _stub(self) -> Any:
        options = [("grpc.use_local_subchannel_pool", 1)]
        channel = grpc.insecure_channel(self._server.address, options=options)
        self._server.channels.append(channel)
        return GenerationServiceStub(channel)


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Seeing:
    return Seeing("qwen2.5-vl", tmp_path_factory.mktemp("seeing") / "qwen2.5-vl")


@pytest.fixture
def pod(seeing: Seeing) -> Iterator[Pod]:
    port = free_port()
    flags = ("--model-id", str(seeing.folder), "--max-total-tokens", "200", "--front-ends", "2")
    # Rows of an image of 8 take 2 KB.
    caches = ("--image-cache-bytes", "8000", "--max-batch-total-tokens", "1500")
    with serve(*flags, *caches, "--metrics-port", str(port)) as server:
        yield Pod(server, port)


def test_everybody_gets_what_is_right_and_nothing_is_left(seeing: Seeing, pod: Pod) -> None:
    callers, server = Callers(seeing, pod.server), pod.server
    children = {*server.children()}
    callers.run(SECONDS)
    assert callers.wrong == []
    assert callers.codes.keys() == {"OK", "INVALID_ARGUMENT", "CANCELLED"}
    assert callers.codes["OK"] > 100
    server.wait_until_idle()
    wait_for(lambda: not [*server_files(server)])
    wait_for(lambda: pod.scrape().sum("tokenpod_calls_memory_bytes") == 0)
    page = pod.scrape()

    def counted(code: str) -> float:
        return page.sum(_RATE, rpc_method=_METHOD, rpc_response_status_code=code)

    assert counted("INVALID_ARGUMENT") == callers.codes["INVALID_ARGUMENT"]
    # Who hangs up may be late, or so early that no call is begun.
    late = counted("OK") - callers.codes["OK"]
    assert 0 <= late <= callers.codes["CANCELLED"] - counted("CANCELLED")
    assert counted("INTERNAL") == counted("UNKNOWN") == 0
    assert page.sum("tokenpod_kv_tokens", tokenpod_kv_state="used") == 0
    # Workers that were killed with their calls have been replaced; nobody else is new.
    wait_for(lambda: len(server.children()) == len(children))
    assert server.engine_pid() in children


def test_a_drain_in_the_middle_ends_every_call_well(seeing: Seeing, pod: Pod) -> None:
    callers, server = Callers(seeing, pod.server), pod.server

    def drain() -> None:
        os.kill(server.process.pid, signal.SIGTERM)

    callers.run(4.0, drain)
    assert callers.wrong == []
    assert callers.codes.keys() <= {"OK", "INVALID_ARGUMENT", "CANCELLED", "UNAVAILABLE"}
    assert callers.codes["OK"] > 20
    assert server.process.wait(60) == 0
