"""Bad words over many steps: host and device ban what plain code bans, and draw the same."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from support.sampling.samplers import Row, on_cpu, on_device, random_logits, sampled, step
from tokenpod.core.sampling import SamplingParams
from tokenpod.engine.sampling.bad_words import BadWords, entries_of

pytestmark = pytest.mark.compute

VOCAB, STEPS = 70, 40
#: Interpreted kernels take a second for each.
DEVICE_STEPS = 7
#: Words that begin alike, that end alike, that hold each other and themselves, and one twice.
WORDS = [[0, 1], [0, 1, 2], [1, 2], [2], [3, 3, 3], [0, 3, 0, 3], [69, 1], [68], [3, 3, 3]]
ROWS: list[Row] = [
    (SamplingParams(bad_words=WORDS), {}),
    (sampled(bad_words=WORDS, seed=1), {"prompt": [0, 3, 0]}),
    (sampled(bad_words=WORDS, top_k=3, seed=2), {}),
    (sampled(bad_words=[[0], [68, 69, 0, 1]], presence_penalty=0.1, seed=3), {"top_n": 2}),
    (sampled(bad_words=WORDS, top_of_processed=True, seed=4), {"top_n": 2}),
    (sampled(seed=5), {}),
]


def forbidden(words: list[list[int]], outputs: list[int]) -> set[int]:
    """What would complete a word of these."""
    return {last for *before, last in words if not before or outputs[-len(before) :] == before}


def few(at: int) -> torch.Tensor:
    """Logits of which a handful of tokens, those of the words among them, are far the likeliest."""
    logits = random_logits(len(ROWS), VOCAB, seed=at, scale=1.0)
    logits[:, [0, 1, 2, 3, 68, 69]] += 12.0
    return logits


def test_no_word_is_ever_completed_on_the_host_and_on_the_device():
    host, device = on_cpu(ROWS, VOCAB), on_device(ROWS, VOCAB, most_edits=64)
    outputs: list[list[int]] = [[] for _ in ROWS]
    met = 0
    for at in range(STEPS):
        logits = few(at)
        want = host.sample(logits, [*range(len(ROWS))], [at] * len(ROWS))
        if at < DEVICE_STEPS:
            assert want.tokens.tolist() == step(device, logits, at).tokens.tolist()
        for row, token in enumerate(want.tokens.tolist()):
            banned = forbidden(ROWS[row][0].bad_words, outputs[row])
            assert token not in banned
            met += int(logits[row].argmax()) in banned
            outputs[row].append(token)
    # The words were in the way, and words that are not banned were not.
    assert met > STEPS
    assert {0, 1, 2, 3, 68, 69} <= {*outputs[-1]}


@pytest.mark.parametrize("cut", [1, 17])
def test_a_preempted_row_goes_on_as_if_it_had_not_been(cut: int):
    whole, outputs = on_cpu(ROWS[:3], VOCAB), [[], [], []]
    for at in range(cut):
        drawn = whole.sample(few(at)[:3], [0, 1, 2], [at] * 3)
        for row, token in enumerate(drawn.tokens.tolist()):
            outputs[row].append(token)
    again = [
        (params, changes | {"outputs": outputs[row]})
        for row, (params, changes) in enumerate(ROWS[:3])
    ]
    host, device = on_cpu(again, VOCAB), on_device(again, VOCAB, most_edits=64)
    for at in range(cut, cut + 2):
        want = whole.sample(few(at)[:3], [0, 1, 2], [at] * 3).tokens.tolist()
        assert host.sample(few(at)[:3], [0, 1, 2], [at] * 3).tokens.tolist() == want
        assert step(device, few(at)[:3], at).tokens.tolist() == want


def test_words_that_leave_nothing_end_the_row():
    words = [[token] for token in range(VOCAB)]
    logits = random_logits(1, VOCAB)
    assert on_cpu([(SamplingParams(bad_words=words), {})], VOCAB).sample(
        logits, [0], [0]
    ).tokens.tolist() == [-1]


def test_entries_after_any_outputs_are_those_of_single_steps():
    random = np.random.default_rng(0)
    for _ in range(50):
        words = [random.integers(3, size=random.integers(1, 5)).tolist() for _ in range(4)]
        outputs = random.integers(3, size=random.integers(0, 9)).tolist()
        entries, armed = entries_of(words, outputs)
        assert {*BadWords(entries, armed).banned.tolist()} == forbidden(words, outputs)
