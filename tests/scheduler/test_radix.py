import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.examples import examples
from tokenpod.scheduler.pool.radix import RadixTree


def tokens(text):
    return np.frombuffer(text.encode(), np.uint8).astype(np.int32)


@pytest.fixture
def tree():
    return RadixTree()


def insert(tree, text, first_slot, salt=""):
    node, known = tree.match(tokens(text), salt)
    slots = np.arange(first_slot, first_slot + len(text) - known)
    return tree.append(node, tokens(text)[known:], slots)


def evicted(tree, n):
    return [int(slot) for slots in tree.evict(n) for slot in slots]


def test_the_longest_prefix_is_found(tree):
    insert(tree, "hello world", 0)
    _, length = tree.match(tokens("hello there"))
    assert length == 6


def test_a_node_is_split_where_two_prompts_part(tree):
    insert(tree, "hello world", 0)
    node = insert(tree, "hello there", 100)
    assert tree.slots(node).tolist() == [*range(6), *range(100, 105)]
    assert tree.tokens == 16


def test_a_split_keeps_the_locks_of_both_parts(tree):
    node = insert(tree, "abcdef", 0)
    tree.lock(node)
    tree.match(tokens("abc"))
    assert tree.evictable == 0
    assert tree.slots(node).tolist() == [0, 1, 2, 3, 4, 5]
    tree.unlock(node)
    assert tree.evictable == 6


def test_salts_share_nothing(tree):
    insert(tree, "abc", 0, salt="one")
    assert tree.match(tokens("abc"), "two")[1] == 0
    assert tree.match(tokens("abc"), "one")[1] == 3


def test_the_least_recently_used_leaf_goes_first(tree):
    insert(tree, "aaa", 0)
    insert(tree, "bbb", 10)
    tree.match(tokens("aaa"))
    freed = np.concatenate(tree.evict(3))
    assert sorted(freed) == [10, 11, 12]
    assert tree.match(tokens("aaa"))[1] == 3


def test_only_as_much_of_a_leaf_goes_as_is_needed(tree):
    insert(tree, "abcdef", 0)
    assert [slots.tolist() for slots in tree.evict(2)] == [[4, 5]]
    assert tree.match(tokens("abcdef"))[1] == 4


def test_a_locked_path_is_never_evicted(tree):
    node = insert(tree, "abcd", 0)
    insert(tree, "abXY", 10)
    tree.lock(node)
    freed = np.concatenate(tree.evict(100))
    assert sorted(freed) == [12, 13] or sorted(freed) == [10, 11]
    assert tree.match(tokens("abcd"))[1] == 4
    assert tree.match(tokens("abXY"))[1] == 2


def test_a_parent_can_go_once_its_children_are_gone(tree):
    insert(tree, "abcd", 0)
    insert(tree, "abXY", 10)
    tree.evict(100)
    assert tree.tokens == 0
    assert list(tree.nodes()) == []


def test_a_prefix_is_never_there_twice(tree):
    node = insert(tree, "a", 0)
    tree.append(node, tokens("bc"), np.array([1, 2]))
    with pytest.raises(AssertionError, match="already"):
        tree.append(node, tokens("bd"), np.array([3, 4]))


def test_eviction_looks_at_no_more_than_it_evicts(tree, monkeypatch):
    # With a full cache every decoding sequence asks for one slot a step: a walk would be the step.
    for first in range(20):
        insert(tree, chr(ord("a") + first) * 3, 10 * first)
    monkeypatch.setattr(tree, "nodes", None)
    freed = [int(slots[0]) for _ in range(60) for slots in tree.evict(1)]
    assert freed == [10 * first + at for first in range(20) for at in (2, 1, 0)]
    assert tree.evict(1) == []


def test_by_uses_the_popular_outlive_the_recent():
    tree = RadixTree(by_uses=True)
    popular = insert(tree, "abc", 0)
    tree.use(popular)
    insert(tree, "xyz", 10)
    tree.match(tokens("xyz"))  # a look is no use
    assert evicted(tree, 3) == [10, 11, 12]
    assert tree.match(tokens("abc"))[1] == 3
    assert tree.evicted == 3


def test_by_uses_what_was_popular_once_goes_in_the_end():
    tree = RadixTree(by_uses=True)
    popular = insert(tree, "abc", 0)
    for _ in range(3):
        tree.use(popular)
    gone = []
    for at, letter in enumerate("defgh"):
        tree.use(insert(tree, letter, 10 * (at + 1)))
        gone += evicted(tree, 1)
    assert 2 in gone


def test_parts_of_a_split_have_been_used_as_often():
    tree = RadixTree(by_uses=True)
    tree.use(insert(tree, "abcd", 0))
    node, _ = tree.match(tokens("abX"))
    assert node.uses == 2
    assert {each.rank for each in tree.nodes()} == {2}


def test_a_salt_is_forgotten_with_its_last_prefix_and_its_last_lock():
    tree = RadixTree()
    root, _ = tree.match(tokens("ab"), "tenant")
    tree.lock(root)
    assert tree.root("tenant") is root
    end = tree.append(root, tokens("ab"), np.arange(2))
    tree.evict(2)
    assert tree.root("tenant") is root, "somebody goes on from there"
    end = tree.append(root, tokens("ab"), np.arange(2))
    tree.lock(end)
    tree.unlock(root)
    tree.unlock(end)
    assert tree.match(tokens("ab"), "tenant") == (end, 2)
    tree.evict(2)
    assert "tenant" not in tree._roots
    assert not tree._salts


@settings(derandomize=True, deadline=None, max_examples=examples(60))
@given(st.data())
def test_leaves_go_in_the_order_of_their_last_use_whatever_happened_between(data):
    tree = RadixTree()
    locked = []
    for step in range(40):
        match data.draw(st.sampled_from(["insert", "match", "lock", "unlock", "evict"])):
            case "insert":
                text = data.draw(st.text("ab", min_size=1, max_size=5))
                insert(tree, text, 100 * step)
            case "match":
                tree.match(tokens(data.draw(st.text("ab", min_size=1, max_size=5))))
            case "lock":
                locked.append(tree.match(tokens(data.draw(st.text("ab", max_size=5))))[0])
                tree.lock(locked[-1])
            case "unlock" if locked:
                tree.unlock(locked.pop(data.draw(st.integers(0, len(locked) - 1))))
            case "evict" if tree.evictable:
                leaves = [n for n in tree.nodes() if not n.children and not n.locks]
                used_at = {int(slot): leaf.rank for leaf in leaves for slot in leaf.slots}
                (freed,) = tree.evict(1)
                assert used_at[int(freed[0])] == min(used_at.values())
    for node in locked:
        tree.unlock(node)
    tree.evict(tree.evictable)
    assert tree.tokens == 0
    assert list(tree.nodes()) == []
