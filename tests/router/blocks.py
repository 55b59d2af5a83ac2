"""A v3 router's own book of KV blocks, with reuse of prompts' beginnings.

Shards that page by a router's book read `blocks`, `slots` and `cache_len`; others must work in
spite of them. How many blocks a request takes and when they are free again is the router's rule;
which cached prefix makes room first is ours.
"""

from __future__ import annotations

from dataclasses import dataclass

Prefix = tuple[int, ...]


@dataclass(frozen=True)
class Allocation:
    """Blocks of one request, in order. The first `cache_len` tokens need no prefill."""

    blocks: tuple[int, ...] = ()
    slots: tuple[int, ...] = ()
    cache_len: int = 0
    #: Ids of the prompt's tokens, where its blocks may be shared.
    prompt: Prefix = ()


class BlockAllocator:
    """Every block is free, in use by one request, or cached under the prefix that it ends."""

    def __init__(
        self,
        tokens: int,
        block_size: int,
        *,
        prefix_caching: bool = False,
        window_size: int | None = None,
    ) -> None:
        self._block_size = block_size
        self._prefix_caching = prefix_caching
        # A book of prefixes knows no window.
        self._window = None if prefix_caching else window_size
        # Block 0 belongs to the liveness probe.
        self._free = list(range(1, tokens // block_size))
        #: Blocks in all.
        self.size = len(self._free)
        self._cached: dict[Prefix, int] = {}
        self._users: dict[Prefix, int] = {}

    @property
    def available(self) -> int:
        """Blocks that no request uses."""
        return len(self._free) + sum(1 for users in self._users.values() if users == 0)

    def allocate(self, tokens: int, prompt: Prefix) -> Allocation | None:
        """Blocks for `tokens` tokens, or None when there are too few.

        `prompt` is empty where the prompt's tokens are unknown or must all be computed.
        """
        prompt = prompt if self._prefix_caching else ()
        size, needed = self._block_size, min(tokens, self._window or tokens)
        shared = self._shared(prompt)
        self._use(shared, 1)
        missing = round_up(needed, size) // size - len(shared)
        self._evict(missing)
        if missing > len(self._free):
            self._use(shared, -1)
            return None
        at = len(self._free) - missing
        taken, self._free = self._free[at:], self._free[:at]
        blocks = (*(self._cached[prefix] for prefix in shared), *taken)
        # At least one token must be left to compute.
        cache_len = min(len(shared) * size, max(len(prompt) - 1, 0))
        once = [block * size + offset for block in blocks for offset in range(size)]
        slots = tuple(once[position % len(once)] for position in range(tokens))
        return Allocation(blocks, slots, cache_len, prompt)

    def release(self, allocation: Allocation) -> None:
        """Free an allocation; whole blocks of its prompt stay cached."""
        prefixes = list(self._prefixes(allocation.prompt))
        for index, block in enumerate(allocation.blocks):
            prefix = prefixes[index] if index < len(prefixes) else None
            if prefix is None or self._cached.get(prefix, block) != block:
                self._free.append(block)
            elif prefix in self._cached:
                self._users[prefix] -= 1
            else:
                self._cached[prefix], self._users[prefix] = block, 0

    def _shared(self, prompt: Prefix) -> list[Prefix]:
        shared: list[Prefix] = []
        for prefix in self._prefixes(prompt):
            if prefix not in self._cached:
                break
            shared.append(prefix)
        return shared

    def _prefixes(self, prompt: Prefix) -> list[Prefix]:
        size = self._block_size
        return [prompt[:end] for end in range(size, len(prompt) + 1, size)]

    def _use(self, prefixes: list[Prefix], change: int) -> None:
        for prefix in prefixes:
            self._users[prefix] += change

    def _evict(self, wanted: int) -> None:
        """Free cached blocks, the longest prefixes first, until `wanted` blocks are free."""
        unused = sorted((p for p, users in self._users.items() if users == 0), key=len)
        while unused and len(self._free) < wanted:
            prefix = unused.pop()
            self._free.append(self._cached.pop(prefix))
            del self._users[prefix]


def round_up(tokens: int, multiple: int) -> int:
    """The least multiple of `multiple` that is at least `tokens`."""
    return -(-tokens // multiple) * multiple
