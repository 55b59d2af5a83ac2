"""What a later round of a step draws from."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tokenpod.kernels.gpu.launcher import launched

#: Tokens of the vocabulary that a program reads.
BLOCK = 1024


def offer(
    logits: torch.Tensor,
    index: torch.Tensor,
    drawn: torch.Tensor,
    before: torch.Tensor,
    t_token: torch.Tensor,
    drafts: torch.Tensor,
) -> torch.Tensor:
    """[m, vocab] rows of logits; -inf behind a wrong draft, so that nothing is drawn.

    Args:
        logits: [n, vocab], each row contiguous.
        index: [m] int64 rows of `logits`.
        drawn: [samples] int64 tokens of the rounds before.
        before: [m] int64: which of `drawn` must be the row's draft; negative: none.
        t_token: [T] int64: the step's tokens.
        drafts: [m] int64: which of them is the row's draft.
    """
    m, vocab_size = len(index), logits.shape[1]
    scores = logits.new_empty((m, vocab_size))
    _offer[(triton.cdiv(vocab_size, BLOCK), m)](
        logits,
        logits.stride(0),
        index,
        drawn,
        before,
        t_token,
        drafts,
        scores,
        vocab_size,
        BLOCK=BLOCK,
        num_warps=4,
    )
    return scores


@launched
@triton.jit
def _offer(
    logits,
    logits_stride,
    index,
    drawn,
    before,
    t_token,
    drafts,
    scores,
    vocab_size,
    BLOCK: tl.constexpr,
):
    b = tl.program_id(1).to(tl.int64)
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = token < vocab_size
    last = tl.load(before + b)
    drawn_last = tl.load(drawn + last, mask=last >= 0, other=0)
    draft = tl.load(t_token + tl.load(drafts + b), mask=last >= 0, other=0)
    right = there & ((last < 0) | (drawn_last == draft))
    score = tl.load(
        logits + tl.load(index + b) * logits_stride + token, mask=right, other=-float("inf")
    )
    tl.store(scores + b * vocab_size + token, score, mask=there)
