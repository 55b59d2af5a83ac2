"""Steps that are run before any request: the largest that may come, a first one, timed ones."""

from __future__ import annotations

import time
from collections import deque

import numpy as np

from tokenpod.core.capacity import BLOCK
from tokenpod.core.errors import EngineError
from tokenpod.core.new_row import NewRow
from tokenpod.core.plan import LAST, PlanRow, StepPlan, plan_of
from tokenpod.core.requests import PoolingParams, Request, StoppingParams
from tokenpod.core.sampling import MOST_TOP_TOKENS, SamplingParams
from tokenpod.engine.steps.executor import Executor, Launched
from tokenpod.scheduler.steps.machine_times import StepSize

#: Of prompts that are timed to know what plain steps take, and in front of one of them.
_TIMED_PROMPT, _TIMED_CONTEXT = 512, 16_384


def run_worst_steps(
    executor: Executor,
    rows: int,
    prompt: int,
    positions: int,
    drafts: tuple[int, int] = (0, 0),
    adapter: int = 0,
    context: int = 0,
    *,
    unknown: bool = False,
    pools: bool = False,
    mutual: bool = False,
    smaller: bool = True,
) -> None:
    """Two of them under way at a time, as in serving.

    The largest twice, which say what steps take; then, unless `smaller` is False, others: the
    allocator learns to cut up what it has. Prompts of the largest are scored, which is done in
    pieces of one size. See `worst_step` for the arguments; with `mutual`, rows of some of them are.
    """
    under_way: deque[Launched] = deque()
    others = (prompt * 3 // 4, prompt // 2, prompt // 4, prompt // 8) if smaller else ()
    sizes = [(tokens, False) for tokens in (prompt, prompt, *others)]
    sizes += [(tokens, True) for tokens in others[:2] if mutual]
    for number, (tokens, see_each_other) in enumerate(sizes):
        executor.release(range(rows))
        scattered = tokens == prompt // 2
        plan = worst_step(
            rows,
            max(tokens, 1),
            positions,
            scattered=scattered,
            drafts=drafts,
            adapter=adapter,
            context=context,
            unknown=unknown,
            edited=number == 0,
            scored=number < 2,
            pools=pools,
            mutual=see_each_other,
        )
        under_way.append(executor.launch(plan))
        if len(under_way) > 1:
            under_way.popleft().wait()
    under_way.pop().wait()
    executor.release(range(rows))


def warm_copies(executor: Executor, sink: int, offload_slots: int) -> None:
    """Copy some tokens to the host's memory and back; `sink`: the slot behind the pool's last."""
    n = min(offload_slots, sink, BLOCK)
    there = range(sink + 1, sink + 1 + n)
    for number, ends in enumerate(((range(n), there), (there, range(n))), 1):
        row = PlanRow(0, 0, [sink], [0], new=_new_row([0]))
        plan = plan_of(number, [row], copies=[*zip(*ends, strict=True)], awaited=[0])
        executor.launch(plan).wait()
        executor.release([0])


def warm_up(executor: Executor, tokens: list[int], *, pools: bool = False) -> None:
    """Run a prompt and two decode steps, so that no first request pays for first calls.

    Of a model that `pools`, a text. The keys and values of as many tokens as `tokens` lie in the
    first slots afterwards. Raises EngineError for a model that computes no numbers: it would end
    every request.
    """
    slots = range(len(tokens))
    n = len(tokens) if pools else max(len(tokens) - 2, 1)
    new = _new_text(tokens) if pools else _new_row(tokens)
    prompt = PlanRow(0, 0, slots[:n], tokens[:n], 0 if pools else 1, new=new)
    result = executor.launch(plan_of(0, [prompt])).wait()
    if -1 in result.tokens or not all(part.numbers.isfinite().all() for part in result.pooled):
        raise EngineError(
            f"the model computes NaN or Inf of a prompt of {n} tokens: its weights hold such "
            "numbers, or its type can't hold what comes of them (--dtype, --kv-cache-dtype)"
        )
    for at in range(n, len(tokens)):
        decode = PlanRow(0, at, slots[at : at + 1], output=at - n + 1)
        executor.launch(plan_of(0, [decode])).wait()
    executor.release([0])


def timed_steps(
    executor: Executor, *, rows: int, prompt: int, positions: int, slots: int, stateless: bool
) -> list[tuple[StepSize, float]]:
    """Sizes and seconds of some plain steps: of prompts, and where they say something, of rows.

    Each is run twice, and the second time counts.

    Args:
        executor: that has run steps of all kinds before.
        rows: sequences that run at once.
        prompt: prompt tokens of a step, at most.
        positions: longest sequence, in tokens.
        slots: of the pool; what lies there is overwritten.
        stateless: slots stand for what a row has computed; else rows begin with prompts alone.
    """
    longest = min(_TIMED_PROMPT, positions - 1)
    asked: list[list[tuple[int, int]]] = []  # of each row, what is computed, and its tokens
    for tokens in {min(prompt, slots), min(prompt // 4, slots)} - {0}:
        whole, rest = divmod(tokens, longest)
        asked.append([(0, longest)] * min(whole, rows) + [(0, rest)] * (rest > 0 and whole < rows))
    if stateless:
        piece = min(prompt // 4, slots // 4, positions // 4)
        asked.append([(min(_TIMED_CONTEXT, slots - piece, positions - piece), piece)])
        behind = min(longest, slots - rows)
        asked += [[(behind, 1)] * n for n in {1, max(rows // 4, 1), rows}]
    found = []
    for each in asked:
        if min((start for start, _ in each), default=-1) < 0 or min(n for _, n in each) < 1:
            continue  # the pool has room for nothing of the kind
        seconds = [_plain_step(executor, each) for _ in range(2)][-1]
        pairs = sum(n * start + n * (n + 1) // 2 for start, n in each if n > 1)
        decoding = [start for start, n in each if n == 1]
        tokens = sum(n for _, n in each if n > 1)
        found.append((StepSize(len(decoding), sum(decoding), tokens, pairs), seconds))
    return found


def _plain_step(executor: Executor, asked: list[tuple[int, int]]) -> float:
    """Seconds of a step of rows that have computed some tokens, and compute so many more."""
    steps, at = [], max(start for start, _ in asked)
    for row, (start, n) in enumerate(asked):
        request = Request([row], [0] * (start + n), SamplingParams(), StoppingParams(1))
        prefix, own = np.arange(start), range(at, at + n)
        new = NewRow(request, stream=0)
        steps.append(PlanRow(row, start, own, [0] * n, new=new, prefix=prefix))
        at += n
    plan = plan_of(0, sorted(steps, key=lambda row: len(row.slots) > 1))
    began = time.perf_counter()
    executor.launch(plan).wait()
    seconds = time.perf_counter() - began
    executor.release(range(len(asked)))
    return seconds


def worst_step(
    rows: int,
    prompt: int,
    positions: int,
    *,
    scattered: bool,
    drafts: tuple[int, int] = (0, 0),
    adapter: int = 0,
    context: int = 0,
    unknown: bool = False,
    edited: bool = False,
    scored: bool = True,
    pools: bool = False,
    mutual: bool = False,
) -> StepPlan:
    """The step that takes most memory: all rows sample, and prompts of `prompt` tokens are scored.

    Of a model that `pools`, nothing is sampled or scored: vectors of all tokens are wanted.

    Args:
        rows: sequences that can be live at once.
        prompt: most prompt tokens of a step.
        positions: longest sequence, in tokens.
        scattered: no two slots of a row are adjacent.
        adapter: the slot of all rows' adapter; 0: they have none.
        drafts: how many there are of all rows, and of one row at most.
        context: tokens that the longest row comes to at least, most of them from the cache: where
            what attention takes grows with them.
        unknown: the executor finds the drafts.
        edited: what the first row draws changes its next scores, so drafts are checked one by one.
        scored: False spares prompts their scores, which torch makes in many small pieces.
        mutual: tokens of prompts see each other.
    """
    lengths = [1] * rows
    guessed = [0] * rows
    left, each = drafts
    for row in range(rows if each else 0):
        guessed[row] = min(each, left)
        lengths[row] += guessed[row]
        left -= guessed[row]
    for row in range(rows - 1, -1, -1):
        if guessed[row]:
            break
        lengths[row] = max(min(prompt, positions - 1), 1)
        prompt -= lengths[row]
        if prompt <= 0:
            break
    slots = range(sum(lengths))
    if scattered:
        slots = slots[::-1]
    steps, at = [], 0
    for row, length in enumerate(lengths):
        tokens, samples = [0] * length, 0 if pools else 1 + guessed[row]
        if unknown and guessed[row]:
            tokens[1:] = [LAST] * guessed[row]
        following = tokens if scored and not pools and length > samples else []
        cached = max(context - length, 0) if row == rows - 1 else 0
        # Whatever lies there: the step's slots, over and over.
        prefix = np.arange(cached) % len(slots)
        own, prompt_tokens = slots[at : at + length], [0] * (cached + length)
        own_edits = edited and row == 0  # such rows' counts of all tokens take the host long
        new = _new_text(prompt_tokens) if pools else _new_row(prompt_tokens, own_edits)
        steps.append(
            PlanRow(
                row,
                cached,
                own,
                tokens,
                samples,
                following=following,
                new=new,
                prefix=prefix,
                adapter=adapter,
                mutual=mutual and length > 1 + guessed[row],
            )
        )
        at += length
    return plan_of(0, sorted(steps, key=lambda row: len(row.slots) > 1))


def _new_row(prompt: list[int], edited: bool = False) -> NewRow:
    """A row that asks its sampler for everything."""
    sampling = SamplingParams(
        do_sample=True,
        temperature=0.9,
        top_k=10,
        top_p=0.9,
        repetition_penalty=1.1 if edited else 1.0,
        seed=1,
        top_of_processed=True,
    )
    stopping = StoppingParams(max_new_tokens=1)
    asked = Request(
        [0],
        prompt,
        sampling,
        stopping,
        logprobs=True,
        top_n_tokens=2,
        ranks=True,
        prompt_logprobs=True,
        prompt_top_n_tokens=MOST_TOP_TOKENS,
        prompt_ranks=True,
    )
    return NewRow(asked, stream=0)


def _new_text(tokens: list[int]) -> NewRow:
    """A text of which everything is asked that a model that makes vectors has."""
    asked = Request(
        [0], tokens, SamplingParams(), StoppingParams(1), pooling=PoolingParams(tokens=True)
    )
    return NewRow(asked, stream=0)
