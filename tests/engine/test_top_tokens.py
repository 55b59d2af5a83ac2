"""Top tokens of what is drawn from: both samplers beside TGI's rules, and beside each other."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import msgspec
import numpy as np
import pytest
import torch

from support.kernels.interpreted import DEVICE, INTERPRETED
from support.sampling.samplers import (
    ALONE,
    INF,
    SMALL,
    TOLERANCE,
    Row,
    draw,
    halves,
    mixtures,
    near_a_border,
    on_cpu,
    on_device,
    random_logits,
    sampled,
    seat,
    step,
    wide,
    with_holes,
)
from support.sampling.tgi_sampling import best_of, distribution
from tokenpod.core.sampling import SamplingParams
from tokenpod.engine.gpu.device_sampler import Launches, SamplerTiles
from tokenpod.engine.steps.first_steps import worst_step

pytestmark = pytest.mark.compute


@dataclass(frozen=True)
class Report:
    """What a sampler says of one row in one step."""

    token: int
    logprob: float
    ids: list[int]
    logprobs: list[float]


def of_processed(row: Row, **changes: object) -> Row:
    params, asks = row
    return msgspec.structs.replace(params, top_of_processed=True), {**asks, **changes}


def cpu_steps(rows: list[Row], steps: list[torch.Tensor]) -> Iterator[list[Report]]:
    sampler = on_cpu(rows, steps[0].shape[1])
    for position, logits in enumerate(steps):
        got = sampler.sample(logits, list(range(len(rows))), [position] * len(rows))
        tops = {at: (ids, values) for at, ids, values in got.tops}
        tokens, logprobs = got.tokens.tolist(), got.logprobs.tolist()
        yield [Report(tokens[i], logprobs[i], *tops.get(i, ([], []))) for i in range(len(rows))]


def device_steps(
    rows: list[Row], steps: list[torch.Tensor], tiles: SamplerTiles = SMALL
) -> Iterator[list[Report]]:
    sampler = on_device(rows, steps[0].shape[1], tiles)
    for position, logits in enumerate(steps):
        got = step(sampler, logits, position)
        ids, values = got.top_ids.tolist(), got.top_logprobs.tolist()
        sizes = [(row.index(-1) if -1 in row else len(row)) for row in ids]
        tokens, logprobs = got.tokens.tolist(), got.logprobs.tolist()
        yield [
            Report(tokens[i], logprobs[i], ids[i][:size], values[i][:size])
            for i, size in enumerate(sizes)
        ]


Steps = Callable[[list[Row], list[torch.Tensor]], Iterator[list[Report]]]
both = pytest.mark.parametrize("steps_of", [cpu_steps, device_steps], ids=["cpu", "device"])


# -- TGI's rules -------------------------------------------------------------------------------


def tgi_rows(n: int, vocab: int, seed: int, *, cuts: bool = True) -> list[Row]:
    """Rows as a router asks for them, and with biases; `cuts` by mass part ties at random."""
    random = np.random.default_rng(seed)

    def pick(*values: object) -> object:
        return values[random.integers(len(values))]

    def row(at: int) -> Row:
        warped = {
            "do_sample": True,
            "seed": at,
            "temperature": float(pick(1.0, 1.0, 0.3, 0.7, 2.5)),
            "top_k": int(pick(0, 0, 1, 2, 5, 40, vocab, vocab + 1)),
            "top_p": float(pick(1.0, 1.0, 0.3, 0.9)) if cuts else 1.0,
            "typical_p": float(pick(1.0, 1.0, 0.3, 0.9)) if cuts else 1.0,
        }
        params = SamplingParams(
            repetition_penalty=float(pick(1.0, 0.5, 1.3)),
            relative_frequency_penalty=float(pick(0.0, 2.0, -1.0)),
            logit_bias=pick({}, {int(random.integers(vocab)): 4.0, 0: -100.0}),
            watermark=bool(pick(False, False, True)),
            **(warped if random.random() < 0.75 else {}),
        )
        prompt = random.integers(vocab, size=4).tolist()
        outputs = random.integers(vocab, size=int(random.integers(3))).tolist()
        top_n = int(random.integers(1, 21))
        return of_processed((params, {"prompt": prompt, "outputs": outputs}), top_n=top_n)

    return [row(at) for at in range(n)]


def check_by_tgi_rules(steps_of: Steps, rows: list[Row], steps: list[torch.Tensor]) -> int:
    """How many reports had ties beyond their last place."""
    tied = 0
    outputs = [list(asks["outputs"]) for _, asks in rows]
    for logits, reports in zip(steps, steps_of(rows, steps), strict=True):
        for (params, asks), scores, out, report in zip(rows, logits, outputs, reports, strict=True):
            logprobs = distribution(scores, params, asks["prompt"], out)
            ids = best_of(logprobs, asks["top_n"])
            exact = report.ids == ids and [report.logprob, *report.logprobs] == pytest.approx(
                logprobs[[report.token, *ids]].tolist(), rel=TOLERANCE, abs=TOLERANCE
            )
            said = f"{params}, {asks}, {out}: {report}, {ids}"
            assert exact or near_a_border((params, asks), scores, out), said
            tied += len(ids) > asks["top_n"]
            out.append(report.token)
    return tied


def rows_for(steps_of: Steps) -> int:
    """A row takes an interpreted kernel half a second."""
    return 150 if steps_of is cpu_steps or not INTERPRETED else 4


@both
@pytest.mark.parametrize("vocab", [23, pytest.param(130, marks=pytest.mark.gpu)])
def test_tokens_and_top_tokens_are_of_one_distribution_by_tgis_rules(steps_of, vocab):
    n = rows_for(steps_of)
    steps = [random_logits(n, vocab, seed=t) for t in range(2)]
    check_by_tgi_rules(steps_of, tgi_rows(n, vocab, seed=vocab), steps)


@both
def test_all_ties_at_the_last_place_are_reported(steps_of):
    n, vocab = rows_for(steps_of), 60
    steps = [halves(n, vocab, seed=t) for t in range(2)]
    assert check_by_tgi_rules(steps_of, tgi_rows(n, vocab, seed=1, cuts=False), steps) > n // 30


# -- single rules ------------------------------------------------------------------------------


def reports_of(steps_of: Steps, row: Row, logits: list[float]) -> Report:
    ((report,),) = steps_of([row], [torch.tensor([logits])])
    return report


@both
def test_five_top_tokens_of_a_row_with_top_k_2_are_two(steps_of):
    row = of_processed((sampled(top_k=2, temperature=0.5), {"top_n": 5}))
    report = reports_of(steps_of, row, [1.0, 3.0, 0.0, 2.5])
    assert report.ids == [1, 3]
    assert report.logprobs == pytest.approx(torch.tensor([6.0, 5.0]).log_softmax(0).tolist())


@both
def test_ties_end_at_64_top_tokens(steps_of):
    report = reports_of(steps_of, of_processed((sampled(), {"top_n": 2})), [0.0] * 100)
    assert report.ids == list(range(64))


@both
@pytest.mark.parametrize("params", [SamplingParams(), sampled(), sampled(temperature=1e-45)])
def test_tokens_that_cannot_be_drawn_are_not_reported(steps_of, params):
    ends = {"eos_token_ids": frozenset({1}), "min_new_tokens": 1}
    row = of_processed((params, {"top_n": 4, **ends}))
    report = reports_of(steps_of, row, [30.0, 99.0, -INF, 0.5])
    assert report.ids == ([0] if params.temperature < 1 else [0, 3])


@both
def test_of_a_greedy_row_without_edits_they_are_those_of_the_raw_logits(steps_of):
    logits = halves(1, 97, seed=3)
    ((raw,),) = steps_of([(SamplingParams(), {"top_n": 9})], [logits])
    ((processed,),) = steps_of([of_processed((SamplingParams(), {"top_n": 9}))], [logits])
    assert processed.ids == raw.ids
    assert processed.logprobs == pytest.approx(raw.logprobs, rel=TOLERANCE)


@both
def test_the_token_has_the_same_log_probability_among_the_top_tokens(steps_of):
    rows = [of_processed(row, top_n=50) for row in ALONE[1::3]]
    for report in next(steps_of(rows, [random_logits(len(rows), 50)])):
        assert report.logprobs[report.ids.index(report.token)] == report.logprob


@both
@pytest.mark.parametrize("poison", [float("nan"), INF])
def test_a_row_that_holds_nan_or_inf_has_none(steps_of, poison):
    rows = [of_processed(ALONE[i], top_n=3) for i in (0, 1, 10, 29)]
    logits = random_logits(4, 97)
    logits[::2, 7] = poison
    reports = next(steps_of(rows, [logits]))
    assert [bool(report.ids) for report in reports] == [False, True, False, True]


# -- beside other rows -------------------------------------------------------------------------


@both
def test_asking_for_them_changes_neither_tokens_nor_other_rows(steps_of):
    some = (1, 30) if INTERPRETED and steps_of is device_steps else range(len(ALONE))
    raw = [(ALONE[i][0], {**ALONE[i][1], "top_n": 4}) for i in some]
    mixed = [of_processed(row) if at % 2 else row for at, row in enumerate(raw)]
    steps = [halves(len(raw), 97, seed=t) for t in range(2)]
    for before, after in zip(steps_of(raw, steps), steps_of(mixed, steps), strict=True):
        assert [(r.token, r.logprob) for r in after] == [(r.token, r.logprob) for r in before]
        assert after[::2] == before[::2]


@both
def test_bits_do_not_depend_on_the_batch(steps_of):
    some = (1, 12, 29) if INTERPRETED else (1, 10, 12, 16, 29, 35)
    rows = [of_processed(ALONE[i], top_n=6) for i in some]
    logits = random_logits(len(rows), 97)
    together = next(steps_of(rows, [logits]))
    for at, row in enumerate(rows):
        assert next(steps_of([row], [logits[at : at + 1]])) == [together[at]]


def test_a_row_taken_again_knows_nothing_of_its_last_sequence():
    row = of_processed((SamplingParams(repetition_penalty=5.0), {"prompt": [0]}), top_n=3)
    sampler = on_device([row], 3)
    logits = torch.tensor([[0.0, 2.0, 1.0]])
    assert [int(step(sampler, logits, t).tokens[0]) for t in range(2)] == [1, 2]
    sampler.clear_row(0)
    seat(sampler, [row])
    assert step(sampler, logits).top_ids[0, :3].tolist() == [1, 2, 0]


def test_their_launch_follows_the_live_rows():
    asks = {"top_n": 2}
    rows = [(sampled(), asks), of_processed((sampled(), asks)), of_processed((sampled(), {}))]
    sampler = on_device(rows, 50)
    assert sampler.launches == Launches(draws=True, tops=True, processed_tops=True)
    sampler.clear_row(1)
    assert sampler.launches == Launches(draws=True, tops=True, processed_tops=False)


def test_the_warm_up_launches_all_that_serving_may():
    (new,) = worst_step(1, 1, 8, scattered=False).asks
    sampler = on_device([(new.request.sampling, {"top_n": new.request.top_n_tokens})], 50)
    assert sampler.launches == Launches(draws=True, tops=True, processed_tops=True)


# -- the device beside the CPU -----------------------------------------------------------------


def check_beside_the_cpu(
    rows: list[Row], steps: list[torch.Tensor], tiles: SamplerTiles = SMALL
) -> None:
    """Every step's reports equal the CPU's, unless rounding explains that they don't."""
    outputs = [list(asks.get("outputs", [])) for _, asks in rows]
    gone: set[int] = set()
    reports = zip(cpu_steps(rows, steps), device_steps(rows, steps, tiles), strict=True)
    for logits, (want, got) in zip(steps, reports, strict=True):
        for at in sorted(set(range(len(rows))) - gone):
            values = want[at].logprobs
            exact = (want[at].token, want[at].ids) == (got[at].token, got[at].ids)
            exact = exact and got[at].logprobs == pytest.approx(
                values, rel=TOLERANCE, abs=TOLERANCE
            )
            if not exact:
                said = f"row {at}, {rows[at][0]}: {want[at]}, {got[at]}"
                assert near_a_border(rows[at], logits[at], outputs[at]), said
                gone.add(at)  # its history is another one now
            outputs[at].append(want[at].token)
    assert len(gone) < len(rows) / 4


def some_of_processed(rows: list[Row]) -> list[Row]:
    """Three quarters of these rows; all report tokens."""
    asked = [(params, {**asks, "top_n": 1 + at % 20}) for at, (params, asks) in enumerate(rows)]
    return [of_processed(row) if at % 4 else row for at, row in enumerate(asked)]


@pytest.mark.sampled(3, "gpu")
@pytest.mark.parametrize(("make", "every"), [(halves, 2), (with_holes, 7), (wide, 9)])
def test_every_processor_alone_and_all_together_report_the_same(make: Callable, every: int):
    rows = some_of_processed(ALONE)[-1 :: -every if INTERPRETED else -1]
    check_beside_the_cpu(rows, [make(len(rows), 97, seed=0)])


@pytest.mark.parametrize(
    "tiles",
    [SMALL, pytest.param(SamplerTiles(split=128, groups=8), marks=pytest.mark.gpu)],
    ids=["64", "128"],
)
def test_mixtures_of_parameters_report_the_same(tiles: SamplerTiles):
    n = 3 if INTERPRETED else 60
    rows = some_of_processed(mixtures(n, 130, seed=7))
    check_beside_the_cpu(rows, [random_logits(n, 130, seed=t) for t in range(2)], tiles)


@pytest.mark.gpu
@pytest.mark.parametrize("make", [random_logits, halves, wide])
def test_a_large_vocabulary_reports_the_same(make: Callable):
    rows = some_of_processed(ALONE + mixtures(64, 128_256, seed=0))
    steps = [make(len(rows), 128_256, seed=t) for t in range(3)]
    check_beside_the_cpu(rows, steps, SamplerTiles())


@pytest.mark.gpu
def test_a_large_vocabulary_follows_tgis_rules():
    rows = tgi_rows(64, 128_256, seed=0)
    steps = [random_logits(64, 128_256, seed=t) for t in range(3)]
    check_by_tgi_rules(partial(device_steps, tiles=SamplerTiles()), rows, steps)


@pytest.mark.gpu
def test_a_captured_step_reports_what_an_eager_one_does():
    assert DEVICE.type == "cuda"
    rows = some_of_processed(ALONE)
    n = len(rows)
    eager, replayed = on_device(rows, 5000, SamplerTiles()), on_device(rows, 5000, SamplerTiles())
    where, positions = torch.arange(n, device=DEVICE), torch.zeros(n, dtype=torch.int64).to(DEVICE)
    logits = random_logits(n, 5000).to(DEVICE)
    everything = Launches(draws=True, tops=True, processed_tops=True)
    draw(replayed, logits, where, positions, everything)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        held = draw(replayed, logits, where, positions, everything)
    seat(replayed, rows)
    for position in range(3):
        positions.fill_(position)
        graph.replay()
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        want = draw(eager, logits, where, positions)
        torch.cuda.set_sync_debug_mode("default")
        for name in ("tokens", "logprobs", "top_ids", "top_logprobs"):
            assert torch.equal(getattr(want, name), getattr(held, name)), f"{name} at {position}"
