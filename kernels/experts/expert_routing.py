"""Which tokens each expert works for, found on the device in shapes that do not depend on it.

An assignment is a token and one of its K experts: number token · K + place, places in the order of
experts. Three steps make the table of assignments by expert that the products read (`Assignments`):

    scores   partial logits, cut along the hidden size so that few tokens fill the device too
    choose   their sum, softmax or sigmoid, the K best; counts per block of tokens
    place    where each assignment goes: after lower experts', and after lower tokens' of its own

Where one program can hold the choice of all tokens, `choose` places as well. Everything is counted,
nothing raced for: the same input gives the same table.

A token chooses the same experts, and weighs them the same to the last bit, alone and at every place
among others. So nothing is summed in an order that depends on their number: logits are the sum of
segments along the hidden size, in their order, whoever sums them; and over experts whole numbers
are summed (`_sum_of`), for the layout of a block in registers depends on its size.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from tokenpod.kernels.gpu.launch import await_inputs, launch_options
from tokenpod.kernels.gpu.launcher import launched
from tokenpod.kernels.operations.expert_ops import Routing

#: Tokens whose choice one program holds; few sizes, for each is compiled.
CHOICE_BLOCKS = (4, 16, 64)
#: Tokens times experts that its registers hold.
CHOICE_MOST = 64 * 128
#: Elements of 2 bytes along the hidden size that a program of `scores` reads at a time.
SCORE_STEP = 128
#: Elements that it reads at least.
SCORE_LEAST = 256
#: Below any score, above what is not to be chosen.
LOWEST: tl.constexpr = tl.constexpr(-1e30)
#: Programs of `scores` that are enough.
SCORE_PROGRAMS = 128
#: Experts of each. The matrix unit's instruction, and so its rounding, follows from this.
SCORE_EXPERTS = 16
#: What numbers up to 1 are multiplied by before they are summed as int64: 1,024 of them at most.
WHOLE: tl.constexpr = tl.constexpr(2.0**52)


class Assignments(NamedTuple):
    """The choice of T tokens among E experts, K each."""

    #: [T · K] int32: assignments by expert, then by token.
    order: torch.Tensor
    #: [E] int32: where each expert's begin in `order`.
    start: torch.Tensor
    #: [T, K] float32: what a token weighs its experts with.
    scale: torch.Tensor
    #: [T, K] int32: the experts of a token, ascending.
    chosen: torch.Tensor


class Biases(NamedTuple):
    """Of a router; see `ops.ExpertWeights`."""

    logits: torch.Tensor | None = None
    choice: torch.Tensor | None = None


NO_BIASES = Biases()


def assign(
    x: torch.Tensor, router: torch.Tensor, routing: Routing, biases: Biases = NO_BIASES
) -> Assignments:
    """The experts of x [T, hidden], by a router [E, hidden]."""
    return table_of(_scores(x, router), routing, biases)


def table_of(partial: torch.Tensor, routing: Routing, biases: Biases = NO_BIASES) -> Assignments:
    """The experts of T tokens, by logits that are the sum of partial [splits, T, E] float32."""
    splits, tokens, experts = partial.shape
    per_token, device = routing.per_token, partial.device
    padded = triton.next_power_of_2(experts)
    block = _choice_block(tokens, padded)
    blocks = triton.cdiv(tokens, block)
    scale = torch.empty((tokens, per_token), dtype=torch.float32, device=device)
    chosen = torch.empty((tokens, per_token), dtype=torch.int32, device=device)
    counts = torch.empty((blocks, experts), dtype=torch.int32, device=device)
    order = torch.empty((tokens * per_token,), dtype=torch.int32, device=device)
    start = torch.empty((experts,), dtype=torch.int32, device=device)
    common = {
        "PER_TOKEN": per_token,
        "EXPERTS": padded,
        "BLOCK_T": block,
        "num_warps": 8 if block * padded > CHOICE_MOST // 2 else 4,
        **launch_options(device),
    }
    choose[(blocks,)](
        partial,
        biases.logits,
        biases.choice,
        chosen,
        scale,
        counts,
        order,
        start,
        tokens,
        experts,
        splits,
        routing.scale,
        routing.least_sum,
        routing.tolerance,
        NORMALISED=routing.normalised,
        SCORE=routing.score.value,
        GROUPS=routing.groups,
        CHOSEN_GROUPS=routing.chosen_groups,
        GROUP_BEST=routing.group_best,
        ALONE=blocks == 1,
        **common,
    )
    if blocks > 1:
        place[(blocks,)](chosen, counts, order, start, tokens, experts, **common)
    return Assignments(order, start, scale, chosen)


def _choice_block(tokens: int, experts: int) -> int:
    """Tokens for each program of `choose`: all if they fit."""
    fitting = [size for size in CHOICE_BLOCKS if size * experts <= CHOICE_MOST]
    return next((size for size in fitting if size >= tokens), max(fitting, default=1))


def _scores(x: torch.Tensor, router: torch.Tensor) -> torch.Tensor:
    """Parts [splits, T, E] of the logits, float32: their sum is x · routerᵀ.

    Each is a segment of the hidden size, or there is one part, which is the sum of them.
    """
    tokens, hidden = x.shape
    experts = len(router)
    block_t = 16 if tokens <= 16 else 64
    across = triton.cdiv(experts, SCORE_EXPERTS)
    segments = max(1, min(hidden // SCORE_LEAST, SCORE_PROGRAMS // across))
    step = SCORE_STEP // (x.element_size() // 2)
    steps = triton.cdiv(hidden, segments * step)
    segments = triton.cdiv(hidden, steps * step)
    apart = triton.cdiv(tokens, block_t) * across < SCORE_PROGRAMS
    splits = segments if apart else 1
    partial = torch.empty((splits, tokens, experts), dtype=torch.float32, device=x.device)
    scores[(triton.cdiv(tokens, block_t), across, splits)](
        x,
        router,
        partial,
        tokens,
        experts,
        hidden,
        steps,
        segments // splits,
        BLOCK_T=block_t,
        BLOCK_E=SCORE_EXPERTS,
        BLOCK_K=step,
        **launch_options(x.device),
    )
    return partial


@launched
@triton.jit(do_not_specialize=["tokens", "steps", "segments"])
def scores(
    x,
    router,
    partial,
    tokens,
    experts,
    hidden,
    steps,
    segments,
    BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_K: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """The sum of so many segments of so many steps: partial [splits, T, E] from x [T, hidden]."""
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    expert = tl.program_id(1) * BLOCK_E + tl.arange(0, BLOCK_E)
    split = tl.program_id(2)
    await_inputs(OVERLAP)
    total = tl.zeros((BLOCK_E, BLOCK_T), tl.float32)
    for segment in range(split * segments, (split + 1) * segments):
        sums = tl.zeros((BLOCK_E, BLOCK_T), tl.float32)
        for step in range(segment * steps, (segment + 1) * steps):
            i = step * BLOCK_K + tl.arange(0, BLOCK_K)
            at_w = router + expert[:, None] * hidden + i[None, :]
            w = tl.load(at_w, mask=(expert[:, None] < experts) & (i[None, :] < hidden), other=0.0)
            at_x = x + token.to(tl.int64)[None, :] * hidden + i[:, None]
            v = tl.load(at_x, mask=(token[None, :] < tokens) & (i[:, None] < hidden), other=0.0)
            sums = tl.dot(w, v, sums, input_precision="ieee")
        total += sums
    at = partial + (split * tokens + token[None, :]).to(tl.int64) * experts + expert[:, None]
    tl.store(at, total, mask=(token[None, :] < tokens) & (expert[:, None] < experts))


@launched
@triton.jit(do_not_specialize=["tokens", "splits"])
def choose(
    partial,
    bias,
    correction,
    chosen,
    scale,
    counts,
    order,
    start,
    tokens,
    experts,
    splits,
    factor,
    least_sum,
    tolerance,
    PER_TOKEN: tl.constexpr,
    EXPERTS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    NORMALISED: tl.constexpr,
    SCORE: tl.constexpr,
    GROUPS: tl.constexpr,
    CHOSEN_GROUPS: tl.constexpr,
    GROUP_BEST: tl.constexpr,
    ALONE: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """The experts of BLOCK_T tokens; also their places if no other program has any (ALONE)."""
    block = tl.program_id(0)
    token = block * BLOCK_T + tl.arange(0, BLOCK_T)[:, None]
    expert = tl.arange(0, EXPERTS)[None, :]
    inside = (token < tokens) & (expert < experts)
    await_inputs(OVERLAP)

    logits = tl.zeros((BLOCK_T, EXPERTS), tl.float32)
    for split in range(splits):
        at = partial + (split * tokens + token).to(tl.int64) * experts + expert
        logits += tl.load(at, mask=inside, other=0.0)
    if bias is not None:
        logits += tl.load(bias + expert, mask=expert < experts, other=0.0)
    logits = tl.where(expert < experts, logits, float("-inf"))
    if SCORE == "sigmoid":
        weights = tl.sigmoid(logits)
    else:
        weights = _softmax(logits)
    key = logits if SCORE == "sparsemixer" else weights
    if correction is not None:
        key += tl.load(correction + expert, mask=expert < experts, other=0.0)
    # A token of NaN has experts too, the first ones: its result is NaN by its input.
    key = tl.where(key == key, key, LOWEST)
    key = tl.where(expert < experts, key, float("-inf"))
    if GROUPS > 1:
        key = _of_best_groups(key, expert, experts // GROUPS, GROUPS, CHOSEN_GROUPS, GROUP_BEST)
    picked = tl.zeros((BLOCK_T, EXPERTS), tl.int32)
    for _ in range(PER_TOKEN):
        if SCORE == "sparsemixer":
            best = tl.max(key, axis=1)[:, None]
            far = (best - logits) / tl.maximum(tl.abs(logits), best) > tolerance
            shares = _softmax(tl.where(far | (picked > 0), float("-inf"), logits))
        is_best = expert == tl.argmax(key, axis=1)[:, None]
        if SCORE == "sparsemixer":
            weights = tl.where(is_best, shares, weights)
        picked = tl.where(is_best, 1, picked)
        key = tl.where(is_best, float("-inf"), key)
    if NORMALISED:
        total = _sum_of(tl.where(picked > 0, weights, 0.0))
        weights /= tl.where(total < least_sum, least_sum, total)[:, None]
    weights *= factor
    picked = tl.where(inside, picked, 0)

    at = token * PER_TOKEN + tl.cumsum(picked, axis=1) - 1
    tl.store(scale + at, weights, mask=picked > 0)
    tl.store(chosen + at, tl.broadcast_to(expert, (BLOCK_T, EXPERTS)), mask=picked > 0)
    if ALONE:
        count = tl.sum(picked, axis=0)
        first = tl.cumsum(count, axis=0) - count
        _write_places(order, start, picked, at, first, first, experts, EXPERTS)
    else:
        own = tl.arange(0, EXPERTS)
        tl.store(counts + block * experts + own, tl.sum(picked, axis=0), mask=own < experts)


@triton.jit
def _softmax(logits):
    """Over experts, of which one at least is not minus infinity."""
    weights = tl.exp(logits - tl.max(logits, axis=1)[:, None])
    return weights / _sum_of(weights)[:, None]


@triton.jit
def _sum_of(x):
    """Sums over the last axis of numbers from 0 to 1, the same in any order; NaN with a NaN."""
    whole = tl.sum((tl.where(x == x, x, 0.0) * WHOLE).to(tl.int64), axis=1)
    some_nan = tl.max((x != x).to(tl.int32), axis=1) > 0
    return tl.where(some_nan, float("nan"), whole.to(tl.float32) / WHOLE)


@triton.jit
def _of_best_groups(
    key,
    expert,
    size,
    GROUPS: tl.constexpr,
    CHOSEN_GROUPS: tl.constexpr,
    GROUP_BEST: tl.constexpr,
):
    """Key [tokens, experts], minus infinity where a token does not look at an expert's group."""
    group = expert // size
    score = tl.full(key.shape, float("-inf"), tl.float32)
    for one in range(GROUPS):
        own = tl.where(group == one, key, float("-inf"))
        best = tl.max(own, axis=1)
        if GROUP_BEST == 2:
            other = tl.where(expert == tl.argmax(own, axis=1)[:, None], float("-inf"), own)
            best += tl.max(other, axis=1)
        score = tl.where(group == one, best[:, None], score)
    left = key
    for _ in range(CHOSEN_GROUPS):
        chosen = tl.argmax(score, axis=1)[:, None] // size
        left = tl.where(group == chosen, float("-inf"), left)
        score = tl.where(group == chosen, float("-inf"), score)
    return tl.where(left == float("-inf"), key, float("-inf"))


@launched
@triton.jit(do_not_specialize=["tokens"])
def place(
    chosen,
    counts,
    order,
    start,
    tokens,
    experts,
    PER_TOKEN: tl.constexpr,
    EXPERTS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """The places of BLOCK_T tokens' assignments, from all blocks' counts."""
    AT_ONCE: tl.constexpr = 16
    block, blocks = tl.program_id(0), tl.num_programs(0)
    token = block * BLOCK_T + tl.arange(0, BLOCK_T)[:, None]
    expert = tl.arange(0, EXPERTS)[None, :]
    await_inputs(OVERLAP)

    total = tl.zeros((EXPERTS,), tl.int32)
    before = tl.zeros((EXPERTS,), tl.int32)
    for first_block in range(0, blocks, AT_ONCE):
        other = first_block + tl.arange(0, AT_ONCE)[:, None]
        at = counts + other * experts + expert
        count = tl.load(at, mask=(other < blocks) & (expert < experts), other=0)
        total += tl.sum(count, axis=0)
        before += tl.sum(tl.where(other < block, count, 0), axis=0)
    first = tl.cumsum(total, axis=0) - total

    picked = tl.zeros((BLOCK_T, EXPERTS), tl.int32)
    for k in range(PER_TOKEN):
        one = tl.load(chosen + token * PER_TOKEN + k, mask=token < tokens, other=-1)
        picked += (one == expert).to(tl.int32)
    at = token * PER_TOKEN + tl.cumsum(picked, axis=1) - 1
    _write_places(order, start, picked, at, first, first + before, experts, EXPERTS)


@triton.jit
def _write_places(
    order, start, picked, assignment, first, own_first, experts, EXPERTS: tl.constexpr
):
    """Assignments of picked [tokens, experts], each expert's from own_first [experts] on."""
    position = own_first[None, :] + tl.cumsum(picked, axis=0) - 1
    tl.store(order + position, assignment, mask=picked > 0)
    if tl.program_id(0) == 0:
        expert = tl.arange(0, EXPERTS)
        tl.store(start + expert, first, mask=expert < experts)
