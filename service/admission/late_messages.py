"""Memory for messages that are late.

gRPC hands over whole messages: how much of one has arrived can't be seen. Most are there at once
and are counted then, by their size. One that is late counts as the longest that the port takes,
until it is there. The late messages of all connections may take half of the memory, those of one
connection an eighth; a call beyond is refused. So calls that send headers and no message can refuse
no call whose message comes at once, and one connection can take no other's part.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator

from tokenpod.service.admission.memory_budget import MemoryBudget
from tokenpod.service.calls.errors import RETRY_SECONDS, ResourceExhausted

#: A message is late if it is not there so many seconds after its call. What comes earlier is not
#: counted before it is there: no more than the network brings in this time.
LATE_SECONDS = 0.5
#: Parts of a front end's memory that late messages may take: of all connections, and of one.
_PART_OF_ALL = 2
_PART_OF_ONE = 8


class LateMessages:
    """Those of one front end.

    Args:
        memory: of all front ends.
        longest: bytes that a message may have.
    """

    def __init__(self, memory: MemoryBudget, longest: int) -> None:
        self._memory = memory
        self._longest = longest
        messages = memory.part // max(longest, 1)
        self._most = max(messages // _PART_OF_ALL, 1)
        self._most_of_one = max(messages // _PART_OF_ONE, 1)
        #: Messages by connection.
        self._waiting: Counter[str] = Counter()

    @contextlib.contextmanager
    def wait(self, connection: str) -> Iterator[None]:
        """Memory for a late message, until it is there.

        Args:
            connection: the peer's address and port.

        Raises ResourceExhausted if it is not there.
        """
        own, all_ = self._waiting[connection], self._waiting.total()
        if own >= self._most_of_one or all_ >= self._most:
            raise ResourceExhausted(
                f"the message has not arrived after {LATE_SECONDS:g} s; {all_} calls wait for such"
                f" messages, {own} of them of this connection, and this server lets {self._most}"
                f" wait, {self._most_of_one} of a connection (--max-front-end-bytes)",
                limit="late_messages",
                retry_after=RETRY_SECONDS,
            )
        with self._memory.reserve(self._longest):
            self._waiting[connection] += 1
            try:
                yield
            finally:
                self._waiting[connection] -= 1
                if not self._waiting[connection]:
                    del self._waiting[connection]
