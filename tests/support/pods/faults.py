"""What is done to ranks, and what clients and probes see of it."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import grpc

from support.clients.public_api import generate, text_request
from support.pods.harness import SERVING, ServerProcess
from support.waiting import wait_for

#: Seconds after which clients and probes must know, and in which a group must be back.
TOLD_SECONDS = 5.0
NOT_SERVING_SECONDS = 2.0
AGAIN_SECONDS = 90.0

PROMPT = "import os\n"
LONG_PROMPT = "x = 1\n" * 200


@dataclass(frozen=True)
class Seen:
    """Seconds from the fault until NOT_SERVING, until a running call ended, until all is well."""

    not_serving: float
    told: float | None
    again: float


class Call:
    """A `Generate` call that never ends by itself, read on a thread."""

    def __init__(self, server: ServerProcess, prompt: str, max_new_tokens: int) -> None:
        self.code: grpc.StatusCode | None = None
        self.ended_at = 0.0
        self._begun = threading.Event()
        stopping = {"max_new_tokens": max_new_tokens, "ignore_eos": True}
        self._call = server.stub().Generate(text_request(prompt, stopping=stopping), timeout=120)
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def wait_for_token(self) -> None:
        assert self._begun.wait(60)

    def seconds(self, since: float) -> float:
        """From `since` to its end."""
        self._thread.join(60)
        assert not self._thread.is_alive(), "a call hangs"
        return max(self.ended_at - since, 0.0)

    def _read(self) -> None:
        try:
            for event in self._call:
                if event.WhichOneof("event") == "tokens":
                    self._begun.set()
        except grpc.RpcError as error:
            self.code = error.code()
        self.ended_at = time.monotonic()
        self._begun.set()


def engines(server: ServerProcess) -> list[int]:
    """Process ids of a pod's ranks, in order."""
    return server.engine_pids()


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def stop(pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)


def try_fault(server: ServerProcess, fault: Callable[[], None], phase: str) -> Seen:
    """Strike in `phase`; what the pod's clients saw.

    Args:
        server: the leader's pod, which serves.
        fault: what is done.
        phase: "idle", "prefill", "decode".
    """
    call: Call | None = None
    if phase == "prefill":
        # With few prompt tokens a step it takes seconds.
        call = Call(server, LONG_PROMPT, 50)
        time.sleep(0.3)
    elif phase == "decode":
        call = Call(server, PROMPT, 1500)
        call.wait_for_token()
    began = time.monotonic()
    fault()
    wait_for(lambda: server.health("") != SERVING, seconds=20)
    not_serving = time.monotonic() - began
    told = None
    if call is not None:
        told = call.seconds(began)
        assert call.code is grpc.StatusCode.UNAVAILABLE, call.code
    wait_for(lambda: server.health("") == SERVING, AGAIN_SECONDS, log=server.log)
    again = time.monotonic() - began
    request = text_request(PROMPT, stopping={"max_new_tokens": 3, "ignore_eos": True})
    assert len(generate(server.stub(), request).samples[0].token_ids) == 3
    return Seen(not_serving, told, again)


class Wire:
    """A connection's path that can be cut: forwards `port` to `target`.

    `cut` ends its connections, `hang` holds back whatever is sent: both until `restore`.
    """

    def __init__(self, target: int) -> None:
        self._target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self._whole = threading.Event()
        self._whole.set()
        self._dead = False
        self._ends: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        self._dead = True
        self._close_all()

    def hang(self) -> None:
        self._whole.clear()

    def restore(self) -> None:
        self._dead = False
        self._close_all()
        self._whole.set()

    def close(self) -> None:
        self._listener.close()
        self.restore()

    def _close_all(self) -> None:
        ends, self._ends = self._ends, []
        for end in ends:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            try:
                if self._dead:
                    raise OSError
                far = socket.create_connection(("127.0.0.1", self._target), 5)
            except OSError:
                near.close()
                continue
            self._ends += [near, far]
            for source, sink in ((near, far), (far, near)):
                threading.Thread(target=self._carry, args=(source, sink), daemon=True).start()

    def _carry(self, source: socket.socket, sink: socket.socket) -> None:
        try:
            while data := source.recv(65536):
                self._whole.wait()
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)
        except OSError:
            pass


def table(rows: dict[str, list[Seen]]) -> str:
    """Median and worst of what was seen, a line a case."""

    def times(values: list[float]) -> str:
        return f"{sorted(values)[len(values) // 2]:6.2f} {max(values):6.2f}" if values else "     -"

    lines = [f"{'case':34} n  NOT_SERVING     told            again       (median, worst; s)"]
    every: list[Seen] = [seen for cases in rows.values() for seen in cases]
    for name, cases in [*rows.items(), ("all", every)]:
        told = [seen.told for seen in cases if seen.told is not None]
        parts: list[Any] = [name, len(cases), times([seen.not_serving for seen in cases])]
        parts += [times(told), times([seen.again for seen in cases])]
        lines.append("{:34} {:3} {} | {} | {}".format(*parts))
    return "\n".join(lines)
