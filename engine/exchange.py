"""The engine's end of several links, one per front-end process, used as one link.

Each front end names its sequences by numbers of its own: front end k of n takes those that leave
k when divided by n. So a step's outputs are divided by arithmetic, without a table.
Router steps come from the first front end alone; what concerns all (progress, readiness, a broken
engine) goes to all.

    front end 0  <- rows 0, n, 2n ...    and every step's load, though it had no row in it
    front end 1  <- rows 1, n+1 ...

A front end that is replaced gets a new link while the engine runs. The first front end sends the
engine's end of it over a socket of its own kind (`SOCK_SEQPACKET`, one message per link).
"""

from __future__ import annotations

import select
import socket
from collections.abc import Sequence
from typing import Protocol

import msgspec

from tokenpod.core.images import DropImages, EncodeImages, ImagesEncoded
from tokenpod.core.link import Link, LinkClosed, PatientLink, take_link
from tokenpod.core.messages import Abort, AdapterDone, AdapterList, CacheEvents, Ready, ToEngine
from tokenpod.core.outputs import StepOutputs, Top
from tokenpod.core.requests import Request

#: Seconds that a further front end's link may stand still. Longer than heartbeats take to show that
#: a front end hangs (service/pod/front_ends.py), so that one that only lags is kept.
_PATIENCE_SECONDS = 10.0


class Face(Protocol):
    """What the step loop needs of the front ends."""

    def send(self, message: msgspec.Struct) -> None:
        """Send one message; raises LinkClosed."""

    def receive(self, wait: float | None = 0.0) -> list[ToEngine]:
        """Messages that have arrived; waits up to `wait` seconds (None: for ever) for the first.

        Raises LinkClosed when nobody is left to work for.
        """


def face_of(endpoints: Sequence[socket.socket], *, patience: float = _PATIENCE_SECONDS) -> Face:
    """The engine's end of `endpoints`, one per front end, the first one's first.

    Args:
        endpoints: links, and at most one socket of type SOCK_SEQPACKET that brings new ones.
        patience: seconds that a further front end may read nothing.
    """
    joins = [end for end in endpoints if end.type == socket.SOCK_SEQPACKET]
    links = [end for end in endpoints if end not in joins]
    if len(links) == 1:
        return Link[ToEngine](links[0], ToEngine)  # type: ignore[arg-type]
    return Exchange(links, joins=joins[0] if joins else None, patience=patience)


#: In the place of a front end's index: the socket that brings new links.
_JOINS = -1


class Exchange:
    """Several links as one. Made by `face_of`.

    The first front end is the pod's: its end is the engine's. Another that is gone, or reads no
    more, leaves its sequences behind, which are aborted; the rest goes on, and waits for nobody.
    """

    def __init__(
        self,
        endpoints: Sequence[socket.socket],
        *,
        joins: socket.socket | None = None,
        patience: float = _PATIENCE_SECONDS,
    ) -> None:
        first, *further = endpoints
        self._patience = patience
        self._links: dict[int, Link[ToEngine]] = {0: Link[ToEngine](first, ToEngine)}  # type: ignore[arg-type]
        self._links |= {at: self._further(end) for at, end in enumerate(further, start=1)}
        self._joins = joins
        self._count = len(endpoints)
        #: Sequences that each front end waits for.
        self._owned: list[set[int]] = [set() for _ in endpoints]
        #: Images that each has had computed for requests to come.
        self._images: list[set[int]] = [set() for _ in endpoints]
        #: For front ends that were found gone by sending.
        self._aborts: list[ToEngine] = []
        #: The first message to a new front end.
        self._ready: Ready | None = None
        #: The last one, for it too.
        self._adapters: AdapterList | None = None

    def receive(self, wait: float | None = 0.0) -> list[ToEngine]:
        """Messages of all front ends; see `Face`."""
        for at in self._wait(wait):
            if at == _JOINS:
                self._join()
            elif at in self._links:
                self._aborts += self._arrived(at)
        self._flush()
        messages, self._aborts = self._aborts, []
        return messages

    def send(self, message: msgspec.Struct) -> None:
        """To all; of a step to each its part; of the cache and of calls to the first alone."""
        if isinstance(message, Ready):
            self._ready = message
        if isinstance(message, AdapterList):
            self._adapters = message
        if isinstance(message, CacheEvents | AdapterDone):
            self._send(0, message)
            return
        if isinstance(message, ImagesEncoded):
            if (at := message.op % self._count) in self._links:
                self._send(at, message)
            return
        if not isinstance(message, StepOutputs):
            for at in list(self._links):
                self._send(at, message)
            return
        parts = self._parts(message)
        for at in list(self._links):
            part = parts[at]
            self._owned[at].difference_update(
                sequence_id
                for sequence_id, finish in zip(part.sequence_ids, part.finishes, strict=True)
                if finish
            )
            self._owned[at].difference_update(failure.sequence_id for failure in part.failures)
            if at == 0 or part.sequence_ids or part.started or part.failures:
                self._send(at, part)

    # -- links ---------------------------------------------------------------------------------

    def _wait(self, wait: float | None) -> list[int]:
        """Front ends with something to read, after at most `wait` seconds."""
        watched = {link.fileno(): at for at, link in self._links.items()}
        if self._joins is not None:
            watched[self._joins.fileno()] = _JOINS
        behind = [link.fileno() for link in self._links.values() if link.unsent]
        if self._aborts:
            wait = 0.0
        elif behind:
            wait = self._patience if wait is None else min(wait, self._patience)
        readable, _, _ = select.select(list(watched), behind, [], wait)
        return [watched[descriptor] for descriptor in readable]

    def _arrived(self, at: int) -> list[ToEngine]:
        try:
            arrived = self._links[at].receive(0.0)
        except LinkClosed:
            return self._gone(at)
        for message in arrived:
            if isinstance(message, Request):
                self._owned[at].update(message.reported)
                if message.images is not None:
                    self._images[at].discard(message.images.op)
            elif isinstance(message, EncodeImages):
                self._images[at].add(message.op)
            elif isinstance(message, DropImages):
                self._images[at].discard(message.op)
            elif isinstance(message, Abort):
                self._owned[at].difference_update(message.sequence_ids)
        return arrived

    def _flush(self) -> None:
        for at, link in list(self._links.items()):
            try:
                link.flush()
            except LinkClosed:
                self._aborts += self._gone(at)

    def _join(self) -> None:
        """A front end takes the place of one that is gone, or about to be found gone."""
        assert self._joins is not None
        joined = take_link(self._joins)
        if joined is None:
            # The first front end is gone; its link says so too.
            self._joins.close()
            self._joins = None
            return
        at, endpoint = joined
        if at in self._links:
            self._aborts += self._gone(at)
        self._links[at] = self._further(endpoint)
        if self._ready is not None:
            self._send(at, self._ready)
        if self._adapters is not None:
            self._send(at, self._adapters)

    def _further(self, endpoint: socket.socket) -> Link[ToEngine]:
        return PatientLink[ToEngine](endpoint, ToEngine, patience=self._patience)  # type: ignore[arg-type]

    def _send(self, at: int, message: msgspec.Struct) -> None:
        try:
            self._links[at].send(message)
        except LinkClosed:
            self._aborts += self._gone(at)

    def _gone(self, at: int) -> list[ToEngine]:
        """Hang up on a front end; what is left to end. Raises LinkClosed for the first one."""
        if at == 0:
            raise LinkClosed
        self._links.pop(at).close()
        left, self._owned[at] = self._owned[at], set()
        images, self._images[at] = self._images[at], set()
        return [Abort(sorted(left)), *map(DropImages, sorted(images))]

    def _parts(self, outputs: StepOutputs) -> list[StepOutputs]:
        count = self._count
        rows: list[list[int]] = [[] for _ in range(count)]
        where: list[int] = []
        for at, sequence_id in enumerate(outputs.sequence_ids):
            mine = rows[sequence_id % count]
            where.append(len(mine))
            mine.append(at)
        return [self._part(outputs, owner, rows[owner], where) for owner in range(count)]

    def _part(
        self, outputs: StepOutputs, owner: int, rows: list[int], where: list[int]
    ) -> StepOutputs:
        ids, count = outputs.sequence_ids, self._count
        return StepOutputs(
            step=outputs.step,
            at=outputs.at,
            sequence_ids=[ids[at] for at in rows],
            token_ids=[outputs.token_ids[at] for at in rows],
            logprobs=[outputs.logprobs[at] for at in rows],
            finishes=[outputs.finishes[at] for at in rows],
            load=outputs.load,
            started=[s for s in outputs.started if s.sequence_id % count == owner],
            tops=[
                Top(where[top.at], top.token_ids, top.logprobs, top.rank)
                for top in outputs.tops
                if ids[top.at] % count == owner
            ],
            failures=[f for f in outputs.failures if f.sequence_id % count == owner],
            advanced=outputs.advanced if owner == 0 else [],
            satisfied={i: whole for i, whole in outputs.satisfied.items() if i % count == owner},
            drafted=[d for d in outputs.drafted if d.sequence_id % count == owner],
            vectors=[v for v in outputs.vectors if v.sequence_id % count == owner],
        )
