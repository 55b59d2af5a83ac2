"""Every form of attention keeps the same promises at every number of rows, under every window."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from support.kernels.attention_steps import Spec, assert_close, draw_inputs, lay_out, truth
from tokenpod.kernels.backends import cpu
from tokenpod.kernels.backends import triton as triton_backend

#: Query tokens of a step: of as many rows, of one row, or of both.
ROWS = (1, 4, 16, 64, 65, 256, 1024)
FORMS = ("decode", "prompt", "mixed")
WINDOWS = (None, 1, 16, 100)
#: Ranks that divide heads: each has its part of queries, keys and values.
RANKS = (1, 2)
#: Of keys, and of values.
HEAD_DIMS = ((64, 64), (128, 128), (256, 256), (192, 128))
#: What queries are, and whether the pool has 8 bits.
KINDS = (
    (torch.bfloat16, False),
    (torch.float16, False),
    (torch.bfloat16, True),
    (torch.float32, False),
)
HEADS, KV_HEADS = 4, 2


@dataclass(frozen=True)
class Case:
    """One step's attention."""

    form: str
    rows: int
    window: int | None
    dtype: torch.dtype
    scaled: bool
    ranks: int
    head_dim: int
    value_dim: int

    def __str__(self) -> str:
        kind = str(self.dtype).removeprefix("torch.") + ("-8-bits" if self.scaled else "")
        ranks = f"-{self.ranks}-ranks" if self.ranks > 1 else ""
        dims = f"{self.head_dim}-{self.value_dim}"
        return f"{self.form}-{self.rows}-window-{self.window}-{kind}-{dims}{ranks}"

    def specs(self, most: int) -> list[Spec]:
        """Its rows, over contexts of up to `most` tokens, whole and in pieces."""
        prefix = min(self.rows, most) // 2 + 5
        if self.form == "prompt":
            return [Spec(self.rows, self.rows + prefix, piece=37)]
        singles = self.rows if self.form == "decode" else self.rows // 2
        decodes = [
            Spec(1, 1 + (23 * row + 7) % most, piece=None if row % 3 else 9)
            for row in range(singles)
        ]
        rest = self.rows - singles
        return decodes + ([Spec(rest, rest + prefix)] if rest else [])


def pairs() -> list[Case]:
    """Every form with every number of rows and every window, and with all else somewhere."""
    cases = []
    for at, form in enumerate(FORMS):
        for place, rows in enumerate(ROWS):
            for number, window in enumerate(WINDOWS):
                turn = at + place + number
                kind = KINDS[(turn + place // 2) % len(KINDS)]
                ranks = RANKS[(number + place) % 2]
                dims = HEAD_DIMS[(turn + at + number // 2) % len(HEAD_DIMS)]
                cases.append(Case(form, rows, window, *kind, ranks, *dims))
    return cases


def check(case: Case, ops, device, *, most: int, heads: int = HEADS, kv_heads: int = KV_HEADS):
    step = lay_out(case.specs(most), device)
    inputs = draw_inputs(
        *(step, heads, kv_heads, case.head_dim, case.dtype, device),
        scaled=case.scaled,
        value_dim=case.value_dim,
    )
    exact = truth(inputs, step.batch, case.window)
    assert exact.shape == (step.batch.tokens, heads * case.value_dim)
    queries = inputs.q.chunk(case.ranks, 1)
    keys, values = inputs.keys.chunk(case.ranks, 1), inputs.values.chunk(case.ranks, 1)
    got = []
    for rank in range(case.ranks):
        scales = inputs.scales
        if scales is not None:
            scales = type(scales)(*(each.chunk(case.ranks)[rank] for each in scales))
        pools = keys[rank].contiguous(), values[rank].contiguous()
        plan = ops.plan_attention(step.batch, case.window)
        got.append(ops.attention(queries[rank].contiguous(), *pools, plan, scales=scales))
    assert_close(torch.cat(got, 1), exact, case.dtype)


@pytest.fixture(autouse=True)
def poisoned(poisoned_memory):
    """Fresh tensors hold NaN: what a kernel does not write shows."""


#: Interpreted, a program takes milliseconds: a step of hundreds of rows has hundreds.
SMALL = [case for case in pairs() if case.rows <= 65]


@pytest.mark.sampled(5, "slow")
@pytest.mark.parametrize("case", SMALL, ids=str)
def test_kernels(case, device):
    check(case, triton_backend.OPERATIONS, device, most=60)


@pytest.mark.gpu
@pytest.mark.parametrize("case", pairs(), ids=str)
def test_kernels_on_real_shapes(case, device):
    check(case, triton_backend.OPERATIONS, device, most=3000, heads=32, kv_heads=8)


#: Each size of heads and type is a loop that is compiled first: most are slow.
ON_A_CPU = [
    case
    if (case.dtype, case.head_dim) == (torch.float32, 64)
    else pytest.param(case, marks=pytest.mark.slow)
    for case in pairs()
    if not case.scaled and case.head_dim in (64, 192)
]


@pytest.mark.sampled(3, "slow")
@pytest.mark.parametrize("case", ON_A_CPU, ids=str)
def test_a_cpu(case):
    check(case, cpu.OPERATIONS, torch.device("cpu"), most=60)
