"""The prefix cache told in blocks: whoever listens knows what the tree holds, whatever happens."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.examples import examples
from tokenpod.core.messages import BLOCK_TOKENS, BlocksStored, CacheEvents
from tokenpod.scheduler.pool.blocks import BlockLog
from tokenpod.scheduler.pool.radix import Node, RadixTree

Prompt = tuple[int, ...]


class Listener:
    """A gateway's index: the tokens of each known block and of all before it, by its hash."""

    def __init__(self) -> None:
        self.prompts: dict[int, Prompt] = {}

    def hear(self, events: CacheEvents | None) -> None:
        if events is None:
            return
        if events.cleared:
            self.prompts.clear()
        for change in events.changes:
            if not isinstance(change, BlocksStored):
                for each in change.hashes:
                    del self.prompts[each]
                continue
            assert len(change.tokens) == BLOCK_TOKENS * len(change.hashes)
            before = () if change.parent is None else self.prompts[change.parent]
            for at, each in enumerate(change.hashes):
                before += tuple(change.tokens[at * BLOCK_TOKENS : (at + 1) * BLOCK_TOKENS])
                assert each not in self.prompts, "a block is stored once"
                self.prompts[each] = before


def held(root: Node) -> Iterator[Prompt]:
    """Every prefix of whole blocks that a tree holds, once."""
    stack: list[tuple[Node, Prompt]] = [(node, ()) for node in root.children.values()]
    while stack:
        node, before = stack.pop()
        tokens = (*before, *map(int, node.tokens))
        first, last = len(before) // BLOCK_TOKENS, len(tokens) // BLOCK_TOKENS
        yield from (tokens[: BLOCK_TOKENS * end] for end in range(first + 1, last + 1))
        stack += [(child, tokens) for child in node.children.values()]


def insert(tree: RadixTree, prompt: Prompt, salt: str = "") -> None:
    tokens = np.array(prompt, np.int32)
    node, known = tree.match(tokens, salt)
    slots = np.arange(len(prompt) - known, dtype=np.int64)
    tree.append(node, tokens[known:], slots)


def agrees(listener: Listener, tree: RadixTree) -> None:
    assert tree.log is not None
    listener.hear(tree.log.take())
    assert sorted(listener.prompts.values()) == sorted(held(tree.root()))


#: Prompts of few different tokens in long runs, so that they part anywhere.
PROMPTS = st.lists(st.tuples(st.integers(0, 2), st.integers(1, 40)), min_size=1, max_size=5).map(
    lambda runs: tuple(token for token, length in runs for _ in range(length))
)
ACTS = st.lists(
    st.tuples(st.just("insert"), PROMPTS)
    | st.tuples(st.just("salted"), PROMPTS)
    | st.tuples(st.just("evict"), st.integers(1, 60))
    | st.tuples(st.just("watch"), st.none()),
    max_size=14,
)


@settings(max_examples=examples(150), deadline=None)
@given(ACTS)
def test_who_listens_knows_what_the_tree_holds(acts: list[tuple[str, object]]) -> None:
    tree, listener = RadixTree(), Listener()
    tree.log = BlockLog(tree.root())
    for act, value in acts:
        if act == "evict":
            tree.evict(value)  # type: ignore[arg-type]
        elif act == "watch":
            tree.log = BlockLog(tree.root())
        else:
            insert(tree, value, "mine" if act == "salted" else "")  # type: ignore[arg-type]
        agrees(listener, tree)


def test_an_empty_cache_is_told_as_cleared() -> None:
    tree = RadixTree()
    insert(tree, (1,) * 40)
    tree.log = BlockLog(tree.root())
    listener = Listener()
    agrees(listener, tree)
    assert len(listener.prompts) == 2
    tree.evict(tree.tokens)
    events = tree.log.take()
    assert events == CacheEvents(cleared=True, changes=[])


@pytest.mark.parametrize("cut", [10, 16, 20])
def test_the_same_prompt_has_the_same_hashes_however_it_is_cut(cut: int) -> None:
    prompt = tuple(range(50))
    whole, parted = RadixTree(), RadixTree()
    insert(whole, prompt)
    for each in (prompt[:cut], (*prompt[:cut], 99), prompt):
        insert(parted, each)
    known = []
    for tree in (whole, parted):
        tree.log = BlockLog(tree.root())
        listener = Listener()
        listener.hear(tree.log.take())
        known.append({tokens: each for each, tokens in listener.prompts.items()})
    assert known[0].items() <= known[1].items()
    assert len(known[0]) == 3
