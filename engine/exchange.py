"""The engine's end of several links: one a front-end process, as if it were one link.

Each front end names its sequences by numbers of its own: front end k of n takes those that leave
k when divided by n. So a step's outputs are told apart by arithmetic, and no table says who is who.
Router steps come from the first front end alone; what concerns all (progress, readiness, a broken
engine) goes to all.

    front end 0  <- rows 0, n, 2n ...    and every step's load, though it had no row in it
    front end 1  <- rows 1, n+1 ...
"""

from __future__ import annotations

import select
import socket
import struct
from collections.abc import Sequence
from typing import Protocol

import msgspec

from tokenpod.core.link import Link, LinkClosed
from tokenpod.core.messages import Abort, Request, StepOutputs, ToEngine, Top


class Face(Protocol):
    """What the step loop needs of whoever asks it for tokens."""

    def send(self, message: msgspec.Struct) -> None:
        """Send one message; raises LinkClosed."""

    def receive(self, wait: float | None = 0.0) -> list[ToEngine]:
        """Messages that have arrived; waits up to `wait` seconds (None: for ever) for the first.

        Raises LinkClosed when nobody is left to work for.
        """


def face_of(endpoints: Sequence[socket.socket], *, patience: float = 5.0) -> Face:
    """The engine's end of `endpoints`, one a front end, the first one's first.

    Args:
        patience: seconds that the engine waits for a further front end that reads no more.
    """
    for endpoint in endpoints[1:]:
        seconds, rest = divmod(patience, 1)
        interval = struct.pack("ll", int(seconds), int(rest * 1e6))
        endpoint.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, interval)
    links = [Link[ToEngine](endpoint, ToEngine) for endpoint in endpoints]  # type: ignore[arg-type]
    return links[0] if len(links) == 1 else Exchange(links)


class Exchange:
    """Several links as one. Made by `face_of`.

    The first front end is the pod's: its end is the engine's. Another that is gone, or has not read
    for so long that a message did not fit any more, leaves its sequences behind, which are aborted;
    the rest goes on.
    """

    def __init__(self, links: Sequence[Link[ToEngine]]) -> None:
        self._links: dict[int, Link[ToEngine]] = dict(enumerate(links))
        self._count = len(links)
        #: Sequences that each front end waits for.
        self._owned: list[set[int]] = [set() for _ in links]
        #: For front ends that were found gone by sending.
        self._aborts: list[ToEngine] = []

    def receive(self, wait: float | None = 0.0) -> list[ToEngine]:
        """Messages of all front ends; see `Face`."""
        links = {link.fileno(): at for at, link in self._links.items()}
        messages, self._aborts = self._aborts, []
        for descriptor in select.select(list(links), [], [], 0.0 if messages else wait)[0]:
            at = links[descriptor]
            try:
                arrived = self._links[at].receive(0.0)
            except LinkClosed:
                arrived = [self._gone(at)]
            for message in arrived:
                if isinstance(message, Request):
                    self._owned[at].update(message.sequence_ids)
                elif isinstance(message, Abort):
                    self._owned[at].difference_update(message.sequence_ids)
            messages += arrived
        return messages

    def send(self, message: msgspec.Struct) -> None:
        """To all; of a step to each its own part."""
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

    def _send(self, at: int, message: msgspec.Struct) -> None:
        try:
            self._links[at].send(message)
        except LinkClosed:
            self._aborts.append(self._gone(at))

    def _gone(self, at: int) -> Abort:
        """Hang up on a front end; what is left to abort. Raises LinkClosed for the first one."""
        if at == 0:
            raise LinkClosed
        self._links.pop(at).close()
        left, self._owned[at] = self._owned[at], set()
        return Abort(sorted(left))

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
                Top(where[top.at], top.token_ids, top.logprobs)
                for top in outputs.tops
                if ids[top.at] % count == owner
            ],
            failures=[f for f in outputs.failures if f.sequence_id % count == owner],
            advanced=outputs.advanced if owner == 0 else [],
        )
