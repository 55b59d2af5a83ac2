"""Steps by hand: plans that no scheduler makes yet, on any executor, and what came of them.

Every rank of a group can run these: they depend on nothing but the tokens, which are the leader's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tokenpod.core.new_row import NewRow
from tokenpod.core.plan import LAST, UNSAMPLED, PlanRow, plan_of
from tokenpod.core.requests import Request, StoppingParams
from tokenpod.core.sampling import SamplingParams
from tokenpod.engine.steps.executor import Launched, Launcher, StepResult

VOCABULARY = 51
#: Slots and positions of each sequence.
ROOM = 16
NEW_TOKENS = 6

SAMPLED = SamplingParams(do_sample=True, temperature=1.3, top_k=20, seed=7)
DRAWN_AND_PENALISED = SamplingParams(
    do_sample=True,
    repetition_penalty=1.4,
    frequency_penalty=0.6,
    watermark=True,
    seed=3,
    top_of_processed=True,
)
KINDS = [SamplingParams(), SAMPLED, DRAWN_AND_PENALISED]

#: (row, tokens so far) -> guesses of what comes next.
Drafts = Callable[[int, list[int]], list[int]]


def rows_of(asked: list[Request]) -> list[Row]:
    return [Row(i, request) for i, request in enumerate(asked)]


def no_drafts(row: int, outputs: list[int]) -> list[int]:
    del row, outputs
    return []


@dataclass
class Row:
    """A sequence that is stepped by hand; its slots are a run of its own, falling if odd."""

    row: int
    request: Request
    #: In every step.
    adapter: int = 0
    outputs: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    tops: dict[int, list[int]] = field(default_factory=dict)
    #: What has been launched of it is unknown until that step is waited for.
    flying: bool = False

    def slots(self, start: int, end: int) -> list[int]:
        first = self.row * ROOM
        if self.row % 2:
            return [first + ROOM - 1 - p for p in range(start, end)]
        return [first + p for p in range(start, end)]

    def prompt(self, start: int, end: int) -> PlanRow:
        """A piece of the prompt."""
        prompt = self.request.prompt
        return PlanRow(
            self.row,
            start,
            self.slots(start, end),
            prompt[start:end],
            samples=int(end == len(prompt)),
            new=NewRow(self.request, stream=0) if start == 0 else None,
            adapter=self.adapter,
        )

    def step(self, drafts: Sequence[int] = (), *, masked: bool = False) -> PlanRow:
        """The next token, and as many more as there are drafts."""
        start, n = self.held, 1 + len(drafts)
        return PlanRow(
            self.row,
            start,
            self.slots(start, start + n),
            [LAST, *drafts],
            samples=n,
            output=len(self.outputs),
            adapter=self.adapter,
            masked=masked,
        )

    @property
    def held(self) -> int:
        """Positions whose keys and values are written."""
        return len(self.request.prompt) + len(self.outputs) - 1

    @property
    def left(self) -> int:
        return self.request.stopping.max_new_tokens - len(self.outputs)


def requests(*, tops: bool = True) -> list[Request]:
    """Greedy, sampled, and penalised with top tokens; a prompt of one token among them."""
    prompts = [[(7 * i + j * j) % VOCABULARY for j in range(1 + 3 * i)] for i in range(3)]
    return [
        Request(
            [i],
            prompt,
            sampling,
            StoppingParams(max_new_tokens=NEW_TOKENS),
            logprobs=True,
            top_n_tokens=2 if tops and i == 2 else 0,
        )
        for i, (prompt, sampling) in enumerate(zip(prompts, KINDS, strict=True))
    ]


def take(planned: Sequence[tuple[Row, PlanRow]], result: StepResult) -> None:
    """Give rows what a step brought."""
    at = 0
    tops = {index: ids for index, ids, _ in result.tops}
    for row, plan_row in planned:
        row.flying = False
        for index in range(at, at + plan_row.samples):
            if result.tokens[index] == UNSAMPLED:
                assert index not in tops
                continue
            if index in tops:
                row.tops[len(row.outputs)] = tops[index]
            row.outputs.append(result.tokens[index])
            row.logprobs.append(result.logprobs[index])
        at += plan_row.samples
    assert at == len(result.tokens)


def run_step(executor: Launcher, planned: list[tuple[Row, PlanRow]]) -> None:
    """One step; rows with a single token first."""
    planned = sorted(planned, key=lambda pair: len(pair[1].slots) > 1)
    plan = plan_of(1, [row for _, row in planned])
    take(planned, executor.launch(plan).wait())


def begin(executor: Launcher, rows: list[Row]) -> None:
    """All prompts in one step."""
    run_step(executor, [(row, row.prompt(0, len(row.request.prompt))) for row in rows])


def go_on(
    executor: Launcher, rows: list[Row], drafts: Drafts = no_drafts, overlap: bool = False
) -> None:
    """Until all rows have their tokens; with `overlap` half of the rows at a time."""
    halves = [rows[::2], rows[1::2]] if overlap else [rows]
    under_way: list[tuple[list[tuple[Row, PlanRow]], Launched]] = []
    turn = 0
    while any(row.left for row in rows) or under_way:
        planned = []
        for row in halves[turn % len(halves)]:
            if row.left and not row.flying:
                guesses = drafts(row.row, row.outputs)[: row.left - 1]
                planned.append((row, row.step(guesses)))
                row.flying = True
        planned.sort(key=lambda pair: len(pair[1].slots) > 1)
        if planned:
            launched = executor.launch(plan_of(turn + 2, [row for _, row in planned]))
            under_way.append((planned, launched))
        if len(under_way) >= len(halves) or not planned:
            done, launched = under_way.pop(0)
            take(done, launched.wait())
        turn += 1


def guesses(expected: list[list[int]]) -> Drafts:
    """Right ones, wrong ones, and right ones behind a wrong one, by turns; none now and then."""

    def guess(row: int, outputs: list[int]) -> list[int]:
        known = expected[row]
        right = known[len(outputs) : len(outputs) + 3]
        wrong = [(token + 1) % VOCABULARY for token in right]
        kinds = [right, [], [*right[:1], *wrong[1:2], *right[2:]], wrong[:2]]
        return kinds[(row + len(outputs)) % len(kinds)]

    return guess
