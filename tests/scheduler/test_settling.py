"""What a step's tokens mean is the same for rows that are looked at one by one and in columns."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest

from tokenpod.core.outputs import FinishCode
from tokenpod.core.plan import UNSAMPLED
from tokenpod.core.requests import Request, StoppingParams
from tokenpod.core.sampling import SamplingParams
from tokenpod.scheduler.kv.preemption import PREEMPTIONS
from tokenpod.scheduler.policies.optimistic import Optimistic
from tokenpod.scheduler.scheduler import Limits, Scheduler, Step

EOS, STOP, NAN = 3, 5, -1


class OneByOne(Scheduler):
    """Looks at every token."""

    def _to_look_at(self, step: Step, tokens: list[int]) -> list[int]:
        del step
        return [*range(len(tokens))]


@dataclass
class Told:
    """What has been told of sequences."""

    tokens: dict[int, list[int]]
    ends: dict[int, FinishCode]
    failed: list[int]
    #: Tokens that one call has told.
    most: int = 0


def requests(chance: random.Random) -> list[Request]:
    made, number = [], 0
    for _ in range(40):
        samples = chance.choice([1, 1, 1, 2])
        stopping = StoppingParams(
            max_new_tokens=chance.randint(1, 30),
            min_new_tokens=chance.choice([0, 0, 6]),
            eos_token_ids=frozenset({EOS}) if chance.random() < 0.7 else frozenset(),
            stop_token_ids=frozenset({STOP}) if chance.random() < 0.3 else frozenset(),
            length_first=chance.random() < 0.2,
            time_limit_at=chance.choice([None, None, None, 25]),
        )
        prompt = [chance.randint(10, 99) for _ in range(chance.randint(1, 40))]
        ids = [*range(number, number + samples)]
        number += samples
        made.append(Request(ids, prompt, SamplingParams(), stopping))
    return made


def served(scheduler: Scheduler, seed: int, *, overlap: bool) -> Told:
    """Serve them; a token depends on its sequence and its number alone."""
    chance, told = random.Random(seed), Told({}, {}, [])
    for request in requests(chance):
        scheduler.submit(request)
    drawn: dict[int, int] = {}
    flying: list[Step] = []
    now = 0

    def settle(step: Step) -> None:
        tokens = []
        for sequence in step.sampled:
            drawn[sequence.id] = number = drawn.get(sequence.id, 0) + 1
            draw = random.Random(1000 * sequence.id + number).random()
            tokens.append(EOS if draw < 0.05 else STOP if draw < 0.1 else 7 + int(99 * draw))
            if (sequence.id, number) == (11, 4):
                tokens[-1] = NAN
        settled = scheduler.settle(step, tokens, now)
        scheduler.check()
        told.most = max(told.most, len(settled.token_ids))
        told.failed += [failure.sequence_id for failure in settled.failures]
        for at, sequence_id in enumerate(settled.sequence_ids):
            if settled.samples[at] >= 0:
                assert tokens[settled.samples[at]] == settled.token_ids[at] != UNSAMPLED
            told.tokens.setdefault(sequence_id, []).append(settled.token_ids[at])
            if settled.finishes[at]:
                told.ends[sequence_id] = settled.finishes[at]

    while True:
        now += 1
        step = scheduler.plan(now)
        if step is not None:
            flying.append(step)
        if flying and (step is None or not overlap or len(flying) > 1):
            settle(flying.pop(0))
        elif step is None:
            break
    return told


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_columns_tell_what_one_by_one_tells(seed: int, overlap: bool):
    # So few slots that some are preempted.
    limits = Limits(700, 24, 200, prefill_tokens=64)
    options = {"admission": Optimistic, "preemption": PREEMPTIONS["recompute"](1)}
    told = [
        served(kind(limits, **options), seed, overlap=overlap) for kind in (OneByOne, Scheduler)
    ]
    one_by_one, in_columns = told
    assert in_columns == one_by_one
    assert len({*one_by_one.ends.values()}) >= 4
    assert one_by_one.most > 8
