"""Attention by Triton kernels equals attention as its definition says, in float64.

The small grid runs everywhere, the large one on a GPU. In every case NaN fills the slots that no
row names and the memory that outputs and scratch are made of, so whatever reads or leaves it shows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch

from tokenpod.engine.batch import ForwardBatch, PagedRows
from tokenpod.kernels import reference
from tokenpod.kernels.ops import NO_OPTIONS, AttentionOptions
from tokenpod.kernels.triton import attention_decode
from tokenpod.kernels.triton.attention import attention, plan_attention
from tokenpod.kernels.triton.attention_tiles import DecodeTile

#: ‖error‖ / ‖result‖.
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 6e-3, torch.float16: 1e-3}


@dataclass(frozen=True)
class Spec:
    """A row: tokens of this step, and tokens in all (0 of both: padding, one token, no context)."""

    tokens: int
    context: int
    #: Lengths of runs: whole, or pieces of this many slots strewn over the pool.
    piece: int | None = None

    @property
    def run(self) -> int:
        return self.piece or max(self.context, 1)


PADDING = Spec(1, 0)

DECODES = [Spec(1, 1), Spec(1, 17), PADDING, Spec(1, 130, piece=7), Spec(1, 64), Spec(1, 63, 1)]
EXTENDS = [
    Spec(2, 2),
    Spec(33, 33),
    Spec(5, 90),
    Spec(40, 71, piece=6),
    Spec(3, 129, piece=64),
    Spec(70, 70),
]


@dataclass(frozen=True)
class Step:
    batch: ForwardBatch
    #: Of the pool, the padding sink included.
    slots: int


def lay_out(specs: list[Spec], device: torch.device) -> Step:
    """A step over these rows; pieces of KV never touch each other or come in order."""
    generator = torch.Generator().manual_seed(7)
    pieces = [
        (row, at, min(at + spec.run, spec.context))
        for row, spec in enumerate(specs)
        for at in range(0, spec.context, spec.run)
    ]
    first = {}
    cursor = 3
    for index in torch.randperm(len(pieces), generator=generator).tolist():
        row, at, end = pieces[index]
        first[row, at] = cursor
        cursor += end - at + 2
    longest = max(spec.context for spec in specs)
    # Rows of the table are not in the order of the step.
    b_row = torch.randperm(len(specs) + 2, generator=generator)[: len(specs)].tolist()
    table = torch.full((len(specs) + 2, longest + 5), cursor, dtype=torch.int32)
    b_runs = [[] for _ in specs]
    starts, positions = [0], []
    for row, at, end in pieces:
        run = (first[row, at], first[row, at] + end - at)
        b_runs[row].append(run)
        table[b_row[row], at:end] = torch.arange(*run)
    for spec in specs:
        starts.append(starts[-1] + spec.tokens)
        positions += range(max(spec.context - spec.tokens, 0), max(spec.context, spec.tokens))
    contexts = [spec.context for spec in specs]
    batch = ForwardBatch(
        t_token=torch.zeros(starts[-1], dtype=torch.int64, device=device),
        t_position=torch.tensor(positions, device=device),
        t_slot=torch.zeros(starts[-1], dtype=torch.int64, device=device),
        b_start=starts,
        b_context=contexts,
        b_runs=b_runs,
        b_row=b_row,
        row_table=table.to(device),
        single_rows=sum(spec.tokens == 1 for spec in specs),
        logit_index=torch.tensor([0], device=device),
        paged=PagedRows(
            *(torch.tensor(x, dtype=torch.int32, device=device) for x in (b_row, starts, contexts))
        ),
    )
    return Step(batch, cursor + 1)


@dataclass(frozen=True)
class Inputs:
    q: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor


def draw_inputs(step, heads, kv_heads, head_dim, dtype, device) -> Inputs:
    """Normal numbers where rows have KV, NaN in all other slots."""
    generator = torch.Generator(device).manual_seed(3)

    def draw(*shape):
        return torch.randn(shape, generator=generator, device=device).to(dtype)

    pools = draw(2, step.slots, kv_heads, head_dim)
    used = torch.zeros(step.slots, dtype=torch.bool)
    for runs in step.batch.b_runs:
        for start, end in runs:
            used[start:end] = True
    pools[:, ~used.to(device)] = float("nan")
    return Inputs(draw(step.batch.tokens, heads, head_dim), pools[0], pools[1])


@pytest.fixture(autouse=True)
def _poisoned_memory(monkeypatch):
    """Whatever is made empty is full of NaN."""
    empty = torch.empty

    def poisoned(*args, **kwargs):
        made = empty(*args, **kwargs)
        return made.fill_(float("nan")) if made.is_floating_point() else made

    monkeypatch.setattr(torch, "empty", poisoned)


def truth(inputs, batch, window, options=NO_OPTIONS):
    plan = reference.plan_attention(batch, window)
    wide = (inputs.q.double(), inputs.keys.double(), inputs.values.double())
    return reference.attention(*wide, plan, options)


def assert_close(got, expected, dtype):
    assert got.dtype == dtype
    error = (got.double() - expected).norm() / expected.norm()
    assert error < TOLERANCE[dtype]  # false of NaN


def agree(step, device, heads=(4, 2), head_dim=64, window=None, dtype=torch.float32, **kwargs):
    inputs = draw_inputs(step, *heads, head_dim, dtype, device)
    plan = plan_attention(step.batch, window)
    got = attention(inputs.q, inputs.keys, inputs.values, plan, **kwargs)
    assert got.shape == (step.batch.tokens, heads[0] * head_dim)
    assert_close(got, truth(inputs, step.batch, window, **kwargs), dtype)


@pytest.mark.parametrize("window", [None, 1, 16, 50, 1000])
@pytest.mark.parametrize("specs", [DECODES, EXTENDS, DECODES[1:5] + EXTENDS[2:5]], ids=len)
def test_every_kind_of_step_under_every_window(specs, window, device):
    agree(lay_out(specs, device), device, window=window)


@pytest.mark.parametrize("heads", [(1, 1), (3, 3), (6, 2), (5, 1), (14, 2), (16, 1)], ids=str)
def test_every_grouping_of_heads(heads, device):
    agree(lay_out(DECODES[1:5] + EXTENDS[2:4], device), device, heads=heads)


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 192, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_every_head_size_and_type(head_dim, dtype, device):
    specs = [DECODES[1], DECODES[3], EXTENDS[2], EXTENDS[3]]
    agree(lay_out(specs, device), device, heads=(2, 1), head_dim=head_dim, dtype=dtype)


@pytest.mark.parametrize(
    ("splits", "block", "window"),
    [(1, 64, None), (2, 64, 40), (3, 16, None), (20, 32, 40), (20, 64, None)],
)
def test_any_number_of_shares_gives_the_same_result(splits, block, window, device):
    """More shares than a row has blocks, than are merged at a time, and just one."""
    step = lay_out(DECODES, device)
    inputs = draw_inputs(step, 2, 1, 64, torch.float32, device)
    out = torch.empty(step.batch.tokens, 128, device=device)
    attention_decode.decode(
        inputs.q,
        inputs.keys,
        inputs.values,
        out,
        step.batch.row_table,
        step.batch.paged,
        len(DECODES),
        window,
        DecodeTile(block=block, warps=4, stages=2, programs=1),
        splits,
    )
    assert_close(out, truth(inputs, step.batch, window), torch.float32)


def test_a_padding_row_gives_zeros(device):
    step = lay_out([PADDING, Spec(1, 9), PADDING], device)
    inputs = draw_inputs(step, 4, 2, 64, torch.float32, device)
    out = attention(inputs.q, inputs.keys, inputs.values, plan_attention(step.batch, None))
    assert out[0].eq(0).all()
    assert out[2].eq(0).all()
    assert out[1].ne(0).all()


def test_contexts_are_read_on_the_device(device):
    """As a graph captured once needs it: the host's lists are of another step."""
    step = lay_out([Spec(1, 9), Spec(1, 40), Spec(1, 200)], device)
    stale = replace(step.batch, b_context=[1] * 3, b_runs=[[(0, 1)]] * 3, b_row=[0] * 3)
    inputs = draw_inputs(step, 4, 2, 64, torch.float32, device)
    out = attention(inputs.q, inputs.keys, inputs.values, plan_attention(stale, None))
    assert_close(out, truth(inputs, step.batch, None), torch.float32)


def test_queries_that_are_a_slice_of_more_heads(device):
    """As they come from the fused product."""
    step = lay_out(DECODES[:3] + EXTENDS[:3], device)
    inputs = draw_inputs(step, 6, 2, 64, torch.float32, device)
    plan = plan_attention(step.batch, None)
    sliced = attention(inputs.q[:, :4], inputs.keys, inputs.values, plan)
    whole = attention(inputs.q[:, :4].contiguous(), inputs.keys, inputs.values, plan)
    assert torch.equal(sliced, whole)


def test_not_a_number_stays_in_its_row(device):
    """The engine fails a row whose results are not numbers, and must see it."""
    specs = [Spec(1, 30), Spec(1, 150), Spec(4, 20), Spec(20, 40)]
    step = lay_out(specs, device)
    inputs = draw_inputs(step, 4, 2, 64, torch.float32, device)
    plan = plan_attention(step.batch, None)
    clean = attention(inputs.q, inputs.keys, inputs.values, plan)
    for bad in (1, 3):
        inputs.values[step.batch.b_runs[bad][0][0]] = float("nan")
    out = attention(inputs.q, inputs.keys, inputs.values, plan)
    for row in range(len(specs)):
        tokens = slice(step.batch.b_start[row], step.batch.b_start[row + 1])
        if row in (1, 3):
            assert out[tokens].isnan().all()
        else:
            assert torch.equal(out[tokens], clean[tokens])


def _options(heads, device):
    generator = torch.Generator(device).manual_seed(4)
    slopes = torch.rand(heads, generator=generator, device=device) * 0.2
    sinks = torch.randn(heads, generator=generator, device=device) + 1
    return {
        "softcap": AttentionOptions(softcap=1.5),
        "alibi": AttentionOptions(alibi_slopes=slopes),
        "sinks": AttentionOptions(sinks=sinks),
        "all": AttentionOptions(softcap=1.5, alibi_slopes=slopes, sinks=sinks),
    }


@pytest.mark.parametrize("name", ["softcap", "alibi", "sinks", "all"])
@pytest.mark.parametrize("window", [None, 20])
def test_every_option(name, window, device):
    step = lay_out(DECODES + EXTENDS, device)
    agree(step, device, heads=(6, 2), window=window, options=_options(6, device)[name])


def test_a_batch_without_rows_on_the_device_is_refused(device):
    step = lay_out(DECODES, device)
    with pytest.raises(ValueError, match="6 rows has no paged rows"):
        plan_attention(replace(step.batch, paged=None), None)


@pytest.mark.parametrize(
    ("heads", "head_dim", "message"),
    [((2, 1), 320, "heads of size 320: at most 256"), ((17, 1), 64, "17 query heads share 1")],
)
def test_heads_beyond_the_limits_are_refused(heads, head_dim, message, device):
    step = lay_out([Spec(1, 2)], device)
    inputs = draw_inputs(step, *heads, head_dim, torch.float32, device)
    with pytest.raises(ValueError, match=message):
        attention(inputs.q, inputs.keys, inputs.values, plan_attention(step.batch, None))
