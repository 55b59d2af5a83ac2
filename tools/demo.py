"""`make demo`: start a server on the embedded model, stream one completion, stop the server."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping

PROMPT = '''class Stack:
    """A last-in, first-out stack."""

    def __init__(self):
        self._items = []

    def push(self, item):
'''
TOKENPOD = [sys.executable, "-P", "-m", "tokenpod"]
START_SECONDS = 60


def main() -> int:
    with server() as address:
        options = ["--max-new-tokens", "64", "--repetition-penalty", "1.1"]
        return subprocess.call([*TOKENPOD, "generate", PROMPT, "--address", address, *options])


@contextlib.contextmanager
def server(*flags: str, variables: Mapping[str, str] | None = None) -> Iterator[str]:
    """A server on free ports, with more flags and variables; its address, once it is SERVING."""
    port, health_port = free_ports()
    began = time.monotonic()
    network = ["--hostname", "127.0.0.1", "--port", str(port), "--health-port", str(health_port)]
    command = [*TOKENPOD, "serve", *network, "--lame-duck-seconds", "0", *flags]
    environment = {**os.environ, **(variables or {})}
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
    try:
        wait_until_serving(process, f"127.0.0.1:{health_port}")
        print(f"$ tokenpod serve    # SERVING after {time.monotonic() - began:.1f} s\n")
        yield f"127.0.0.1:{port}"
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=30)


def wait_until_serving(process: subprocess.Popen[str], address: str) -> None:
    """Ask the health port as a kubelet would."""
    import grpc
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    deadline = time.monotonic() + START_SECONDS
    with grpc.insecure_channel(address) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        while time.monotonic() < deadline:
            if process.poll() is not None:
                raise SystemExit(f"the server did not start:\n{process.communicate()[1]}")
            with contextlib.suppress(grpc.RpcError):
                request = health_pb2.HealthCheckRequest(service="readiness")
                answer = health.Check(request, timeout=1, wait_for_ready=True)
                if answer.status == health_pb2.HealthCheckResponse.SERVING:
                    return
            time.sleep(0.05)
    raise SystemExit(f"the server was not ready within {START_SECONDS} s")


def free_ports() -> tuple[int, int]:
    """Two ports that nobody listens on."""
    with socket.socket() as one, socket.socket() as two:
        one.bind(("127.0.0.1", 0))
        two.bind(("127.0.0.1", 0))
        return one.getsockname()[1], two.getsockname()[1]


if __name__ == "__main__":
    sys.exit(main())
