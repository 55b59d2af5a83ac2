"""The process that opens files of strangers: what it can't do, in small processes of their own."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys

import pytest

pytestmark = pytest.mark.pod


def run(code):
    return subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True)


def test_it_leaves_the_network():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        code = f"""
import os, socket
from tokenpod.models.convert.limits import leave_the_network
socket.create_connection(("127.0.0.1", {port})).close()
if not leave_the_network(): raise SystemExit(7)
assert os.getuid() == {os.getuid()}
try: socket.create_connection(("127.0.0.1", {port}))
except OSError as error: print(error.strerror)
"""
        done = run(code)
    if done.returncode == 7:
        pytest.skip("this system does not let a process leave the network")
    assert done.stdout.strip() in ("Network is unreachable", "Connection refused"), done.stderr


def test_its_memory_is_limited():
    code = """
from tokenpod.models.convert.limits import limit
limit(memory=100 << 20, seconds=60)
bytearray(50 << 20)
try: bytearray(200 << 20)
except MemoryError: print("refused")
"""
    assert run(code).stdout == "refused\n"


def test_its_time_is_limited():
    code = """
from tokenpod.models.convert.limits import limit
limit(memory=1 << 30, seconds=1)
while True: pass
"""
    # The kernel sends the second one where both limits are the same.
    assert run(code).returncode in (-signal.SIGXCPU, -signal.SIGKILL)
