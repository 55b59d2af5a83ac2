"""Engine processes before they have their options: they import meanwhile.

An engine imports for seconds, and so does the front end. What a process needs from the start,
sockets above all, follows from the settings; so `serve` starts its engines first of all.
"""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tokenpod.service.config.sources import ServerSettings

#: What runs the engine; COMPILE and the numbers of its ends of the links are added. -P: nothing is
#: imported from the working directory.
ENGINE_COMMAND = (sys.executable, "-P", "-m", "tokenpod.engine.process")
#: Has an engine compile kernels for a GPU ahead of its first steps.
COMPILE = "compile"


@dataclass(frozen=True, slots=True)
class StartedEngine:
    """An engine's process, which waits for its options, and our ends of its sockets.

    Args:
        links: one per front end.
        joins: brings it new links, where it has several.
        control: the control stream of a rank of a group; None: it is alone.
        questions: by which it is looked into.
        control_fd, questions_fd: the numbers of its ends; -1: there is none.
    """

    process: subprocess.Popen[bytes]
    links: Sequence[socket.socket]
    joins: socket.socket | None
    control: socket.socket | None
    questions: socket.socket
    control_fd: int
    questions_fd: int

    @classmethod
    def start(
        cls,
        command: Sequence[str] = ENGINE_COMMAND,
        *,
        links: int = 1,
        ranked: bool = False,
        compiles: bool = False,
    ) -> StartedEngine:
        """Start the process, with so many links.

        Args:
            command: what runs it.
            links: one per front end.
            ranked: whether it is a rank of a group.
            compiles: whether it compiles kernels for a GPU ahead.
        """
        pairs = [socket.socketpair() for _ in range(links)]
        joins = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) if links > 1 else None
        control = socket.socketpair() if ranked else None
        questions = socket.socketpair()
        inherited = [*pairs, *([joins] if joins else [])]
        numbers = [str(theirs.fileno()) for _, theirs in inherited]
        ends = [theirs for _, theirs in (*inherited, *([control] if control else []), questions)]
        # Popen, not asyncio's own: the child's death signal hangs on the thread that forks.
        process = subprocess.Popen(
            [*command, *([COMPILE] if compiles else []), *numbers],
            pass_fds=[end.fileno() for end in ends],
            stdin=subprocess.DEVNULL,
        )
        started = cls(
            process,
            [ours for ours, _ in pairs],
            joins[0] if joins else None,
            control[0] if control else None,
            questions[0],
            control[1].fileno() if control else -1,
            questions[1].fileno(),
        )
        for end in ends:
            end.close()
        return started

    def kill(self) -> None:
        """End the process, if it runs, and close what nobody has taken."""
        self.process.kill()
        self.process.wait()
        ends = *self.links, self.joins, self.control, self.questions
        for end in ends:
            if end is not None:
                end.close()


def start_engines(
    settings: ServerSettings, command: Sequence[str] = ENGINE_COMMAND
) -> list[StartedEngine]:
    """The engines of a pod: one, or one for each of its ranks, of which the first leads.

    The first has links to all front ends; ranks of a host share its cache of kernels.
    """
    ranked, on_gpu = settings.world > 1, settings.resolved_device == "cuda"
    return [
        StartedEngine.start(
            command,
            links=1 if at else settings.resolved_front_ends,
            ranked=ranked,
            compiles=on_gpu and not at,
        )
        for at in range(settings.num_shard if ranked else 1)
    ]


@contextlib.contextmanager
def killed_at_exit(engines: Sequence[StartedEngine]) -> Iterator[Sequence[StartedEngine]]:
    """At the end, those that still run are killed."""
    try:
        yield engines
    finally:
        for engine in engines:
            engine.kill()
