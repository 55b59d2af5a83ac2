"""Steps over a paged pool, and attention over them compared with its definition in float64."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tokenpod.kernels.attention.triton_attention import attention, plan_attention
from tokenpod.kernels.backends import reference
from tokenpod.kernels.cache.kv_rounding import quantise
from tokenpod.kernels.operations.attention_ops import NO_OPTIONS, KVScales
from tokenpod.kernels.operations.batch import ForwardBatch, PagedRows

#: ‖error‖ / ‖result‖. Compiled, float32 is multiplied as three products of TF32.
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 6e-3, torch.float16: 1e-3}


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
        t_place=torch.tensor(positions, device=device),
        t_slot=torch.zeros(starts[-1], dtype=torch.int64, device=device),
        b_start=starts,
        b_context=contexts,
        b_runs=b_runs,
        b_row=b_row,
        row_table=table.to(device),
        single_rows=sum(spec.tokens == 1 for spec in specs),
        logit_index=torch.tensor([0], device=device),
        paged=PagedRows(
            *(torch.tensor(x, dtype=torch.int32, device=device) for x in (b_row, starts, contexts)),
            t_row=torch.tensor(b_row, device=device).repeat_interleave(
                torch.tensor([spec.tokens for spec in specs], device=device)
            ),
        ),
    )
    return Step(batch, cursor + 1)


@dataclass(frozen=True)
class Inputs:
    q: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    scales: KVScales | None = None


def draw_inputs(
    step, heads, kv_heads, head_dim, dtype, device, *, scaled=False, value_dim=None
) -> Inputs:
    """Normal numbers where rows have KV, NaN in all other slots; of 8 bits if `scaled`."""
    generator = torch.Generator(device).manual_seed(3)

    def draw(*shape):
        return torch.randn(shape, generator=generator, device=device).to(dtype)

    pools = [draw(step.slots, kv_heads, dim) for dim in (head_dim, value_dim or head_dim)]
    used = torch.zeros(step.slots, dtype=torch.bool)
    for runs in step.batch.b_runs:
        for start, end in runs:
            used[start:end] = True
    for pool in pools:
        pool[~used.to(device)] = float("nan")
    q = draw(step.batch.tokens, heads, head_dim)
    if not scaled:
        return Inputs(q, pools[0], pools[1])
    # No powers of two, and different for each head.
    scales = (draw(2, kv_heads).float().abs() + 0.1) / 100
    keys, values = (quantise(x, s) for x, s in zip(pools, scales, strict=True))
    return Inputs(q, keys, values, KVScales(scales[0], scales[1]))


def truth(inputs, batch, window, options=NO_OPTIONS):
    plan = reference.plan_attention(batch, window)
    wide = (inputs.q.double(), inputs.keys.double(), inputs.values.double())
    return reference.attention(*wide, plan, options, inputs.scales)


def assert_close(got, expected, dtype):
    assert got.dtype == dtype
    error = (got.double() - expected).norm() / expected.norm()
    assert error < TOLERANCE[dtype]  # false of NaN


def agree(
    step,
    device,
    heads=(4, 2),
    head_dim=64,
    window=None,
    dtype=torch.float32,
    options=NO_OPTIONS,
    scaled=False,
    value_dim=None,
):
    inputs = draw_inputs(step, *heads, head_dim, dtype, device, scaled=scaled, value_dim=value_dim)
    plan = plan_attention(step.batch, window)
    got = attention(inputs.q, inputs.keys, inputs.values, plan, options, inputs.scales)
    assert got.shape == (step.batch.tokens, heads[0] * (value_dim or head_dim))
    assert_close(got, truth(inputs, step.batch, window, options), dtype)
