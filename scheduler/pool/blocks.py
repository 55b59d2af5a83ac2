"""What the prefix tree holds in whole blocks of tokens: how gateways index the caches of engines.

The tree's nodes are runs of any length, cut where prompts part. A block is `BLOCK_TOKENS` tokens at
a multiple of that many from the root. It is stored once all of its tokens are in the tree, and
belongs to the node in which it ends.

    root --[ 0 .. 19 ]--+--[ 20 .. 39 ]     blocks 0-15 | 16-31 | not yet whole
                        +--[ 20 .. 33 ]     another 16-31, below the same 0-15

Its hash is of its tokens and the hash of the block before it. Prompts with a salt are nobody else's
to know of: what lies below their roots is not told.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np

from tokenpod.core.messages import BLOCK_TOKENS, BlocksRemoved, BlocksStored, CacheEvents
from tokenpod.scheduler.pool.radix import Node, Tokens

_NUMBER = 8  # bytes


@dataclass(slots=True)
class _Run:
    """Where a node ends, in tokens from the root, and the hashes of the blocks that end in it."""

    end: int
    hashes: list[int]


class BlockLog:
    """Changes of a tree in blocks; begins with all that it holds.

    Args:
        root: of prompts without a salt.
    """

    def __init__(self, root: Node) -> None:
        self._root = root
        self._runs: dict[Node, _Run] = {}
        #: What was told before does not count any more.
        self._cleared = True
        self._changes: list[BlocksStored | BlocksRemoved] = []
        below = [*root.children.values()]
        while below:
            node = below.pop()
            self.added(node)
            below += node.children.values()

    def take(self) -> CacheEvents | None:
        """The changes since the last call; None: there are none."""
        if not self._cleared and not self._changes:
            return None
        events = CacheEvents(self._cleared, self._changes)
        self._cleared, self._changes = False, []
        return events

    # -- what the tree tells -------------------------------------------------------------------

    def added(self, node: Node) -> None:
        """`node` is new, and a leaf."""
        assert node.parent is not None
        start = self._end(node.parent)
        if start is None:
            return
        end = start + len(node.tokens)
        run = self._runs[node] = _Run(end, [])
        first, last = start // BLOCK_TOKENS, end // BLOCK_TOKENS
        if last == first:
            return
        lead = _tail(node.parent, start - first * BLOCK_TOKENS)
        tokens = np.concatenate([*lead, node.tokens[: last * BLOCK_TOKENS - start]])
        parent = before = self._last_hash(node.parent)
        for at in range(0, len(tokens), BLOCK_TOKENS):
            before = _hash(before, tokens[at : at + BLOCK_TOKENS])
            run.hashes.append(before)
        # Who listens knows ids of tokens alone; rows of images have others, and count in the hash.
        self._changes.append(BlocksStored(parent, list(run.hashes), np.maximum(tokens, 0).tolist()))

    def cut(self, node: Node, keep: int) -> None:
        """Of `node`, a leaf, the first `keep` tokens are left; 0: it goes."""
        run = self._runs.get(node)
        if run is None:
            return
        start = run.end - len(node.tokens)
        kept = (start + keep) // BLOCK_TOKENS - start // BLOCK_TOKENS
        if gone := run.hashes[kept:]:
            self._changes.append(BlocksRemoved(gone))
        run.end, run.hashes = start + keep, run.hashes[:kept]
        if not keep:
            del self._runs[node]
        if not self._runs:
            self._cleared, self._changes = True, []

    def split(self, upper: Node, lower: Node) -> None:
        """`lower`'s first tokens are `upper`'s now."""
        run = self._runs.get(lower)
        if run is None:
            return
        middle = run.end - len(lower.tokens)
        start = middle - len(upper.tokens)
        kept = middle // BLOCK_TOKENS - start // BLOCK_TOKENS
        self._runs[upper] = _Run(middle, run.hashes[:kept])
        run.hashes = run.hashes[kept:]

    # -- parts ---------------------------------------------------------------------------------

    def _end(self, node: Node) -> int | None:
        """Where a node ends; None: it is below another root."""
        if node is self._root:
            return 0
        run = self._runs.get(node)
        return None if run is None else run.end

    def _last_hash(self, node: Node) -> int | None:
        """Of the last whole block up to the end of `node`."""
        above: Node | None = node
        while above is not None and above is not self._root:
            if hashes := self._runs[above].hashes:
                return hashes[-1]
            above = above.parent
        return None


def _tail(node: Node, n: int) -> list[Tokens]:
    """The last `n` tokens of the path to `node`, in pieces."""
    pieces: list[Tokens] = []
    above: Node | None = node
    while n:
        assert above is not None
        piece = above.tokens[max(len(above.tokens) - n, 0) :]
        pieces.append(piece)
        n -= len(piece)
        above = above.parent
    return pieces[::-1]


def _hash(before: int | None, tokens: Tokens) -> int:
    digest = hashlib.blake2b(digest_size=_NUMBER)
    digest.update((before or 0).to_bytes(_NUMBER, "little", signed=True))
    digest.update(tokens.astype(np.int32).tobytes())
    return int.from_bytes(digest.digest(), "little", signed=True)
