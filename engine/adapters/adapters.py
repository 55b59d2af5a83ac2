"""The adapters of a pod: those that come with the model, and those that come and go while serving.

    load    files read, checked and cut by every rank, in a thread beside its steps
            -> all have it and agree on its digest -> its name points to it
    unload  its name goes -> its last sequence ends -> every rank forgets it

An adapter that takes the name of another does not touch it: what runs keeps the version that it
began with, and the old one goes as if it had been unloaded. What fails on any rank leaves
everything as it was.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Protocol

from tokenpod.core.messages import (
    AdapterDone,
    AdapterFacts,
    AdapterList,
    LoadAdapter,
    UnloadAdapter,
)
from tokenpod.core.outputs import FailureCode
from tokenpod.core.rank_reads import RankRead
from tokenpod.engine.adapters.adapter_reading import Reader, read_below
from tokenpod.engine.adapters.pace import Pace
from tokenpod.models.adapters.store import AdapterStore
from tokenpod.scheduler.sequences.adapter_slots import AdapterSlots

#: After so long every front end that lives has heard of an adapter's new version.
_HEARD_SECONDS = 5.0


class OwnAdapters:
    """A follower's: it reads and forgets as its leader says.

    Args:
        store: this rank's; None: the model takes no adapters.
        root: below it lie those that are loaded while serving.
        rank: this one.
    """

    def __init__(self, store: AdapterStore | None, root: str, rank: int) -> None:
        self._store, self._root, self._rank = store, root, rank
        #: Of the thread that takes steps.
        self.pace = Pace()
        self._reader = Reader(self.pace)

    def read(self, number: int, name: str, path: str, tell: Callable[[RankRead], None]) -> None:
        """Read an adapter beside the steps, and tell what came of it."""
        store = self._store
        assert store is not None, "the leader has slots, and so have all"

        def read() -> None:
            facts, problem = read_below(store, self._root, number, name, path, self._reader.rest)
            tell(RankRead(self._rank, number, facts.digest if facts else "", problem))

        self._reader.submit(read)

    def drop(self, number: int) -> None:
        """Forget an adapter."""
        assert self._store is not None
        self._store.drop(number)


class Followers(Protocol):
    """The other ranks of a group, as their leader knows them. Any thread may call."""

    #: What they have answered.
    reads: SimpleQueue[RankRead]

    @property
    def count(self) -> int:
        """How many there are."""
        ...

    def read_adapter(self, number: int, name: str, path: str) -> None:
        """Ask all to read an adapter; each answers in `reads`."""
        ...

    def drop_adapter(self, number: int) -> None:
        """Ask all to forget an adapter, behind the plans sent so far."""
        ...


@dataclass(slots=True)
class _Loading:
    """An adapter that ranks are reading."""

    op: int
    wanted: LoadAdapter
    facts: AdapterFacts | None = None
    left: int = 1
    digests: set[str] = field(default_factory=set)
    problem: str = ""


class Adapters:
    """The leader's book of adapters. Its methods are the step loop's.

    Args:
        store: this rank's.
        slots: the scheduler's.
        given: those that were loaded with the model.
        root: below it lie those that are loaded while serving.
        most: adapters that are kept at once.
        send: tells all front ends.
        followers: the other ranks; None: there are none.
    """

    def __init__(
        self,
        store: AdapterStore,
        slots: AdapterSlots,
        given: list[AdapterFacts],
        *,
        root: str,
        most: int,
        send: Callable[[AdapterList | AdapterDone], None],
        followers: Followers | None = None,
    ) -> None:
        self._store, self._slots, self._root, self._most = store, slots, root, most
        self._send, self._followers = send, followers
        self._named = {each.name: each for each in given}
        self._number = len(given)
        self._loading: dict[int, _Loading] = {}
        #: Who waits until an adapter is gone, by its number.
        self._leaving: dict[int, list[int]] = {}
        #: Old versions, and when nobody can ask for them any more.
        self._replaced: deque[tuple[float, int]] = deque()
        #: Of the step loop.
        self.pace = Pace()
        self._reader = Reader(self.pace)
        #: What it has read.
        self._reads: SimpleQueue[tuple[RankRead, AdapterFacts | None]] = SimpleQueue()

    @property
    def busy(self) -> bool:
        """Whether something is under way whose end is no message, so that somebody must look."""
        return bool(self._loading or self._replaced)

    def load(self, wanted: LoadAdapter) -> None:
        """Begin to load an adapter; `AdapterDone` follows, now or later."""
        names = {loading.wanted.name for loading in self._loading.values()}
        if wanted.name in names:
            problem = f"adapter {wanted.name} is being loaded already"
            self._fail(wanted.op, FailureCode.UNAVAILABLE, problem)
        elif len(names | self._named.keys() | {wanted.name}) > self._most:
            problem = f"{len(self._named)} adapters are loaded; at most {self._most} are kept"
            problem += " (--max-loaded-adapters)"
            self._fail(wanted.op, FailureCode.RESOURCE_EXHAUSTED, problem)
        else:
            self._begin(wanted)

    def _begin(self, wanted: LoadAdapter) -> None:
        self._number += 1
        number, loading = self._number, _Loading(wanted.op, wanted)
        self._loading[number] = loading
        if self._followers is not None:
            loading.left += self._followers.count
            self._followers.read_adapter(number, wanted.name, wanted.path)

        def read() -> None:
            facts, problem = read_below(
                self._store, self._root, number, wanted.name, wanted.path, self._reader.rest
            )
            digest = facts.digest if facts is not None else ""
            self._reads.put((RankRead(0, number, digest, problem), facts))

        self._reader.submit(read)

    def unload(self, wanted: UnloadAdapter) -> None:
        """Take an adapter's name away; `AdapterDone` follows once nobody has it any more."""
        facts = self._named.pop(wanted.name, None)
        if facts is None:
            self._send(_unknown(wanted))
            return
        self._publish()
        self._leaving.setdefault(facts.number, []).append(wanted.op)
        self._slots.retire(facts.number)

    def settle(self) -> None:
        """Take what has been read, and forget what nobody has any more."""
        while not self._reads.empty():
            self._take(*self._reads.get())
        while self._followers is not None and not self._followers.reads.empty():
            self._take(self._followers.reads.get())
        while self._replaced and self._replaced[0][0] <= time.monotonic():
            self._slots.retire(self._replaced.popleft()[1])
        for number in self._slots.take_dropped():
            self._drop(number)
            for op in self._leaving.pop(number, []):
                self._send(AdapterDone(op))

    # -- parts ---------------------------------------------------------------------------------

    def _take(self, read: RankRead, facts: AdapterFacts | None = None) -> None:
        loading = self._loading[read.number]
        loading.left -= 1
        loading.facts = facts or loading.facts
        if read.problem:
            where = f"rank {read.rank}: " if read.rank else ""
            loading.problem = loading.problem or where + read.problem
        else:
            loading.digests.add(read.digest)
        if not loading.left:
            del self._loading[read.number]
            self._finish(read.number, loading)

    def _finish(self, number: int, loading: _Loading) -> None:
        wanted, facts = loading.wanted, loading.facts
        problem = loading.problem
        if not problem and len(loading.digests) > 1:
            found = ", ".join(sorted(digest[:12] for digest in loading.digests))
            problem = f"ranks read different files: their digests begin {found}"
        elif not problem and wanted.digest and {wanted.digest} != loading.digests:
            (found,) = loading.digests
            problem = f"its digest is sha256:{found}; sha256:{wanted.digest} was asked for"
        if problem or facts is None:
            self._drop(number)
            code = FailureCode.INVALID_ARGUMENT
            self._fail(loading.op, code, f"adapter {wanted.name}: {problem}")
            return
        before = self._named.get(wanted.name)
        self._slots.add(number, whole=facts.whole)
        self._named[wanted.name] = facts
        self._publish()
        if before is not None:
            # Requests for it are on their way, from front ends that have not heard.
            self._replaced.append((time.monotonic() + _HEARD_SECONDS, before.number))
        self._send(AdapterDone(loading.op, facts))

    def _drop(self, number: int) -> None:
        self._store.drop(number)
        if self._followers is not None:
            self._followers.drop_adapter(number)

    def _publish(self) -> None:
        self._send(AdapterList([*self._named.values()]))

    def _fail(self, op: int, code: FailureCode, problem: str) -> None:
        self._send(AdapterDone(op, None, code, problem))


def no_adapters(wanted: LoadAdapter | UnloadAdapter) -> AdapterDone:
    """The answer of a model without slots for adapters."""
    if isinstance(wanted, UnloadAdapter):
        return _unknown(wanted)
    problem = "there are no slots for adapters (--max-adapters)"
    return AdapterDone(wanted.op, None, FailureCode.INVALID_ARGUMENT, problem)


def _unknown(wanted: UnloadAdapter) -> AdapterDone:
    problem = f"there is no adapter {wanted.name!r}"
    return AdapterDone(wanted.op, None, FailureCode.NOT_FOUND, problem)
