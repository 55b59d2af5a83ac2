"""Prompts that begin behind snapshots of states: where, and what becomes of the snapshots."""

from __future__ import annotations

import random

import pytest

from support.engines.scheduler_driver import Driver, request
from support.examples import ALL
from tokenpod.scheduler.policies.by_name import ADMISSIONS
from tokenpod.scheduler.sequences.work import SnapshotLimits

ROWS = 4


def driver(total=8, *, least=2, stride=100, per_path=8, prefill=40, rows=ROWS, **more):
    limits = {"slots": 300, "max_rows": rows, "prefill_tokens": prefill, **more}
    snapshots = SnapshotLimits(total, rows + 1, least, stride, per_path) if total else None
    return Driver(sharing=False, snapshots=snapshots, **limits)


def cached(made, number, prompt, new=1, **more):
    """How many tokens of a prompt need not be computed; the request is answered."""
    made.submit(request(number, prompt, max_new_tokens=new, **more))
    (sequence,) = [s for s in made.scheduler._sequences.values() if s.id == number]
    made.run()
    return sequence.cached


TEXT = list(range(1, 41))


def test_the_same_prompt_computes_its_last_token_alone():
    made = driver()
    assert cached(made, 1, TEXT) == 0
    assert cached(made, 2, TEXT) == len(TEXT) - 1
    assert made.executor.begun == 1


def test_who_goes_on_from_an_answer_computes_what_is_new():
    made = driver()
    made.executor.choose = lambda sequence, index: 70 + index
    assert cached(made, 1, TEXT, new=6) == 0
    said = TEXT + [70 + i for i in range(6)]
    # The last token has been sampled, and nothing computed behind it.
    assert cached(made, 2, [*said, 5, 6, 7]) == len(said) - 1


def test_an_overlapped_step_more_is_part_of_the_state():
    made = driver(overlap=True)
    made.executor.choose = lambda sequence, index: 9 if index == 4 else 70 + index
    assert cached(made, 1, TEXT, new=60, eos_token_ids=frozenset({9})) == 0
    said = [*TEXT, 70, 71, 72, 73, 9]
    assert cached(made, 2, [*said, 5, 6, 7]) == len(said)


def test_the_second_that_leaves_a_prefix_makes_a_snapshot_there_for_the_third():
    made = driver()
    assert cached(made, 1, [*TEXT, 50, 51, 52]) == 0
    assert cached(made, 2, [*TEXT, 60, 61, 62]) == 0
    assert cached(made, 3, [*TEXT, 70, 71, 72]) == len(TEXT)


def test_it_is_there_before_the_second_has_ended():
    made = driver()
    cached(made, 1, [*TEXT, 50, 51, 52])
    made.submit(request(2, [*TEXT, 60, 61, 62], max_new_tokens=100))
    for _ in range(6):
        made.turn()
    assert cached(made, 3, [*TEXT, 70, 71, 72]) == len(TEXT)


def test_a_long_prompt_has_snapshots_along_it():
    made = driver(prefill=8, stride=10)
    assert cached(made, 1, TEXT) == 0
    # At the ends of steps' pieces: 16, 32.
    assert cached(made, 2, [*TEXT[:35], 60, 61]) == 32


def test_none_is_made_close_behind_another():
    made = driver(least=20)
    assert cached(made, 1, TEXT[:10]) == 0
    assert cached(made, 2, TEXT[:10]) == 0
    assert cached(made, 3, TEXT) == 0
    assert cached(made, 4, TEXT) == len(TEXT) - 1


def test_what_was_used_longest_ago_makes_room():
    made = driver(total=2)
    for number, first in enumerate((100, 200, 300)):
        cached(made, number, [first, *TEXT])
    assert cached(made, 3, [100, *TEXT]) == 0
    assert cached(made, 4, [300, *TEXT]) == len(TEXT)


def test_a_prefix_has_few():
    made = driver(prefill=4, stride=4, per_path=3, total=20)
    cached(made, 1, TEXT)
    held = [node for node in made.scheduler.kv.tree.nodes() if node.state is not None]
    assert len(held) == 3


def test_salts_have_their_own():
    made = driver()
    assert cached(made, 1, TEXT) == 0
    assert cached(made, 2, TEXT, salt="tenant") == 0


def test_without_snapshots_nothing_is_cached():
    made = driver(total=0)
    assert cached(made, 1, TEXT) == 0
    assert cached(made, 2, TEXT) == 0


def test_without_prefix_caching_nothing_is_cached():
    made = driver(prefix_caching=False)
    assert cached(made, 1, TEXT) == 0
    assert cached(made, 2, TEXT) == 0


def test_evicted_prefixes_take_their_snapshots_along():
    made = driver()
    cached(made, 1, TEXT)
    made.scheduler.flush_cache()
    made.scheduler.check()
    assert cached(made, 2, TEXT) == 0


def test_scored_prompts_are_computed_whole():
    made = driver()
    cached(made, 1, TEXT)
    assert cached(made, 2, TEXT, prompt_logprobs=True) == 0


def test_a_preempted_sequence_goes_on_where_it_was():
    made = driver()
    made.submit(request(1, TEXT, max_new_tokens=20))
    for _ in range(8):
        made.turn()
    before = made.executor.begun
    made.preempt(1)
    made.run()
    assert made.executor.begun == before + 1


def soak(seed, turns=150):
    chance = random.Random(seed)
    nan = chance.choice([0.0, 0.0, 0.02])
    made = driver(
        chance.randint(1, 12),
        least=chance.choice([1, 2, 6]),
        stride=chance.choice([2, 5, 100]),
        per_path=chance.choice([1, 3, 8]),
        prefill=chance.choice([2, 4, 8, 30]),
        rows=chance.randint(2, 12),
        slots=chance.randint(36, 120),
        overlap=chance.random() < 0.5,
        choose=lambda sequence, index: -1 if chance.random() < nan else chance.choice((1, 2)),
        admission=ADMISSIONS[chance.choice(["exact", "exact", *ADMISSIONS])],
    )
    texts = [[1] * 30, [1, 2] * 15, [2, 2, 1] * 10]
    ids = op = 0
    for _ in range(turns):
        made.now += 1
        while made.scheduler.load().waiting < 3:
            ids += 1
            prompt = chance.choice(texts)[: chance.randint(1, 24)]
            new = chance.choice([1, 2, 5, 11])
            made.submit(request(ids, prompt, max_new_tokens=new))
        alive = [i for i, s in made.sequences.items() if not s.ended]
        if chance.random() < 0.1:
            made.abort(*chance.sample(alive, min(len(alive), 2)))
        if chance.random() < 0.15:
            made.preempt(*chance.sample(alive, min(len(alive), 2)))
        if chance.random() < 0.2:
            held = [i for i in alive if made.sequences[i].held and not made.sequences[i].ended]
            ids, op = ids + 1, op + 1
            start = [request(ids, chance.choice(texts)[: chance.randint(1, 14)], max_new_tokens=6)]
            made.advance(op, start, chunks=[chance.choice([0, 3])], resume=held)
        made.turn()
    made.drain()
    return made


@pytest.mark.compute
@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (20, 40, 60, 80))]
)
def test_no_row_ever_has_anothers_state_and_nothing_is_lost(seed):
    lives = [soak(each) for each in range(seed, seed + (20 if ALL else 4))]
    assert sum(life.executor.begun for life in lives) > 10 * len(lives)
