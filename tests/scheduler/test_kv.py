import random

import numpy as np

from support.engines.scheduler_driver import Driver, request
from tokenpod.scheduler.kv.kv import KV
from tokenpod.scheduler.policies.exact import Exact
from tokenpod.scheduler.policies.ledger import Ledger
from tokenpod.scheduler.policies.peak import FOREVER
from tokenpod.scheduler.sequences.sequence import Sequence
from tokenpod.scheduler.sequences.work import Limits


def begun(kv, sequence_id, prompt, **options):
    asked = request(sequence_id, prompt, **options)
    sequence = Sequence(asked, 0, np.array(prompt, np.int32), kv.table)
    kv.begin(sequence)
    return sequence


def compute(kv, sequence, n):
    slots = kv.extend(sequence, n)
    sequence.computed += n
    return slots


def test_a_sequence_that_grows_token_by_token_stays_one_run():
    kv = KV(100)
    one, two = begun(kv, 1, [1] * 10), begun(kv, 2, [2] * 10)
    slots = [compute(kv, one, 10)]
    compute(kv, two, 10)
    slots += [compute(kv, one, 1) for _ in range(3)]
    assert np.diff(np.concatenate(slots)).tolist() == [1] * 12


def test_a_shared_prompt_is_found_up_to_its_last_token():
    kv = KV(100)
    one = begun(kv, 1, [1] * 10)
    slots = compute(kv, one, 10)
    kv.publish_inputs(one, awaited=False)
    two = begun(kv, 2, [1] * 10)
    assert two.cached == 9
    assert kv.prefix_slots(two).tolist() == slots[:9].tolist()
    kv.check([one, two])


def test_who_computed_the_same_prompt_second_keeps_its_own_slots():
    kv = KV(100)
    one, two = begun(kv, 1, [1] * 10), begun(kv, 2, [1] * 10)
    for sequence in (one, two):
        compute(kv, sequence, 10)
        kv.publish_inputs(sequence, awaited=False)
    assert (one.private, two.private) == (0, 10)
    kv.release(one)
    # Its copy is a mere cache now: the second one does not hold on to it.
    assert kv.tree.evictable == 10
    kv.release(two)
    assert kv.free == 90
    kv.check([])


def test_without_a_cache_only_the_samples_of_a_request_share_their_prompt():
    driver = Driver(slots=100, max_rows=4, prefill_tokens=32, prefix_caching=False)
    driver.submit(request([1, 2, 3], [5] * 30, max_new_tokens=4))
    driver.turn()
    driver.turn()
    kv = driver.scheduler.kv
    assert kv.tree.tokens == 29
    driver.run()
    assert (kv.tree.tokens, kv.free) == (0, kv.total)
    driver.submit(request(4, [5] * 30))
    driver.turn()
    assert driver.planned() == {4: 30}
    driver.drain()


def test_the_cache_gives_way_to_who_needs_the_slots():
    kv = KV(20)
    one = begun(kv, 1, [1] * 10)
    compute(kv, one, 10)
    kv.release(one)
    assert (kv.free, kv.available) == (10, 20)
    two = begun(kv, 2, [2] * 15)
    assert len(compute(kv, two, 15)) == 15
    # Room for its outputs too, so that they lie together.
    assert kv.tree.match(one.inputs)[1] == 20 - two.bound
    kv.check([two])


def ledger_of(kv):
    return Ledger(Exact(kv.table, Limits(100, 8, 100, prefill_tokens=8), quantum=8), kv.tree)


def test_the_forecast_counts_a_shared_prefix_once():
    kv = KV(100)
    one = begun(kv, 1, [1] * 10, max_new_tokens=5)
    compute(kv, one, 10)
    kv.publish_inputs(one, awaited=False)
    two = begun(kv, 2, [1] * 10, max_new_tokens=5)
    compute(kv, two, 1)
    forecast = ledger_of(kv)
    forecast.decoding([one, two], np.array([one.place, two.place]))
    # The prompt, the last prompt token of the second again, and what is to come but for the last
    # tokens: these are never processed.
    assert forecast.peak() == 10 + 1 + 4 + 4


def test_a_frozen_sequence_counts_with_all_it_holds_and_may_come_to_hold():
    kv = KV(100)
    one, two = begun(kv, 1, [1] * 10), begun(kv, 2, [1] * 10)
    for sequence in (one, two):
        compute(kv, sequence, 10)
        kv.publish_inputs(sequence, awaited=False)
    forecast = ledger_of(kv)
    forecast.reserved(one)
    forecast.reserved(two)
    assert forecast.peak() == one.bound + two.bound
    assert forecast.peak() < FOREVER


def test_long_lives_of_many_leave_nothing_behind():
    driver = Driver(slots=64, max_rows=6, prefill_tokens=8, overlap=True)
    for sequence_id in range(1, 40):
        prompt = [sequence_id % 3] * (1 + sequence_id % 17)
        driver.submit(request(sequence_id, prompt, max_new_tokens=1 + sequence_id % 11))
    driver.drain()
    assert all(len(driver.outputs(i)) == 1 + i % 11 for i in range(1, 40))


def two_samples(kv, prompt, **options):
    """The first of two samples, begun, and the other, which waits for it."""
    both = request([1, 2], prompt, **options)
    first, sibling = (
        Sequence(both, i, np.array(both.prompt, np.int32), kv.table) for i in range(2)
    )
    kv.begin(first)
    return first, sibling


def test_the_forecast_counts_an_awaited_prompt_once_until_the_last_sample_is_over():
    kv = KV(100)
    first, sibling = two_samples(kv, [1] * 10, max_new_tokens=4)
    forecast = ledger_of(kv)
    forecast.prefilling(first)
    forecast.siblings(first, [sibling])
    assert forecast.peak() == 10 + 3 + (1 + 3)


def test_samples_share_their_own_copy_of_a_prompt_that_another_brought_meanwhile():
    kv = KV(40)
    first, sibling = two_samples(kv, [1] * 10, max_new_tokens=4)
    other = begun(kv, 3, [1] * 10, max_new_tokens=4)
    compute(kv, other, 10)
    kv.publish_inputs(other, awaited=False)
    compute(kv, first, 10)
    kv.publish_inputs(first, awaited=True)
    kv.follow(sibling, first)
    assert kv.prefix_slots(sibling).tolist() != kv.prefix_slots(other).tolist()[:9]
    assert (len(kv.prefix_slots(sibling)), sibling.computed) == (9, 9)
    kv.check([first, sibling, other])
    # The other's copy may go; theirs stays as long as one of them needs it, and no longer.
    kv.release(other)
    kv.release(first)
    kv.evict(kv.tree.evictable)
    kv.check([sibling])
    assert kv.free == 40 - 9
    kv.release(sibling)
    kv.check([])
    assert kv.available == 40
    assert kv.free == 40


def test_samples_that_fill_the_cache_with_their_prompt_once_are_served():
    # 60 of prompt, 2 x 15 new less the last ones, and the last prompt token again. Twice the prompt
    # would not fit.
    driver = Driver(slots=60 + 2 * 14 + 1, max_rows=4, prefill_tokens=16)
    driver.submit(request([1, 2], [5] * 60, max_new_tokens=15))
    driver.run()
    assert [len(driver.outputs(i)) for i in (1, 2)] == [15, 15]
    driver.submit(request([3, 4], [6] * 60, max_new_tokens=16))
    assert driver.sequences[3].ended == "failure INVALID_ARGUMENT"
    driver.drain()


def test_sequences_that_grow_side_by_side_get_runs_also_when_the_cache_is_full():
    kv = KV(1000)
    old = [begun(kv, i, [i] * 50, max_new_tokens=50) for i in range(10)]
    for sequence in old:
        compute(kv, sequence, 50)
    for _ in range(49):
        for sequence in old:
            compute(kv, sequence, 1)
            sequence.outputs.append(1)
    for sequence in old:
        kv.release(sequence)
    assert kv.free < 50  # the rest is cached
    young = [begun(kv, 100 + i, [100 + i] * 20, max_new_tokens=60) for i in range(8)]
    slots = {sequence.id: [compute(kv, sequence, 20)] for sequence in young}
    for _ in range(59):
        for sequence in young:
            slots[sequence.id].append(compute(kv, sequence, 1))
    runs = [1 + int((np.diff(np.concatenate(s)) != 1).sum()) for s in slots.values()]
    assert max(runs) <= 10, runs


def test_many_that_grow_side_by_side_share_what_is_left_of_a_full_pool():
    kv = KV(1000)
    all_of = [begun(kv, i, [i] * 20, max_new_tokens=40) for i in range(1, 41)]
    for sequence in all_of:
        compute(kv, sequence, 20)
        sequence.outputs.append(1)
    places = np.array([sequence.place for sequence in all_of])
    # 800 are taken, and rooms of 39 that the first ones were given are the rest.
    for length in range(21, 26):
        slots = kv.extend_each(all_of, places)
        kv.table.computed[places] += 1
        assert len(set(slots.tolist())) == 40
        for sequence in all_of:
            sequence.outputs.append(1)
        assert (kv.table.computed[places] == length).all()
        kv.check(all_of)
    assert kv.available == 0
    tokens = [sequence.all_tokens(25) for sequence in all_of]
    for sequence in all_of:
        kv.release(sequence)
    kv.check([])
    assert all(kv.tree.known(each) == 25 for each in tokens)


def test_runs_stay_long_over_generations_of_a_full_cache():
    """Sequences of all lengths leave what they computed behind, and others grow where it was."""
    kv, draw = KV(20_000), random.Random(1)
    live, slots, runs, born = [], {}, [], 0
    for step in range(6000):
        while len(live) < 24:
            prompt = [born + 1000] * draw.choice([5, 40, 150])
            sequence = begun(kv, born, prompt, max_new_tokens=draw.choice([10, 60, 500]))
            live.append(sequence)
            slots[born] = [compute(kv, sequence, len(prompt))]
            born += 1
        for sequence in list(live):
            sequence.outputs.append(1)
            if len(sequence.outputs) < sequence.request.stopping.max_new_tokens:
                slots[sequence.id].append(compute(kv, sequence, 1))
                continue
            kv.release(sequence)
            live.remove(sequence)
            of_sequence = slots.pop(sequence.id)
            if step > 3000:
                of_sequence = np.concatenate(of_sequence)
                runs.append(1 + int((np.diff(of_sequence) != 1).sum()))
    kv.check(live)
    assert len(runs) > 300
    assert np.mean(runs) < 4, np.mean(runs)
    assert kv.tree.tokens > 9_500, "not at the price of the cache"
