"""Texts through every way of cutting and placing their steps, compared with transformers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

import torch

from support.examples import ALL
from support.steps.hand_scheduler import HandScheduler, Sequence

#: How far the longest text goes: beyond every window, and twice what any rotation begins with.
LONGEST = 104 if ALL else 84
#: Those of it that follow one at a time, each where the last one led; the others are its prompt's.
NEW_TOKENS = 64 if ALL else 5


class Walk:
    """Sequences whose prompts greedy tokens follow; it keeps all log probabilities."""

    def __init__(self, scheduler: HandScheduler) -> None:
        self.scheduler = scheduler
        self.sequences: list[Sequence] = []
        self.prompts: list[int] = []
        self.logprobs: dict[int, list[torch.Tensor]] = defaultdict(list)

    def add(self, tokens: list[int], *, prefix_of: Sequence | None = None, shared: int = 0):
        if not self.scheduler.shares:
            prefix_of = None
        sequence = self.scheduler.sequence(tokens, prefix_of=prefix_of, shared=shared)
        self.sequences.append(sequence)
        self.prompts.append(len(tokens))
        if shared and prefix_of is None:
            # It has a state of its own, which begins with the text.
            self.step((sequence, shared))
        return sequence

    def step(self, *works: tuple[Sequence, int]) -> None:
        """Process so many tokens of each; a token follows where none is left."""
        for (sequence, _), got in zip(works, self.scheduler.step(list(works)), strict=True):
            self.logprobs[sequence.row].append(got)
            if len(sequence.slots) == len(sequence.tokens):
                sequence.tokens.append(int(got[-1].argmax()))

    def check(self, golden) -> None:
        """Each sequence's tokens and log probabilities are those of transformers."""
        expected = golden.logprobs_of([sequence.tokens[:-1] for sequence in self.sequences])
        for sequence, prompt, truth in zip(self.sequences, self.prompts, expected, strict=True):
            ours = torch.cat(self.logprobs[sequence.row])
            assert ours.dtype == torch.float32
            torch.testing.assert_close(ours, truth[-len(ours) :], rtol=0, atol=golden.tolerance)
            assert sequence.tokens[prompt:] == truth[prompt - 1 :].argmax(-1).tolist()


def walk(
    scheduler: HandScheduler, text: Callable[..., list[int]], new_tokens: int = NEW_TOKENS
) -> Walk:
    """Chunks, cached prefixes, slots that lie apart, mixed steps, then greedy tokens."""
    walk = Walk(scheduler)
    first = walk.add(text(37))
    for count in (5, 1, 13, 2, 16):
        scheduler.skip_slots(3)
        walk.step((first, count))
    sharer = walk.add(text(19) + text(14, seed=1), prefix_of=first, shared=19)
    walk.step((sharer, 14), (first, 1))
    twin = walk.add(text(37) + text(LONGEST - 37 - new_tokens, seed=2), prefix_of=first, shared=37)
    apart = walk.add(text(25, seed=3))
    scheduler.skip_slots(0, every=2)
    walk.step((apart, 12), (twin, 1))
    whole = walk.add(text(9, seed=4))
    walk.step((apart, 13), (first, 1), (twin, 1), (whole, 9), (sharer, 1))
    walk.step((twin, 1), (whole, 1))
    if len(twin.tokens) > 41:  # its prompt goes on
        rest = len(twin.tokens) - len(twin.slots)
        walk.step((twin, rest // 2), (apart, 1))
        walk.step((whole, 1), (twin, rest - rest // 2))
    together = (first, sharer, twin, apart, whole)
    while len(twin.tokens) < LONGEST:
        walk.step(*((sequence, 1) for sequence in together))
    return walk
