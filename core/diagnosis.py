"""A look into a process that runs: what its threads do, where its time goes, what it logs.

Each process of a pod has a thread that answers on a socket which it has inherited. It answers while
an event loop or a step hangs, as long as Python code gets its turn.

    the pod's first front end -- AskStacks, AskProfile, SetLevel --> a thread of each other process
                              <------------------ Told --------------
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from types import FrameType

from tokenpod.core.link import Link, LinkClosed
from tokenpod.core.message import Message

_NAME = "diagnosis"
#: Seconds between two looks of a profile.
_EVERY_SECONDS = 0.01
#: Most functions of a stack in an answer, the innermost ones; most different stacks of a profile.
_MOST_FUNCTIONS, _MOST_STACKS = 100, 20_000


class AskStacks(Message, frozen=True, array_like=True, tag=True):
    """Answer with what each thread does now."""

    op: int = 0


class AskProfile(Message, frozen=True, array_like=True, tag=True):
    """Sample the stacks of all threads for so long, and answer with them."""

    seconds: float
    op: int = 0


class SetLevel(Message, frozen=True, array_like=True, tag=True):
    """Log what is as severe as this from now on: `debug`, `info`, `warning` or `error`."""

    level: str
    op: int = 0


class Told(Message, frozen=True, array_like=True, tag=True):
    """The answer to a question; there is one for each."""

    op: int
    text: str


Question = AskStacks | AskProfile | SetLevel


def answer(question: Question) -> str:
    """What this process has to say; a profile takes its time."""
    match question:
        case AskStacks():
            return stacks()
        case AskProfile():
            return profile(question.seconds)
        case SetLevel():
            logging.getLogger().setLevel(question.level.upper())
            return ""


def answer_questions(descriptor: int) -> None:
    """Start the thread that answers until the other end of this socket is closed."""
    link = Link[Question](socket.socket(fileno=descriptor), Question)  # type: ignore[arg-type]
    sending = threading.Lock()

    def serve_one(question: Question) -> None:
        told = Told(question.op, answer(question))
        with contextlib.suppress(LinkClosed), sending:
            link.send(told)

    def serve() -> None:
        with contextlib.suppress(LinkClosed):
            while True:
                for question in link.receive(None):
                    if isinstance(question, AskProfile):
                        # Others are answered meanwhile.
                        _thread(serve_one, question)
                    else:
                        serve_one(question)

    _thread(serve)


def _thread(work: Callable[..., None], *arguments: object) -> None:
    threading.Thread(target=work, args=arguments, name=_NAME, daemon=True).start()


def stacks() -> str:
    """The threads of this process but those that answer, their functions with the innermost last.

    Names, files and lines alone: no value of a variable.
    """
    lines = [f"process {os.getpid()}"]
    for name, frame in _threads():
        lines.append(f"thread {name}")
        for each, line in reversed([*_frames(frame)]):
            code = each.f_code
            lines.append(f'  {code.co_qualname} ("{code.co_filename}", line {line})')
    return "\n".join(lines)


def profile(seconds: float) -> str:
    """What all other threads have done for so long: `thread;module:function;... count` a line."""
    seen = Counter[str]()
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        for name, frame in _threads():
            functions = [_function(each) for each, _ in _frames(frame)]
            stack = ";".join([name, *reversed(functions)])
            if stack in seen or len(seen) < _MOST_STACKS:
                seen[stack] += 1
        time.sleep(_EVERY_SECONDS)
    return "".join(f"{stack} {count}\n" for stack, count in seen.most_common())


def _threads() -> Iterator[tuple[str, FrameType]]:
    """Threads that don't answer questions, by their names, and where they are."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    for ident, frame in sys._current_frames().items():
        name = names.get(ident, str(ident))
        if ident != threading.get_ident() and name != _NAME:
            yield name.replace(";", ","), frame


def _frames(frame: FrameType) -> Iterator[tuple[FrameType, int]]:
    """A frame and those that called it, with their lines."""
    found: FrameType | None = frame
    for _ in range(_MOST_FUNCTIONS):
        if found is None:
            return
        yield found, found.f_lineno
        found = found.f_back


def _function(frame: FrameType) -> str:
    module = frame.f_globals.get("__name__", "?")
    return f"{module}:{frame.f_code.co_qualname}"
