"""How a row's columns lie on the device, and what edits its scores.

A row is `WORDS` words of 64 bits, laid out by the table of knobs, so that it is set by one small
copy; floats are float64 bits.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import triton
import triton.language as tl

from tokenpod.core import sampling
from tokenpod.core.sampling import TABLE
from tokenpod.kernels.sampling.noise import WATERMARK_KEY, span_words

WORDS = tl.constexpr(sampling.ROW_WORDS)
FLAGS = tl.constexpr(TABLE.place("flags"))
SEED = tl.constexpr(TABLE.place("seed"))
STREAM = tl.constexpr(TABLE.place("stream"))
#: Ends are forbidden at output positions below this.
MIN_NEW_TOKENS = tl.constexpr(TABLE.place("min_new_tokens"))
#: The row's list of edits: so many biases, by rising id, then, likewise, end-of-text tokens, other
#: ends, and tokens of which one must be drawn. Entries of bad words follow
#: (`engine/sampling/bad_words.py`).
BIASES = tl.constexpr(TABLE.place("logit_bias"))
ENDS = tl.constexpr(TABLE.place("ends"))
STOPS = tl.constexpr(TABLE.place("stops"))
ALLOWED = tl.constexpr(TABLE.place("allowed_token_ids"))
BAD_WORDS = tl.constexpr(TABLE.place("bad_words"))
WORD_BITS = tl.constexpr(sampling.BAD_WORD_BITS)
BEGINS_WORD = tl.constexpr(sampling.BEGINS_WORD)
ENDS_WORD = tl.constexpr(sampling.ENDS_WORD)
#: Above every token.
NOBODY = tl.constexpr(0x7FFFFFFF)
EOS_BOOST_AFTER = tl.constexpr(TABLE.place("eos_boost_after"))
EOS_BOOST_FACTOR = tl.constexpr(TABLE.place("eos_boost_factor"))
MOST_BOOST = tl.constexpr(sampling.MOST_BOOST)
WATERMARK = tl.constexpr(TABLE.place("watermark"))
#: 0: all.
TOP_K = tl.constexpr(TABLE.place("top_k"))
TOP_N = tl.constexpr(TABLE.place("top_n"))
RANKS = tl.constexpr(TABLE.place("ranks"))
#: The kernels keep both up to date.
LENGTH = tl.constexpr(TABLE.place("length"))
PREVIOUS = tl.constexpr(TABLE.place("previous"))
TEMPERATURE = tl.constexpr(TABLE.place("temperature"))
TOP_P = tl.constexpr(TABLE.place("top_p"))
LOG_MIN_P = tl.constexpr(TABLE.place("min_p"))
TYPICAL_P = tl.constexpr(TABLE.place("typical_p"))
REPETITION = tl.constexpr(TABLE.place("repetition_penalty"))
PRESENCE = tl.constexpr(TABLE.place("presence_penalty"))
FREQUENCY = tl.constexpr(TABLE.place("frequency_penalty"))
RELATIVE_FREQUENCY = tl.constexpr(TABLE.place("relative_frequency_penalty"))

# Bits of FLAGS.
DRAWS = tl.constexpr(sampling.DRAWS)
CUTS = tl.constexpr(sampling.CUTS)
EDITED = tl.constexpr(sampling.EDITED)
COUNTED = tl.constexpr(sampling.COUNTED)
#: Such rows' top tokens read the history that the draw read, so it is `join_tops` that notes the
#: token.
PROCESSED_TOPS = tl.constexpr(sampling.PROCESSED_TOPS)

#: Of a row's list of edits, entries that are looked through at once.
_ENTRIES = tl.constexpr(256)

#: A count is two halves of a word: prompt above, output below; each stops at this.
MOST_COUNT = tl.constexpr(0xFFFF)


def pack_counts(
    prompt: Sequence[int], outputs: Sequence[int], vocab_size: int
) -> npt.NDArray[np.int32]:
    """[vocab] occurrences: in the prompt above, in the output below, 16 bits each."""
    most = MOST_COUNT.value
    halves = [
        np.minimum(np.bincount(np.array(tokens, np.int64), minlength=vocab_size), most)
        for tokens in (prompt, outputs)
    ]
    packed: npt.NDArray[np.int32] = (halves[0] << 16 | halves[1]).astype(np.uint32).view(np.int32)
    return packed


@triton.jit
def real(words_ptr, which: tl.constexpr):
    """A float64 of a row's words."""
    return tl.load(words_ptr + which).to(tl.float64, bitcast=True)


@triton.jit
def temperature_of(words_ptr, flags):
    """Float32; 1 for greedy rows."""
    return tl.where((flags & DRAWS) != 0, real(words_ptr, TEMPERATURE), 1.0).to(tl.float32)


@triton.jit
def read_scores(
    logits_ptr,
    mask_ptr,
    b,
    ids,
    first,
    position,
    row,
    words_ptr,
    counts_ptr,
    edit_id_ptr,
    edit_value_ptr,
    vocab_size,
    MOST_EDITS: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """Scores before temperature; -inf beyond the vocabulary.

    To be compiled without fusing multiplications into additions: each step rounds as the
    specification's does.

    Args:
        logits_ptr, words_ptr: the row's.
        mask_ptr: of all rows of the step, of which this is number `b`; None: all may be drawn.
        ids: any shape, from `first` to below `first + SPLIT`.
        counts_ptr, edit_id_ptr, edit_value_ptr: of all rows; `row` is int64.
    """
    scores = tl.load(logits_ptr + ids, mask=ids < vocab_size, other=-float("inf")).to(tl.float32)
    if tl.load(words_ptr + FLAGS) & EDITED:
        scores = _edited(
            scores,
            ids,
            first,
            position,
            words_ptr,
            counts_ptr + row * vocab_size,
            edit_id_ptr + row * MOST_EDITS,
            edit_value_ptr + row * MOST_EDITS,
            vocab_size,
            MOST_EDITS,
            SPLIT,
        )
    if mask_ptr is not None:
        words = (vocab_size + 31) // 32
        at = b.to(tl.int64) * words + ids // 32
        bits = tl.load(mask_ptr + at, mask=ids < vocab_size, other=0)
        # Added, so that NaN and Inf stay what they are and the row is found out.
        scores += tl.where(((bits >> (ids % 32)) & 1) != 0, 0.0, -float("inf"))
    return scores


@triton.jit
def _edited(
    scores,
    ids,
    first,
    position,
    words_ptr,
    counts_ptr,
    edit_id_ptr,
    edit_value_ptr,
    vocab_size,
    MOST_EDITS: tl.constexpr,
    SPAN: tl.constexpr,
):
    """Scores after everything that comes before temperature; all pointers are the row's."""
    flags = tl.load(words_ptr + FLAGS)
    if tl.load(words_ptr + WATERMARK) != 0:
        key = tl.load(words_ptr + PREVIOUS) * WATERMARK_KEY
        green = tl.reshape(span_words(key, first, 0, 0, SPAN), ids.shape) < 0x80000000
        scores = tl.where(green, scores + 2.0, scores)
    if flags & COUNTED:
        scores = _penalised(scores, ids, words_ptr, counts_ptr, vocab_size)
    biases = tl.load(words_ptr + BIASES).to(tl.int32)
    if biases > 0:
        scores = _listed(
            scores, ids, first, 0, biases, edit_id_ptr, edit_value_ptr, MOST_EDITS, SPAN
        )
    ends = biases + tl.load(words_ptr + ENDS).to(tl.int32)
    stops = ends + tl.load(words_ptr + STOPS).to(tl.int32)
    factor = real(words_ptr, EOS_BOOST_FACTOR)
    beyond = position - tl.load(words_ptr + EOS_BOOST_AFTER)
    if (factor != 1.0) & (beyond > 0):
        boost = _boost_of(factor, beyond)
        scores = _boosted(scores, ids, first, biases, ends, edit_id_ptr, boost, MOST_EDITS, SPAN)
    if position < tl.load(words_ptr + MIN_NEW_TOKENS):
        scores = _listed(
            scores, ids, first, biases, ends, edit_id_ptr, edit_value_ptr, MOST_EDITS, SPAN
        )
        scores = _listed(
            scores, ids, first, ends, stops, edit_id_ptr, edit_value_ptr, MOST_EDITS, SPAN
        )
    allowed = stops + tl.load(words_ptr + ALLOWED).to(tl.int32)
    if allowed > stops:
        scores = _only(scores, ids, first, stops, allowed, edit_id_ptr, MOST_EDITS, SPAN)
    words = allowed + tl.load(words_ptr + BAD_WORDS).to(tl.int32)
    if words > allowed:
        scores = _without(
            scores, ids, first, allowed, words, edit_id_ptr, edit_value_ptr, MOST_EDITS, SPAN
        )
    return scores


@triton.jit
def _penalised(scores, ids, words_ptr, counts_ptr, vocab_size):
    counts = tl.load(counts_ptr + ids, mask=ids < vocab_size, other=0)
    out = counts & MOST_COUNT
    both = out + ((counts >> 16) & MOST_COUNT)
    repetition = real(words_ptr, REPETITION).to(tl.float32)
    if repetition != 1.0:
        punished = tl.where(scores < 0, scores * repetition, tl.div_rn(scores, repetition))
        scores = tl.where(counts != 0, punished, scores)
    presence = real(words_ptr, PRESENCE).to(tl.float32)
    scores = tl.where(out > 0, scores - presence, scores)
    frequency = real(words_ptr, FREQUENCY).to(tl.float32)
    scores = scores - out.to(tl.float32) * frequency
    relative = real(words_ptr, RELATIVE_FREQUENCY).to(tl.float32)
    if relative != 0.0:
        length = tl.maximum(tl.load(words_ptr + LENGTH), 1).to(tl.float32)
        scores = scores - tl.div_rn(both.to(tl.float32), length) * relative
    return scores


@triton.jit
def _listed(
    scores,
    ids,
    first,
    begin,
    until,
    edit_id_ptr,
    edit_value_ptr,
    MOST_EDITS: tl.constexpr,
    SPAN: tl.constexpr,
):
    """Add the values of entries `begin` to `until` of the row's list that fall in this span."""
    start, stop = _entries(first, begin, until, edit_id_ptr, MOST_EDITS, SPAN)
    for entry in range(start, stop):
        here = ids == tl.load(edit_id_ptr + entry)
        scores = tl.where(here, scores + tl.load(edit_value_ptr + entry), scores)
    return scores


@triton.jit
def _entries(first, begin, until, edit_id_ptr, MOST_EDITS: tl.constexpr, SPAN: tl.constexpr):
    """Which entries of `begin` to `until`, whose ids rise, fall in this span: from, to below."""
    BLOCK: tl.constexpr = min(MOST_EDITS, _ENTRIES)
    at = tl.arange(0, BLOCK)
    before = tl.zeros((BLOCK,), tl.int32)
    within = tl.zeros((BLOCK,), tl.int32)
    for entry in range(begin, until, BLOCK):
        listed = tl.load(edit_id_ptr + entry + at, mask=entry + at < until, other=-1)
        before += ((listed >= 0) & (listed < first)).to(tl.int32)
        within += ((listed >= first) & (listed < first + SPAN)).to(tl.int32)
    start = begin + tl.sum(before, axis=0)
    return start, start + tl.sum(within, axis=0)


@triton.jit
def _boost_of(factor, beyond):
    """`boost_of` of the specification: by squares, so that both round likewise."""
    power = tl.full((), 1.0, tl.float64)
    square = factor
    while beyond > 0:
        power = tl.where((beyond & 1) != 0, tl.minimum(power * square, MOST_BOOST), power)
        square = tl.minimum(square * square, MOST_BOOST)
        beyond = beyond >> 1
    return (power - 1.0).to(tl.float32)


@triton.jit
def _boosted(
    scores,
    ids,
    first,
    begin,
    until,
    edit_id_ptr,
    boost,
    MOST_EDITS: tl.constexpr,
    SPAN: tl.constexpr,
):
    """Raise the scores of entries `begin` to `until`, but those of -inf."""
    start, stop = _entries(first, begin, until, edit_id_ptr, MOST_EDITS, SPAN)
    for entry in range(start, stop):
        here = (ids == tl.load(edit_id_ptr + entry)) & (scores > -float("inf"))
        scores = tl.where(here, scores + tl.abs(scores) * boost, scores)
    return scores


@triton.jit
def _only(
    scores,
    ids,
    first,
    begin,
    until,
    edit_id_ptr,
    MOST_EDITS: tl.constexpr,
    SPAN: tl.constexpr,
):
    """Add -inf to the scores of all but entries `begin` to `until`."""
    start, stop = _entries(first, begin, until, edit_id_ptr, MOST_EDITS, SPAN)
    allowed = ids < 0
    for entry in range(start, stop):
        allowed = allowed | (ids == tl.load(edit_id_ptr + entry))
    # Added, so that NaN and Inf stay what they are and the row is found out.
    return scores + tl.where(allowed, 0.0, -float("inf"))


@triton.jit
def _without(
    scores,
    ids,
    first,
    begin,
    until,
    edit_id_ptr,
    edit_value_ptr,
    MOST_EDITS: tl.constexpr,
    SPAN: tl.constexpr,
):
    """Add -inf to the scores of tokens that would complete a bad word."""
    BLOCK: tl.constexpr = min(MOST_EDITS, _ENTRIES)
    for start in range(begin, until, BLOCK):
        at = start + tl.arange(0, BLOCK)
        there = at < until
        entry = tl.load(edit_id_ptr + at, mask=there, other=0)
        armed = tl.load(edit_value_ptr + at, mask=there, other=0.0) != 0.0
        token = entry >> WORD_BITS
        bans = armed & ((entry & ENDS_WORD) != 0) & (token >= first) & (token < first + SPAN)
        token = tl.where(bans, token, NOBODY)
        # Few of a word's entries are armed and in this span: each is found by one pass over them.
        banned = tl.min(token, axis=0)
        while banned < NOBODY:
            # Added, so that NaN and Inf stay what they are and the row is found out.
            scores = tl.where(ids == banned, scores + -float("inf"), scores)
            banned = tl.min(tl.where(token > banned, token, NOBODY), axis=0)
    return scores


@triton.jit
def note(words_ptr, counts_ptr, row, edit_id_ptr, edit_value_ptr, token, MOST_EDITS: tl.constexpr):
    """Add a drawn token (not -1) to the row's history.

    Edits are of all rows; the other pointers are the row's.
    """
    flags = tl.load(words_ptr + FLAGS)
    if flags & EDITED:
        tl.store(words_ptr + LENGTH, tl.load(words_ptr + LENGTH) + 1)
        tl.store(words_ptr + PREVIOUS, token.to(tl.int64))
        entries = tl.load(words_ptr + BAD_WORDS).to(tl.int32)
        if entries > 0:
            before = tl.load(words_ptr + BIASES) + tl.load(words_ptr + ENDS)
            before += tl.load(words_ptr + STOPS) + tl.load(words_ptr + ALLOWED)
            at = row * MOST_EDITS + before
            _arm(edit_id_ptr + at, edit_value_ptr + at, entries, token, MOST_EDITS)
    if flags & COUNTED:
        count = tl.load(counts_ptr + token)
        more = tl.where((count & MOST_COUNT) < MOST_COUNT, count + 1, count)
        tl.store(counts_ptr + token, more)


@triton.jit
def _arm(entry_ptr, armed_ptr, entries, token, MOST_EDITS: tl.constexpr):
    """Arm the entries of bad words behind those that were armed and are of `token`."""
    at = tl.arange(0, MOST_EDITS)
    there = (at > 0) & (at < entries)
    entry = tl.load(entry_ptr + at, mask=there, other=BEGINS_WORD)
    previous = tl.load(entry_ptr + at - 1, mask=there, other=-1) >> WORD_BITS
    armed = tl.load(armed_ptr + at - 1, mask=there, other=0.0)
    # Threads read what others write.
    tl.debug_barrier()
    armed = tl.where(previous == token, armed, 0.0)
    tl.store(armed_ptr + at, armed, mask=there & ((entry & BEGINS_WORD) == 0))
