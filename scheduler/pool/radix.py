"""The prefix tree: keys and values of token prefixes that sequences have in common.

A node owns the slots of a run of tokens; the path from its root is a prefix. A sequence that uses a
path locks it. No step writes to a slot of the tree, so sequences share a path without copies. What
no sequence locks is a cache: its leaves of lowest rank are evicted when slots are needed, to the
host's memory if there is some (`RadixTree.spill`). Each salt (an adapter, a tenant) has a root of
its own.

The rank is when a node was last matched (`lru`), or how many requests have used it (`lfu`). What
was popular once must go in the end: a node's uses are counted on top of the rank of what was
evicted last (LFU with dynamic aging; Arlitt et al., "Evaluating content management techniques for
Web proxy caches", 2000).
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterator
from typing import Protocol

import numpy as np
import numpy.typing as npt

from tokenpod.scheduler.pool.block_keys import Key, root_key
from tokenpod.scheduler.pool.snapshots import Snapshot, SnapshotPool

Tokens = npt.NDArray[np.int32]
Slots = npt.NDArray[np.int64]

_NO_TOKENS = np.empty(0, np.int32)
_NO_SLOTS = np.empty(0, np.int64)


_ledgers = itertools.count(1)


def new_ledger_number() -> int:
    """A number that no ledger has had, for `Node.seen_by`."""
    return next(_ledgers)


class Node:
    """A run of tokens and their slots; `tokens` and `slots` are parallel."""

    __slots__ = (
        "children",
        "kept_until",
        "keys",
        "listed",
        "locks",
        "parent",
        "queued",
        "rank",
        "seen_by",
        "slots",
        "state",
        "tokens",
        "uses",
    )

    def __init__(self, tokens: Tokens, slots: Slots, parent: Node | None) -> None:
        self.tokens = tokens
        self.slots = slots
        self.parent = parent
        self.children: dict[int, Node] = {}
        #: Sequences that use this node or one below it.
        self.locks = 0
        #: The lowest is evicted first; and requests that have used it, if these are counted.
        self.rank = 0
        self.uses = 1
        #: Whether its parent knows it: `match` finds it, and it outlives its last lock.
        self.listed = True
        #: Whether it is in the queue for eviction.
        self.queued = False
        #: The last ledger that counted it, and until which step it is locked there: by each draw.
        self.seen_by = 0
        self.kept_until: list[int] = []
        #: What `spill` notes of it: keys of blocks that end in it, and perhaps of some before it.
        self.keys: list[Key] = []
        #: Of models whose rows keep states: that behind its last token, if there is one.
        self.state: Snapshot | None = None


class Log(Protocol):
    """Notes what changes in a tree."""

    def added(self, node: Node) -> None:
        """A leaf has been added."""

    def split(self, upper: Node, lower: Node) -> None:
        """A node has been cut in two."""

    def cut(self, node: Node, keep: int) -> None:
        """All but the first `keep` tokens of a leaf are evicted."""


class RadixTree:
    """Prefixes by salt.

    Args:
        by_uses: evict by uses, and not by time.
    """

    def __init__(self, *, by_uses: bool = False) -> None:
        #: Tokens in all nodes, and in locked ones.
        self.tokens = 0
        self.locked_tokens = 0
        self._roots: dict[str, Node] = {}
        #: Salts of roots, but that of "": these go with their last prefix and their last lock. They
        #: count locks, too.
        self._salts: dict[Node, str] = {}
        self._unlisted: set[Node] = set()
        #: Tokens that have been evicted since the start.
        self.evicted = 0
        #: (rank, ticket, node): every leaf without locks is queued, once. Changes since then are
        #: noticed when it is taken out.
        self._leaves: list[tuple[int, int, Node]] = []
        self._tickets = itertools.count()
        self._by_uses = by_uses
        #: By time: what matches have; by uses: what was evicted last.
        self._clock = 0
        #: Hears of what is added and removed; None: nobody asks.
        self.log: Log | None = None
        #: Called with a leaf and how many of its tokens stay, before the others are evicted.
        self.spill: Callable[[Node, int], None] | None = None
        #: What nodes' states are of; None: there are none.
        self.snapshots: SnapshotPool | None = None

    @property
    def evictable(self) -> int:
        """Tokens that no sequence uses."""
        return self.tokens - self.locked_tokens

    def match(self, tokens: Tokens, salt: str = "") -> tuple[Node, int]:
        """The node that ends the longest known prefix of `tokens`, and that prefix's length."""
        self._clock += not self._by_uses
        node, at = self.root(salt), 0
        while at < len(tokens):
            child = node.children.get(int(tokens[at]))
            if child is None:
                break
            common = _common_prefix(child.tokens, tokens[at:])
            if common < len(child.tokens):
                child = self._split(child, common)
            if not self._by_uses:
                child.rank = self._clock
            node = child
            at += common
        return node, at

    def root(self, salt: str = "") -> Node:
        """Where the prompts of a salt begin."""
        node = self._roots.get(salt)
        if node is None:
            node = self._roots[salt] = Node(_NO_TOKENS, _NO_SLOTS, None)
            node.keys = [root_key(salt)]
            if salt:
                self._salts[node] = salt
        return node

    def known(self, tokens: Tokens, salt: str = "") -> int:
        """The length of the longest known prefix; unlike `match` it changes nothing."""
        node, at = self._roots.get(salt), 0
        while node is not None and at < len(tokens):
            node = node.children.get(int(tokens[at]))
            if node is not None:
                common = _common_prefix(node.tokens, tokens[at:])
                at += common
                if common < len(node.tokens):
                    break
        return at

    def ends(self, tokens: Tokens, salt: str = "") -> Iterator[tuple[Node, int]]:
        """The nodes whose tokens are all of a prefix of `tokens`, and where they end in it."""
        node, at = self._roots.get(salt), 0
        while node is not None and at < len(tokens):
            node = node.children.get(int(tokens[at]))
            if node is None or _common_prefix(node.tokens, tokens[at:]) < len(node.tokens):
                return
            at += len(node.tokens)
            yield node, at

    def append(self, node: Node, tokens: Tokens, slots: Slots) -> Node:
        """Add `tokens` below `node`; no child there may begin with the same token."""
        if not len(tokens):
            return node
        assert int(tokens[0]) not in node.children, "the tree has this prefix already"
        child = Node(tokens.copy(), slots.copy(), node)
        child.rank = self._clock + self._by_uses
        node.children[int(tokens[0])] = child
        self.tokens += len(tokens)
        self._queue_leaf(child)
        if self.log is not None:
            self.log.added(child)
        return child

    def hang_unlisted(self, node: Node, tokens: Tokens, slots: Slots) -> Node:
        """A node below `node` that `match` does not find: the tree has its tokens already.

        It must be locked at once, and goes with its last lock.
        """
        child = Node(tokens.copy(), slots.copy(), node)
        child.listed = False
        self._unlisted.add(child)
        self.tokens += len(tokens)
        return child

    def use(self, node: Node) -> None:
        """A request has used the path to `node`."""
        if self._by_uses:
            for each in path(node):
                each.uses += 1
                each.rank = self._clock + each.uses

    def lock(self, node: Node) -> None:
        """Protect the path to `node`, and its root."""
        self._root_of(node).locks += 1
        for each in path(node):
            if each.locks == 0:
                self.locked_tokens += len(each.tokens)
            each.locks += 1

    def unlock(self, node: Node) -> Slots:
        """Undo one `lock`; the slots of an unlisted node that went with its last lock."""
        for each in path(node):
            each.locks -= 1
            assert each.locks >= 0, "unlocked more often than locked"
            if each.locks == 0:
                self.locked_tokens -= len(each.tokens)
                self._queue_leaf(each)
        root = self._root_of(node)
        root.locks -= 1
        self._forget_root(root)
        if node.listed or node.locks:
            return _NO_SLOTS
        self._unlisted.remove(node)
        self.tokens -= len(node.tokens)
        return node.slots

    def slots(self, node: Node) -> Slots:
        """The slots of the path to `node`, by position."""
        runs = [each.slots for each in path(node)]
        return np.concatenate(runs[::-1]) if runs else _NO_SLOTS

    def unlocked(self, node: Node, n: int) -> list[Node]:
        """The nodes that hold the last `n` tokens of a path, in order; none if any is locked."""
        found: list[Node] = []
        for each in path(node):
            if n <= 0 or each.locks:
                break
            found.append(each)
            n -= len(each.tokens)
        return [] if n > 0 else found[::-1]

    def exchange(self, nodes: list[Node], slots: Slots) -> Slots:
        """Give the tokens of these nodes, in order, other slots; the old ones."""
        old, at = np.concatenate([node.slots for node in nodes]), 0
        for node in nodes:
            node.slots = slots[at : at + len(node.slots)].copy()
            at += len(node.slots)
        assert at == len(slots)
        return old

    def evict(self, n: int) -> list[Slots]:
        """Remove at least `n` tokens, or all that no sequence uses; their slots."""
        freed: list[Slots] = []
        while self._leaves and n > 0:
            rank, _, leaf = heapq.heappop(self._leaves)
            leaf.queued = False
            if leaf.rank != rank:
                self._queue_leaf(leaf)
                continue
            parent = leaf.parent
            if leaf.children or leaf.locks or parent is None:
                # It is queued again when its last child or lock is gone.
                continue
            keep = max(len(leaf.tokens) - n, 0)
            self.evicted += len(leaf.tokens) - keep
            if self._by_uses:
                self._clock = max(self._clock, rank)
            if self.log is not None:
                self.log.cut(leaf, keep)
            if self.spill is not None:
                self.spill(leaf, keep)
            if leaf.state is not None and self.snapshots is not None:
                self.snapshots.drop(leaf.state)
            freed.append(leaf.slots[keep:])
            n -= len(leaf.tokens) - keep
            self.tokens -= len(leaf.tokens) - keep
            if keep:
                leaf.tokens, leaf.slots = leaf.tokens[:keep].copy(), leaf.slots[:keep].copy()
                self._queue_leaf(leaf)
            else:
                del parent.children[int(leaf.tokens[0])]
                self._queue_leaf(parent)
                self._forget_root(parent)
        return freed

    def nodes(self) -> Iterator[Node]:
        """Every node that holds tokens."""
        stack = [child for root in self._roots.values() for child in root.children.values()]
        stack += self._unlisted
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def check(self) -> None:
        """Raise AssertionError unless the counts of tokens are right."""
        nodes = [*self.nodes()]
        held = sum(len(node.slots) for node in nodes)
        assert held == self.tokens, (held, self.tokens)
        locked = sum(len(node.tokens) for node in nodes if node.locks)
        assert locked == self.locked_tokens, (locked, self.locked_tokens)

    def _root_of(self, node: Node) -> Node:
        while node.parent is not None:
            node = node.parent
        return node

    def _forget_root(self, node: Node) -> None:
        """Of a salt, if nobody knows or uses anything of it."""
        if node.parent is None and not (node.children or node.locks):
            salt = self._salts.pop(node, None)
            if salt is not None:
                del self._roots[salt]

    def _queue_leaf(self, node: Node) -> None:
        """Queue a node for eviction if it is a leaf without locks."""
        evictable = node.listed and not node.locks and not node.children
        if evictable and not node.queued and node.parent is not None:
            node.queued = True
            heapq.heappush(self._leaves, (node.rank, next(self._tickets), node))

    def _split(self, node: Node, at: int) -> Node:
        """Cut `node` in two; the new upper part. Those who locked `node` keep the lower end."""
        assert node.parent is not None
        # Copies: a view would keep all of the old run in memory after the other half is evicted.
        upper = Node(node.tokens[:at].copy(), node.slots[:at].copy(), node.parent)
        upper.locks, upper.rank, upper.uses = node.locks, node.rank, node.uses
        upper.seen_by, upper.kept_until = node.seen_by, node.kept_until
        node.parent.children[int(node.tokens[0])] = upper
        node.tokens, node.slots = node.tokens[at:].copy(), node.slots[at:].copy()
        node.parent = upper
        upper.children[int(node.tokens[0])] = node
        if self.log is not None:
            self.log.split(upper, node)
        return upper


def path(node: Node) -> Iterator[Node]:
    """From `node` up to, but without, its root."""
    while node.parent is not None:
        yield node
        node = node.parent


def _common_prefix(a: Tokens, b: Tokens) -> int:
    n = min(len(a), len(b))
    differ = np.flatnonzero(a[:n] != b[:n])
    return int(differ[0]) if len(differ) else n
