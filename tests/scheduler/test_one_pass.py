"""Admission in one pass decides as asking for each request anew, in its turn, would.

The reference sums what each sequence holds step by step, slot sets and all, and knows nothing of
entries, columns or halving.
"""

from __future__ import annotations

import random
from itertools import count

import pytest

from support.engines.scheduler_driver import Driver, request


def path(sequence):
    node = sequence.node
    while node is not None and node.parent is not None:
        yield node
        node = node.parent


def reference_peak(driver, extra):
    """The most slots ever held: those with a row, then requests `extra` (lists of samples)."""
    scheduler = driver.scheduler
    batcher, routed = scheduler._batcher, scheduler._routed
    quantum, line, spans = scheduler._batching.quantum, 0, []
    nodes = {}

    def hold(sequence, held, left, end):
        spans.append((held, left, end))
        for node in path(sequence):
            nodes[node] = max(nodes.get(node, 0), end)

    def in_line(sequence, need):
        nonlocal line
        line += need
        growth = sequence.bound - sequence.needed
        end = -(-line // quantum) + 3 + growth + 1
        hold(sequence, sequence.private + need, growth, end)
        return end

    def follow(first, siblings):
        ends = [in_line(sibling, 1) for sibling in siblings]
        if ends:
            spans.append((first.needed - first.shared, 0, ends[-1]))
            for node in path(first):
                nodes[node] = max(nodes[node], ends[-1])

    def own(sequence):
        """What it holds alone: its prompt is its siblings' too."""
        siblings = sequence.id in batcher._siblings
        return sequence.private - (sequence.needed - sequence.shared if siblings else 0)

    for sequence in [*batcher._leaving.values(), *batcher._vacating.values()]:
        hold(sequence, sequence.private, 0, 2)
    for sequence in batcher._decoding:
        left = sequence.bound - sequence.computed
        hold(sequence, own(sequence), left, left + 1)
    for sequence in batcher._ready:
        in_line(sequence, sequence.needed - sequence.computed)
    for first, siblings in batcher._siblings.items():
        computed = batcher._decoding.get(first) or batcher._vacating.get(first)
        if computed is not None:
            follow(computed, siblings)
    waiting = [[s, *batcher._siblings.get(s.id, ())] for s in batcher._prefilling]
    frozen = list(routed.admitted.values())
    for samples in extra:
        if samples[0].owner.name == "ROUTER":
            frozen += samples
        else:
            waiting.append(samples)
    for first, *siblings in waiting:
        end = in_line(first, first.needed - first.computed)
        if siblings:
            spans[-1] = (spans[-1][0] - (first.needed - first.shared), *spans[-1][1:])
            assert end == spans[-1][2]
        follow(first, siblings)
    for_ever = 1 << 30
    for sequence in frozen:
        hold(sequence, sequence.bound - sequence.shared, 0, for_ever)
    spans += [(len(node.tokens), 0, end) for node, end in nodes.items()]
    moments = {end for _, _, end in spans}
    return max(
        (sum(h + min(rest, t) for h, rest, e in spans if e >= t) for t in moments), default=0
    )


def reference_count(driver):
    """How many requests are let in if each is asked for in its turn."""
    scheduler = driver.scheduler
    line, rows, taken = scheduler._queue._waiting, scheduler._rows.free, []
    for *_, samples in line:
        rows -= len(samples)
        if rows < 0:
            break
        scheduler.kv.begin(samples[0])
        taken.append(samples)
        if reference_peak(driver, taken) > scheduler.limits.slots:
            break
    fits = len(taken)
    if taken and reference_peak(driver, taken) > scheduler.limits.slots:
        fits -= 1
    for samples in reversed(taken):
        scheduler.kv.withdraw(samples[0])
    return fits


@pytest.mark.compute
@pytest.mark.parametrize("seed", [0, *(pytest.param(x, marks=pytest.mark.slow) for x in (1, 2, 3))])
def test_as_many_are_let_in_as_when_each_is_asked_for_in_its_turn(seed):
    chance, ids = random.Random(seed), count(1)
    driver = Driver(
        slots=chance.choice([60, 300, 1000]),
        max_rows=chance.choice([4, 16]),
        prefill_tokens=chance.choice([8, 64]),
        overlap=seed % 2 == 0,
    )
    queue, decisions = driver.scheduler._queue, []
    admit = queue.admit

    def compared(*asked):
        full = queue._fitted == 0
        wanted = 0 if full else reference_count(driver)
        before = len(queue)
        admit(*asked)
        assert before - len(queue) == wanted
        if before and not full:
            decisions.append((wanted, before))

    queue.admit = compared
    held = []
    for _ in range(60):
        for _ in range(chance.choice([0, 0, 1, 5, 20])):
            prompt = [chance.randint(1, 2)] * chance.randint(1, 12)
            new = chance.randint(1, 20)
            if chance.random() < 0.15:
                held.append(next(ids))
                failure = driver.advance(next(ids), [request(held[-1], prompt, max_new_tokens=new)])
                if failure:
                    held.pop()
            else:
                samples = [next(ids) for _ in range(chance.choice([1, 1, 1, 3]))]
                driver.submit(request(samples, prompt, max_new_tokens=new))
        if chance.random() < 0.1:
            driver.preempt(*(i for i, s in driver.sequences.items() if chance.random() < 0.3))
        if chance.random() < 0.1:
            driver.abort(chance.randint(1, next(ids)))
        for _ in range(chance.randint(1, 6)):
            driver.turn()
        if held and chance.random() < 0.5:
            driver.abort(held.pop(0))
    driver.drain()
    assert any(wanted > 1 for wanted, _ in decisions)
    assert any(0 < wanted < line for wanted, line in decisions)
