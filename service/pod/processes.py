"""The processes of a pod, as an operator looks into them: each is asked over its own socket."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import socket

import msgspec

from tokenpod.core.async_link import AsyncLink
from tokenpod.core.diagnosis import AskProfile, AskStacks, Question, SetLevel, Told, answer
from tokenpod.service.calls.errors import NotFound, ResourceExhausted, Unavailable

log = logging.getLogger("tokenpod")

#: Seconds in which a process that is alive answers.
_PATIENCE_SECONDS = 2.0
#: What names of front ends begin with, and that of the first.
FRONT_END = "front-end-"
FIRST = f"{FRONT_END}0"


class PodProcesses:
    """The first front end, which this is, and the others, which have sockets.

    Args:
        level: what is logged, by the settings.
    """

    def __init__(self, level: str) -> None:
        self.level = self._usual_level = level
        self._others: dict[str, _Other] = {}
        self._opening: set[asyncio.Task[None]] = set()
        self._profiled: set[str] = set()

    @property
    def pids(self) -> dict[str, int]:
        """Process ids by names, this one's first."""
        return {FIRST: os.getpid()} | {name: other.pid for name, other in self._others.items()}

    @property
    def engine(self) -> str:
        """The name of the engine, or of this pod's first rank; of this process while it starts."""
        ranks = (name for name in self._others if not name.startswith(FRONT_END))
        return next(ranks, FIRST)

    def add(self, name: str, pid: int, end: socket.socket) -> None:
        """A process has started, in the place of one that had its name; `end` is ours."""
        if (before := self._others.pop(name, None)) is not None:
            before.close()
        other = self._others[name] = _Other(pid)
        opening = asyncio.create_task(self._open(other, end))
        self._opening.add(opening)
        opening.add_done_callback(self._opening.discard)

    async def _open(self, other: _Other, end: socket.socket) -> None:
        await other.open(end)
        if self.level != self._usual_level:
            other.tell(SetLevel(self.level))

    def set_level(self, level: str) -> None:
        """Log what is as severe as this from now on, in all processes."""
        log.warning("the log's level changes", extra={"was": self.level, "now": level})
        self.level = level
        answer(SetLevel(level))
        for other in self._others.values():
            other.tell(SetLevel(level))

    def switch_level(self) -> None:
        """From the level of the settings to debug, and back."""
        self.set_level("debug" if self.level == self._usual_level else self._usual_level)

    async def stacks(self, name: str = "") -> list[tuple[str, str]]:
        """Names of processes and what their threads do; of one, or of all. Raises NotFound."""
        names = [name] if name else list(self.pids)
        found = await asyncio.gather(*(self._ask(each, AskStacks()) for each in names))
        silent = f"no answer in {_PATIENCE_SECONDS:g} s"
        return [
            (each, silent if text is None else text)
            for each, text in zip(names, found, strict=True)
        ]

    async def profile(self, name: str, seconds: float) -> str:
        """Where a process spends its time.

        Raises NotFound, ResourceExhausted while another profile of it is taken, or Unavailable if
        it does not answer.
        """
        if name in self._profiled:
            raise ResourceExhausted(
                f"a profile of {name} is being taken; there is one at a time",
                limit="profiles",
                retry_after=seconds,
            )
        self._profiled.add(name)
        try:
            text = await self._ask(name, AskProfile(seconds), seconds)
        finally:
            self._profiled.discard(name)
        if text is None:
            raise Unavailable(f"{name} does not answer")
        return text

    async def _ask(self, name: str, question: Question, seconds: float = 0.0) -> str | None:
        """The answer; None: there was none in time, which is after so many seconds and two."""
        if name == FIRST:
            return await asyncio.to_thread(answer, question)
        other = self._others.get(name)
        if other is None:
            raise NotFound("process", name)
        try:
            async with asyncio.timeout(seconds + _PATIENCE_SECONDS):
                return await other.ask(question)
        except TimeoutError:
            return None


class _Other(AsyncLink[Told]):
    """Another process."""

    def __init__(self, pid: int) -> None:
        super().__init__(Told)
        self.pid = pid
        self._ops = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[str]] = {}

    def receive(self, message: Told) -> None:
        """An answer; who asked may have gone."""
        waiting = self._waiting.pop(message.op, None)
        if waiting is not None and not waiting.done():
            waiting.set_result(message.text)

    def tell(self, question: Question) -> None:
        """Send what needs no answer."""
        self.send(question)

    async def ask(self, question: Question) -> str:
        """Send a question, and wait for its answer."""
        op = next(self._ops)
        waiting: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._waiting[op] = waiting
        self.send(msgspec.structs.replace(question, op=op))
        try:
            return await waiting
        finally:
            self._waiting.pop(op, None)
