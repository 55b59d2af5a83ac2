"""Both samplers with rows in them, and logits to draw from."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count

import numpy as np
import torch

from support.kernels.interpreted import DEVICE
from support.sampling.sampling_reference import choose
from tokenpod.core.new_row import NewRow
from tokenpod.core.requests import Request, StoppingParams
from tokenpod.core.sampling import SamplingParams
from tokenpod.engine.cpu.cpu_sampler import CpuSampler
from tokenpod.engine.gpu.device_sampler import DeviceSampler, Launches, SamplerTiles
from tokenpod.engine.sampling.sampler import Sampler, Samples

#: Of log probabilities. A GPU's exponential is good to two units in the last place, and a large
#: vocabulary adds up a hundred thousand of them.
TOLERANCE = 1e-5 if DEVICE.type == "cpu" else 5e-5
INF = float("inf")
SMALL = SamplerTiles(split=64, groups=4, block=64, pivots=4)
#: Parameters of a row, and what else it is set with.
Row = tuple[SamplingParams, dict]


def sampled(**changes: object) -> SamplingParams:
    return SamplingParams(do_sample=True, **changes)


def asking(
    params: SamplingParams,
    *,
    prompt: Sequence[int] = (1,),
    outputs: Sequence[int] = (),
    stream: int = 0,
    logprobs: bool = True,
    top_n: int = 0,
    ranks: bool = False,
    **stopping: object,
) -> NewRow:
    """A sequence that asks for log probabilities, if for nothing else."""
    request = Request(
        [0],
        list(prompt),
        params,
        StoppingParams(max_new_tokens=1, **stopping),
        logprobs=logprobs,
        top_n_tokens=top_n,
        ranks=ranks,
    )
    return NewRow(request, stream, list(outputs))


def set_row(sampler: Sampler, row: int, params: SamplingParams, **asks: object) -> None:
    """Give a row to a sequence; see `asking`."""
    sampler.set_rows([row], [asking(params, **asks)])


def on_device(
    rows: list[Row], vocab: int, tiles: SamplerTiles = SMALL, most_edits: int = 16
) -> DeviceSampler:
    sampler = DeviceSampler(
        rows=len(rows), vocab_size=vocab, device=DEVICE, most_edits=most_edits, tiles=tiles
    )
    seat(sampler, rows)
    return sampler


def on_cpu(rows: list[Row], vocab: int) -> CpuSampler:
    sampler = CpuSampler(rows=len(rows), vocab_size=vocab)
    seat(sampler, rows)
    return sampler


def seat(sampler: Sampler, rows: list[Row]) -> None:
    sampler.set_rows(range(len(rows)), [asking(params, **changes) for params, changes in rows])


def draw(
    sampler: DeviceSampler,
    logits: torch.Tensor,
    rows: torch.Tensor,
    positions: torch.Tensor,
    launches: Launches | None = None,
    masks: torch.Tensor | None = None,
) -> Samples:
    """Draw one token for each row; the samples are on the device."""
    sampler.begin(logits, rows, positions, masks)
    return sampler.finish(logits, rows, positions, launches, masks)


def step(
    sampler: DeviceSampler,
    logits: torch.Tensor,
    position: int = 0,
    rows: list[int] | None = None,
    launches: Launches | None = None,
    masks: torch.Tensor | None = None,
) -> Samples:
    """One step, its results on the host."""
    where = torch.tensor(rows if rows is not None else range(len(logits)), device=DEVICE)
    positions = torch.full_like(where, position)
    bits = None if masks is None else masks.to(DEVICE)
    samples = draw(sampler, logits.to(DEVICE), where, positions, launches, bits)
    return Samples(
        samples.tokens.cpu().clone(),
        samples.logprobs.cpu().clone(),
        samples.top_ids.cpu().clone(),
        samples.top_logprobs.cpu().clone(),
        None if samples.ranks is None else samples.ranks.cpu().clone(),
    )


def near_a_border(row: Row, logits: torch.Tensor, outputs: list[int]) -> bool:
    """A cut or the race is so close that float32 sums in another order may decide it."""
    params, changes = row
    ends = changes.get("eos_token_ids", frozenset()) | changes.get("stop_token_ids", frozenset())
    chosen = choose(
        logits.numpy(),
        params,
        prompt=changes.get("prompt", [1]),
        outputs=outputs,
        stream=changes.get("stream", 0),
        ends=ends,
        eos=changes.get("eos_token_ids", frozenset()),
        min_new_tokens=changes.get("min_new_tokens", 0),
    )
    first, second = np.sort(chosen.fitness)[[-1, -2]]
    return chosen.margin < 2e-6 or first - second < 2e-6 * (1 + abs(float(first)))


def random_logits(n: int, vocab: int, seed: int = 0, scale: float = 3.0) -> torch.Tensor:
    return torch.randn(n, vocab, generator=torch.Generator().manual_seed(seed)) * scale


def halves(n: int, vocab: int, seed: int) -> torch.Tensor:
    """Many ties, zeros of both signs among them."""
    return (random_logits(n, vocab, seed) * 2).round() / 2


def with_holes(n: int, vocab: int, seed: int) -> torch.Tensor:
    """Half of the vocabulary can't be drawn, among it whole splits."""
    logits = random_logits(n, vocab, seed)
    logits[:, 40:] = -INF
    return logits.masked_fill(random_logits(n, vocab, seed + 1) > 1.0, -INF).index_fill(
        1, torch.tensor([1]), 0.0
    )


def wide(n: int, vocab: int, seed: int) -> torch.Tensor:
    return random_logits(n, vocab, seed, scale=40.0)


#: Every processor alone, and all together.
ALONE: list[Row] = [
    (SamplingParams(), {}),
    (SamplingParams(repetition_penalty=1.3), {"prompt": [5, 5, 9]}),
    (SamplingParams(repetition_penalty=0.7), {"prompt": [5, 5, 9], "outputs": [7]}),
    (SamplingParams(presence_penalty=1.5), {"outputs": [5, 5, 9]}),
    (SamplingParams(frequency_penalty=-0.7), {"outputs": [5, 5, 9]}),
    (SamplingParams(relative_frequency_penalty=2.0), {"prompt": [3, 4, 5], "outputs": [5]}),
    (SamplingParams(logit_bias={96: 9.0, 0: -100.0, 64: 8.9, 63: 3.0}), {}),
    (SamplingParams(watermark=True), {"prompt": [8]}),
    (SamplingParams(), {"eos_token_ids": frozenset({3, 90}), "min_new_tokens": 2}),
    (SamplingParams(logit_bias={3: 50.0}), {"stop_token_ids": frozenset({3}), "min_new_tokens": 1}),
    (sampled(), {}),
    (sampled(seed=2**64 - 1), {"stream": 2**32 - 1}),
    (sampled(temperature=0.3), {}),
    (sampled(temperature=1e-45), {}),
    (sampled(temperature=5.0), {}),
    (sampled(top_k=1), {}),
    (sampled(top_k=7), {}),
    (sampled(top_k=96), {}),
    (sampled(top_k=97), {}),
    (sampled(top_k=500), {}),
    (sampled(top_p=1e-6), {}),
    (sampled(top_p=0.5), {}),
    (sampled(top_p=0.9), {}),
    (sampled(top_p=0.9999), {}),
    (sampled(min_p=1.0), {}),
    (sampled(min_p=0.1), {}),
    (sampled(min_p=1e-30), {}),
    (sampled(typical_p=0.2), {}),
    (sampled(typical_p=0.95), {}),
    (sampled(top_k=30, top_p=0.8), {}),
    (sampled(top_k=30, top_p=0.95, min_p=0.05), {}),
    (sampled(top_p=0.95, typical_p=0.5), {}),
    (sampled(min_p=0.01, typical_p=0.5), {}),
    (sampled(watermark=True, top_p=0.9), {}),
    (sampled(temperature=1e-45, typical_p=0.5), {}),
    (
        sampled(
            temperature=1.4,
            top_k=40,
            top_p=0.95,
            min_p=0.01,
            typical_p=0.9,
            repetition_penalty=1.2,
            presence_penalty=0.3,
            frequency_penalty=0.2,
            relative_frequency_penalty=0.5,
            logit_bias={11: 1.0},
            watermark=True,
            seed=5,
        ),
        {
            "prompt": [2, 3, 3],
            "outputs": [4, 4],
            "stop_token_ids": frozenset({4}),
            "min_new_tokens": 3,
        },
    ),
    (SamplingParams(allowed_token_ids=[96, 3, 64, 63, 3]), {}),
    (
        SamplingParams(eos_boost_after=1, eos_boost_factor=1.7),
        {"eos_token_ids": frozenset({3, 70}), "outputs": [5] * 6},
    ),
    (
        SamplingParams(eos_boost_factor=3.0, allowed_token_ids=[2, 3, 61, 64, 65, 90, 96]),
        {
            **{"eos_token_ids": frozenset({3, 90}), "stop_token_ids": frozenset({64, 90})},
            **{"outputs": [5, 5], "min_new_tokens": 3},
        },
    ),
    (
        sampled(eos_boost_factor=1.5, allowed_token_ids=[0, 7, 8, 50, 51, 90], top_p=0.9),
        {"eos_token_ids": frozenset({7}), "outputs": [5, 5]},
    ),
    (
        SamplingParams(bad_words=[[46], [13], [3, 44], [5, 9, 7], [9, 5], [46]]),
        {"prompt": [3], "outputs": [3, 5, 9]},
    ),
    (
        sampled(bad_words=[[5, 5], [5, 5, 8], [44]], allowed_token_ids=[5, 8, 44, 49]),
        {"outputs": [5, 5]},
    ),
]


def mixtures(n: int, vocab: int, seed: int) -> list[Row]:
    random, seeds = np.random.default_rng(seed), count()

    def pick(*values: object) -> object:
        return values[random.integers(len(values))]

    def row() -> Row:
        params = SamplingParams(
            do_sample=bool(random.random() < 0.85),
            temperature=float(pick(1.0, 0.1, 0.7, 2.5)),
            top_k=int(pick(0, 0, 3, 60, vocab)),
            top_p=float(pick(1.0, 1.0, 0.3, 0.9, 0.99)),
            min_p=float(pick(0.0, 0.0, 0.02, 0.2)),
            typical_p=float(pick(1.0, 1.0, 0.3, 0.9)),
            repetition_penalty=float(pick(1.0, 0.5, 1.3)),
            presence_penalty=float(pick(0.0, 1.5, -2.0)),
            frequency_penalty=float(pick(0.0, 0.7)),
            relative_frequency_penalty=float(pick(0.0, 2.0)),
            logit_bias=pick({}, {int(random.integers(vocab)): 4.0, 0: -2.0}),
            watermark=bool(pick(False, False, True)),
            seed=next(seeds),
        )
        prompt, outputs = (random.integers(vocab, size=size).tolist() for size in (4, 2))
        return params, {"prompt": prompt, "outputs": outputs, "stream": int(random.integers(9))}

    return [row() for _ in range(n)]
