"""The whole sampling pipeline for one row, in float64, as its formulas are written."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from tokenpod.core.sampling import SamplingParams

WORD = 2**32


def philox(counter: list[int], key: list[int]) -> list[int]:
    """Philox4x32-10 in Python's integers."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        p0, p1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = p1 // WORD ^ c1 ^ k0, p1 % WORD, p0 // WORD ^ c3 ^ k1, p0 % WORD
        k0, k1 = (k0 + 0x9E3779B9) % WORD, (k1 + 0xBB67AE85) % WORD
    return [c0, c1, c2, c3]


def words(seed: int, stream: int, position: int, ids: np.ndarray) -> np.ndarray:
    """32 random bits for each token id."""
    key = [seed % WORD, seed // WORD]
    blocks = {b: philox([b, position, stream, 0], key) for b in {int(v) // 4 for v in ids}}
    return np.array([blocks[int(v) // 4][int(v) % 4] for v in ids])


def exponential(seed: int, stream: int, position: int, ids: np.ndarray) -> np.ndarray:
    return -np.log((words(seed, stream, position, ids) // 512 + 0.5) * 2.0**-23)


def log_softmax(scores: np.ndarray) -> np.ndarray:
    peak = scores.max()
    return scores - peak - np.log(np.exp(scores - peak).sum())


def softmax(scores: np.ndarray) -> np.ndarray:
    return np.exp(log_softmax(scores))


def green(previous: int, vocab_size: int) -> np.ndarray:
    """Which tokens the watermark favours."""
    key = 15_485_863 * previous
    return words(key, 0, 0, np.arange(vocab_size)) < WORD // 2


def processed(
    logits: np.ndarray,
    params: SamplingParams,
    prompt: list[int],
    outputs: list[int],
    eos: frozenset[int] = frozenset(),
) -> np.ndarray:
    """Everything before temperature, but for the ban on ends and on what is not allowed."""
    scores = logits.astype(np.float64)
    vocab = len(scores)
    out = np.bincount(np.array(outputs, dtype=int), minlength=vocab)
    both = out + np.bincount(np.array(prompt, dtype=int), minlength=vocab)
    if params.watermark:
        scores = scores + 2.0 * green([*prompt, *outputs][-1], vocab)
    penalty = params.repetition_penalty
    punished = np.where(scores < 0, scores * penalty, scores / penalty)
    scores = np.where(both > 0, punished, scores)
    scores = scores - params.presence_penalty * (out > 0) - params.frequency_penalty * out
    scores = scores - params.relative_frequency_penalty * both / max(both.sum(), 1)
    for token, bias in params.logit_bias.items():
        scores[token] += bias
    beyond = max(len(outputs) - params.eos_boost_after, 0)
    power = min(math.exp(min(beyond * math.log(params.eos_boost_factor), 50.0)), 1e6)
    for end in eos if power > 1.0 else ():
        if np.isfinite(scores[end]):
            scores[end] += abs(scores[end]) * (power - 1.0)
    return scores


@dataclass
class Truncation:
    """The mask of what is kept, and how near (in probability or score) any cut was to another."""

    kept: np.ndarray
    margin: float


def truncated(scores: np.ndarray, params: SamplingParams) -> Truncation:
    """What top_k, top_p, min_p and typical_p leave of scores after temperature."""
    alive, margin = np.isfinite(scores), np.inf
    if 0 < params.top_k < len(scores):
        alive &= scores >= np.sort(scores)[-params.top_k]
    for share, typical in ((params.top_p, False), (params.min_p, None), (params.typical_p, True)):
        logp = log_softmax(np.where(alive, scores, -np.inf))
        p = np.exp(logp)
        if typical is None:
            if share:
                floor = np.log(share) + logp.max()
                margin = min(margin, np.abs(logp[alive] - floor).min())
                alive &= logp >= floor
        elif share < 1.0:
            entropy = -(p[alive] * logp[alive]).sum()
            key = np.abs(-logp - entropy) if typical else -logp
            order = np.argsort(key, kind="stable")
            order = order[alive[order]]
            mass = np.cumsum(p[order])
            margin = min(margin, np.abs(mass - share).min())
            count = min(int((mass < share).sum()) + 1, len(order))
            if typical and count < len(order):
                apart = np.diff(key[order[count - 1 : count + 1]])[0]
                tied = scores[order[count]] == scores[order[count - 1]]
                margin = margin if tied else min(margin, apart)
            alive = np.isin(np.arange(len(scores)), order[:count])
    return Truncation(alive, margin)


@dataclass
class Choice:
    """The token, its log probability, each token's fitness in the race, and the cuts' margin."""

    token: int
    logprobs: np.ndarray
    fitness: np.ndarray
    margin: float


def choose(
    logits: np.ndarray,
    params: SamplingParams,
    *,
    prompt: list[int],
    outputs: list[int],
    stream: int = 0,
    ends: frozenset[int] = frozenset(),
    eos: frozenset[int] = frozenset(),
    min_new_tokens: int = 0,
) -> Choice:
    """The next token of one sequence."""
    scores = processed(logits, params, prompt, outputs, eos)
    if len(outputs) < min_new_tokens:
        scores[list(ends)] = -np.inf
    if params.allowed_token_ids:
        scores[np.setdiff1d(np.arange(len(scores)), params.allowed_token_ids)] = -np.inf
    for *before, last in params.bad_words:
        if not before or outputs[-len(before) :] == before:
            scores[last] = -np.inf
    if not params.do_sample:
        return Choice(int(scores.argmax()), log_softmax(scores), scores, np.inf)
    scores = (scores - scores.max()) / params.temperature
    cut = truncated(scores, params)
    logprobs = log_softmax(np.where(cut.kept, scores, -np.inf))
    noise = exponential(params.seed, stream, len(outputs), np.arange(len(scores)))
    fitness = logprobs - np.log(noise)
    return Choice(int(fitness.argmax()), logprobs, fitness, cut.margin)
