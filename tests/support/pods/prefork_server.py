"""A process that has imported what pods run, and taken a step: `prefork_server.py FD [FD] PADDING`.

It forks pods.

    test process --- a Start and descriptors ---> this process --fork--> a pod's front end
                                                                            |--fork--> forker

A front end starts its engine, its text workers and further front ends by `subprocess.Popen`. Those
must be its children, and a process in which gRPC has threads must not fork. So a front end forks a
forker before it does anything else, and its Popen asks that one, which forks children of its own
parent (CLONE_PARENT). Signals, statuses and deaths of parents are those of processes that were
started by their command line, and /proc shows that line; only the imports are older.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
import gc
import importlib
import json
import os
import platform
import runpy
import select
import selectors
import signal
import socket
import subprocess
import sys
import threading
import traceback
from pathlib import Path
from typing import Any, NoReturn, TypedDict

from tokenpod.core.own_process import die_with_parent

#: Not the modules that are run themselves: they start with empty globals.
_IMPORTED = (
    "tokenpod.commands.serve",
    "tokenpod.engine.constraints.trials",
    "tokenpod.engine.run",
    "tokenpod.engine.shards.member",
    "tokenpod.kernels.backends.cpu",
    "tokenpod.service.server",
    "tokenpod.service.text.tokenizers.chat_template",
)
#: What /proc shows as the command line of a process that forks for its parent.
FORKER = "forker"
_ENGINE = "tokenpod.engine.process"
_FRONT_END = "tokenpod.service.front_end"
_TEXT_WORKER = "tokenpod.service.text.workers.text_worker"
_TRIAL = "tokenpod.engine.constraints.trial"
#: Modules that are forked, and those that start them.
_CHILDREN = (_ENGINE, _FRONT_END, _TEXT_WORKER, _TRIAL)
_PARENTS = ("tokenpod", _ENGINE, _FRONT_END)
_CLONE = {"x86_64": 56, "aarch64": 220}
_CLONE_PARENT = 0x8000
_BYTES = 1 << 18
_DESCRIPTORS = 64
#: Received descriptors are moved here, out of the way of the numbers that they get.
_ABOVE = 256


class Start(TypedDict):
    """A command line, `python -P -m module argv...`, and what its process inherits."""

    #: Or a script that does what `tokenpod` does, and more: `python -P script argv...`.
    module: str
    argv: list[str]
    #: Numbers that the descriptors get which are sent with this, in order.
    numbers: list[int]
    #: None: that of the process that forks.
    cwd: str | None
    env: dict[str, str]
    #: Whether it leads a session of its own.
    session: bool


def main() -> None:
    """Fork what is asked for, until the test process hangs up."""
    control, *listeners = (socket.socket(fileno=int(number)) for number in sys.argv[1:-1])
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Of those who share it, none may want a pod.
    if listeners and control in select.select([control, *listeners], [], [])[0]:
        return
    # gRPC reads it when it is imported, and the command line sets it before.
    os.environ["GRPC_VERBOSITY"] = "NONE"
    for module in _IMPORTED:
        importlib.import_module(module)
    _take_steps()
    gc.collect()
    gc.freeze()
    if (asked := _fork_pods(control, listeners)) is not None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        _become(*asked)


def _take_steps() -> None:
    """Load the demo model and warm it up: half a second that every engine would need to read code.

    Compiled loops stay; neither this nor torch starts a thread for one thread's work.
    """
    import torch

    import tokenpod.models.demo
    from tokenpod.core.messages import EngineOptions
    from tokenpod.engine.startup.assemble import assemble
    from tokenpod.models.load import load_model

    positions, device = 64, torch.device("cpu")
    torch.set_num_threads(1)
    model = load_model(
        Path(tokenpod.models.demo.__file__).parent,
        dtype=None,
        device=device,
        progress=lambda done, total: None,
        max_total_tokens=positions,
    )
    options = EngineOptions(
        model_folder="",
        dtype=None,
        device=device.type,
        threads=1,
        max_batch_size=1,
        max_batch_prefill_tokens=16,
        max_batch_total_tokens=positions,
    )
    assemble(model, options, positions=positions, device=device)
    assert len(os.listdir("/proc/self/task")) == 1, "a process that forks has one thread"


def _fork_pods(
    control: socket.socket, listeners: list[socket.socket]
) -> tuple[Start, list[int]] | None:
    """In a forked process: what it shall be. In this one: None, once the test process is gone."""
    running = dict[int, tuple[int, socket.socket, socket.socket]]()  # by pidfd: pid, status, asker
    askers = [control]
    with selectors.DefaultSelector() as selector:
        for link in (control, *listeners):
            selector.register(link, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                asker = key.fileobj
                if not isinstance(asker, socket.socket):
                    selector.unregister(key.fd)
                    _reap(key.fd, *running.pop(key.fd)[:2])
                    continue
                if asker in listeners:
                    askers.append(asker.accept()[0])
                    selector.register(askers[-1], selectors.EVENT_READ)
                    continue
                start, descriptors = _receive(asker)
                if start is None:
                    for pid, _, whose in running.values():
                        if asker in (whose, control):
                            os.kill(pid, signal.SIGKILL)
                    if asker is control:
                        return None
                    selector.unregister(asker)
                    askers.remove(asker)
                    asker.close()
                    continue
                status = socket.socket(fileno=descriptors.pop())
                if not (pid := os.fork()):
                    for pidfd, (_, other, _) in running.items():
                        os.close(pidfd)
                        other.close()
                    for link in (status, *askers, *listeners):
                        link.close()
                    return start, descriptors
                for descriptor in descriptors:
                    os.close(descriptor)
                status.send(str(pid).encode())
                pidfd = os.pidfd_open(pid)
                running[pidfd] = pid, status, asker
                selector.register(pidfd, selectors.EVENT_READ)


def _reap(pidfd: int, pid: int, status: socket.socket) -> None:
    os.close(pidfd)
    ended = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    with status, contextlib.suppress(OSError):
        status.send(str(ended).encode())


def _receive(link: socket.socket) -> tuple[Start | None, list[int]]:
    """None: the other side has hung up."""
    data, descriptors, _, _ = socket.recv_fds(link, _BYTES, _DESCRIPTORS)
    return (json.loads(data) if data else None), descriptors


def _become(start: Start, descriptors: list[int]) -> NoReturn:
    """Run a module as `python -P -m` does, with a forker if it starts processes of ours."""
    high = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, _ABOVE) for descriptor in descriptors]
    for descriptor in descriptors:
        os.close(descriptor)
    for descriptor, number in zip(high, start["numbers"], strict=True):
        os.dup2(descriptor, number)
        os.close(descriptor)
    if start["cwd"] is not None:
        os.chdir(start["cwd"])
    if start["session"]:
        os.setsid()
    os.environ.clear()
    os.environ.update(start["env"])
    module, argv = start["module"], start["argv"]
    is_script = module.endswith(".py")
    if "serve" in argv[:1] if is_script or module == "tokenpod" else module in _PARENTS:
        _show([FORKER])
        _Popen.forker = _new_forker()
    _show([sys.executable, "-P", *(() if is_script else ("-m",)), module, *argv])
    # As an interpreter opens them, with the encoding of any UTF-8 locale.
    sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", 1, "utf-8", "backslashreplace", closefd=False)  # noqa: SIM115
    subprocess.Popen = _Popen  # type: ignore[misc]
    sys.argv = ["", *argv]
    status = 1
    try:
        if is_script:
            runpy.run_path(module, run_name="__main__")
        else:
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    if _Popen.forker is not None:
        pid, link = _Popen.forker
        link.close()
        os.waitpid(pid, 0)
    # An interpreter that frees all that is imported copies most pages of the process that forks.
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _new_forker() -> tuple[int, socket.socket]:
    """A child that forks more children of this process: its process id, and how to ask it."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if pid := os.fork():
        theirs.close()
        return pid, ours
    ours.close()
    die_with_parent()
    while True:
        start, descriptors = _receive(theirs)
        if start is None:
            os._exit(0)
        if not (pid := _fork_sibling()):
            theirs.close()
            _become(start, descriptors)
        for descriptor in descriptors:
            os.close(descriptor)
        theirs.send(str(pid).encode())


def _fork_sibling() -> int:
    """As os.fork, but the new process's parent is this one's parent."""
    # Keeps the interpreter's lock, as a fork must.
    library = ctypes.PyDLL(None, use_errno=True)
    ctypes.pythonapi.PyOS_BeforeFork()
    pid = library.syscall(_CLONE[platform.machine()], _CLONE_PARENT | signal.SIGCHLD, 0, 0, 0, 0)
    if pid == 0:
        ctypes.pythonapi.PyOS_AfterFork_Child()
    else:
        ctypes.pythonapi.PyOS_AfterFork_Parent()
    if pid < 0:
        raise OSError(ctypes.get_errno(), "clone")
    return int(pid)


class _Popen(subprocess.Popen[Any]):
    """Has command lines of ours forked."""

    #: Its process id, and how to ask it.
    forker: tuple[int, socket.socket] | None = None

    def _execute_child(self, args: Any, *more: Any) -> None:
        ours = [*args[:3]] == [sys.executable, "-P", "-m"] and args[3] in _CHILDREN
        if self.forker is None or not ours:
            super()._execute_child(args, *more)  # type: ignore[misc]
            return
        _, _, _, inherited, cwd, env, _, _, _, *pipes = more[:15]
        stdin, _, _, stdout, _, stderr = pipes
        numbers = {0: stdin, 1: stdout, 2: stderr}
        sent = {number: pipe for number, pipe in numbers.items() if pipe != -1}
        sent |= {number: number for number in inherited}
        start: Start = {
            "module": args[3],
            "argv": args[4:],
            "numbers": [*sent],
            "cwd": cwd,
            "env": dict(os.environ if env is None else env),
            "session": False,
        }
        _, forker = self.forker
        socket.send_fds(forker, [json.dumps(start).encode()], [*sent.values()])
        self.pid = int(forker.recv(64))
        self._child_created = True
        self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]


def _show(command: list[str]) -> None:
    """Make it the command line that /proc shows, as far as there is room."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    first, end = int(fields[45]), int(fields[46])
    text = "\0".join(command).encode()[: end - first - 1]
    ctypes.memmove(first, text.ljust(end - first, b"\0"), end - first)


if __name__ == "__main__":
    main()
