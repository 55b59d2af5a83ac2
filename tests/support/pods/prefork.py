"""Processes of `python -P -m tokenpod` that are forked from one that has imported everything.

A pod's imports take 2.5 seconds of a core; to fork one takes 0.02. See prefork_server.py.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import Mapping, Sequence

from support.pods import prefork_server

#: Of `/proc/PID/cmdline`.
_LONGEST_COMMAND = 4096
#: Variable with the address of the process that forks, where several test processes share it.
_SHARED = "PREFORK_SERVER"
#: What importing reads: whoever changes it needs a process of its own.
_READ_BY_IMPORTS = ("OMP_", "TRITON_", "NUMBA_", "PYTHON", "LD_", "CUDA_", "MKL_")


class PreforkedProcess:
    """What tests use of `subprocess.Popen`. The process is a child of another one of ours."""

    def __init__(self, args: Sequence[str], pid: int, status: socket.socket) -> None:
        self.args = args
        self.pid = pid
        self.returncode: int | None = None
        self._status = status
        #: Several threads may wait for it.
        self._asking = threading.Lock()
        weakref.finalize(self, status.close)

    def poll(self) -> int | None:
        """Its exit status, less than 0 for a signal; None: it runs."""
        return self._ended(0)

    def wait(self, timeout: float | None = None) -> int:
        """Raises subprocess.TimeoutExpired."""
        ended = self._ended(timeout)
        if ended is None:
            assert timeout is not None
            raise subprocess.TimeoutExpired(self.args, timeout)
        return ended

    def send_signal(self, number: int) -> None:
        """Nothing happens to a process that has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        """SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL."""
        self.send_signal(signal.SIGKILL)

    def _ended(self, seconds: float | None) -> int | None:
        if self.returncode is None and select.select([self._status], [], [], seconds)[0]:
            with self._asking:
                if self.returncode is None:
                    self.returncode = int(self._status.recv(64) or -signal.SIGKILL)
        return self.returncode


def start(
    arguments: Sequence[str],
    *,
    stdout: int,
    stderr: int,
    stdin: int | None = None,
    cwd: str | None = None,
    env: Mapping[str, str] | None = None,
    session: bool = False,
    script: str | None = None,
) -> PreforkedProcess:
    """`python -P -m tokenpod arguments...`.

    Args:
        arguments: of the command line.
        script: run in place of `-m tokenpod`.
        stdout, stderr, stdin: files; this process keeps them open. Without one, stdin is empty.
        cwd: its working directory; None: this process's.
        env: its whole environment; None: this process's.
        session: whether it leads a session and a process group of its own.
    """
    asked: prefork_server.Start = {
        "module": script or "tokenpod",
        "argv": [*arguments],
        "numbers": [0, 1, 2],
        "cwd": cwd or os.getcwd(),
        "env": dict(os.environ if env is None else env),
        "session": session,
    }
    sys.audit("prefork.start", asked["argv"])
    ours, theirs = socket.socketpair()
    with theirs, open(os.devnull) as nothing:
        first = nothing.fileno() if stdin is None else stdin
        descriptors = [first, stdout, stderr, theirs.fileno()]
        socket.send_fds(_server(), [json.dumps(asked).encode()], descriptors)
    return PreforkedProcess(["tokenpod", *arguments], int(ours.recv(64)), ours)


def run(
    arguments: Sequence[str],
    *,
    timeout: float,
    stdin: str = "",
    cwd: str | None = None,
    env: Mapping[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """`start` it, wait, and return what it wrote. Raises subprocess.TimeoutExpired; it is killed.

    An end by a signal is a status less than 0, as with subprocess.run.
    """
    with contextlib.ExitStack() as stack:
        files = [stack.enter_context(tempfile.TemporaryFile("w+")) for _ in range(3)]
        files[0].write(stdin)
        files[0].seek(0)
        first, output, errors = (file.fileno() for file in files)
        started = start(arguments, stdin=first, stdout=output, stderr=errors, cwd=cwd, env=env)
        try:
            status = started.wait(timeout)
        finally:
            started.kill()
        said = []
        for file in files[1:]:
            file.seek(0)
            said.append(file.read())
        return subprocess.CompletedProcess(started.args, status, *said)


def can_fork(env: Mapping[str, str] | None) -> bool:
    """Whether a process with these more variables is the same when its imports are older."""
    changed = [name for name, value in (env or {}).items() if os.environ.get(name) != value]
    return sys.platform == "linux" and not any(map(_read_by_imports, changed))


def _read_by_imports(name: str) -> bool:
    return name.startswith(_READ_BY_IMPORTS)


def share() -> None:
    """Let processes that this one starts ask one process that forks, for its imports take long."""
    address = f"@tokenpod-tests-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(address.replace("@", "\0"))
        listener.listen()
        _start_server(listener)
    os.environ[_SHARED] = address


@functools.cache
def _server() -> socket.socket:
    """The process that forks; it ends with this one, or with who shares it."""
    if not (address := os.environ.get(_SHARED)):
        return _start_server()
    link = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    link.connect(address.replace("@", "\0"))
    return link


def _start_server(listener: socket.socket | None = None) -> socket.socket:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        numbers = [link.fileno() for link in (theirs, listener) if link]
        padding = "-" * _LONGEST_COMMAND
        command = [sys.executable, "-P", prefork_server.__file__, *map(str, numbers), padding]
        # With more, numpy would start threads when it is imported, and what forks has one.
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        process = subprocess.Popen(command, pass_fds=numbers, stdin=subprocess.DEVNULL, env=env)

    def end() -> None:
        ours.close()
        process.wait()

    atexit.register(end)
    return ours
