"""What every worker process does and answers, whatever its kind of job."""

from __future__ import annotations

import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from enum import IntEnum
from typing import Any

import msgspec

from tokenpod.core.link import Link, LinkClosed
from tokenpod.core.message import Message
from tokenpod.core.own_process import be_first_to_go, die_with_parent, limit_memory


class Loaded(Message, frozen=True, array_like=True, tag=True):
    """The worker is ready for its first job."""


class Refusal(IntEnum):
    """Why a job has no result."""

    #: The job itself is at fault; the text is for the client and says how.
    JOB = 1
    #: A library fails on the job: a panic; the text is for the log.
    LIBRARY = 2
    #: The job takes more memory than a worker may.
    MEMORY = 3
    #: A bug of ours; the text is for the log.
    FAULT = 4


class Refused(Message, frozen=True, array_like=True, tag=True):
    """The job has no result; the worker goes on. `field`: the job's field at fault."""

    reason: Refusal
    message: str
    field: str = ""


def work(kinds: Any, load: Callable[[Any], tuple[Loaded, Callable[[Any], msgspec.Struct]]]) -> int:
    """Be a worker process: answer one job after another until the front end hangs up.

    The link's descriptor is the process's argument.

    Args:
        kinds: the union of the messages that come; the first has the options.
        load: makes of these the first message to the front end, and what answers a job.
    """
    die_with_parent()
    # The front end decides when to stop; a terminal's Ctrl-C reaches the whole process group.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    be_first_to_go()
    # The processes share the machine's cores already: a worker has one thread.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    link = Link[Any](socket.socket(fileno=int(sys.argv[1])), kinds)
    try:
        options = link.receive(None)[0]
        loaded, answer = load(options)
        limit_memory(options.memory_bytes)
        link.send(loaded)
        while True:
            for job in link.receive(None):
                link.send(answer(job))
    except LinkClosed:
        return 0


def refused(error: Exception) -> Refused:
    """The error of an exception that no job should raise; its text goes to standard error."""
    if isinstance(error, MemoryError):
        return Refused(Refusal.MEMORY, "")
    traceback.print_exception(error)
    return Refused(Refusal.LIBRARY, type(error).__name__)
