"""Every form of product keeps the same promises at every number of rows.

Sums are exact until the result is rounded, once, at one row as at a thousand. A weight in lanes is
rounded to the inputs' type before, once; no weight is written out whole where 64 rows become 65.
"""

from __future__ import annotations

import pytest
import torch

from support.kernels.product_contract import (
    FORMATS,
    RANKS,
    ROUNDED,
    ROWS,
    Case,
    made,
    pairs,
    product_of,
)
from support.kernels.quantised_weights import IN_LANES
from tokenpod.kernels.backends import cpu
from tokenpod.kernels.backends import triton as triton_backend

N, K = 48, 256
#: A layer's shape: more programs than a GPU has room for, splits, several tiles along rows.
REAL_N, REAL_K = 6144, 4096
TYPES = [torch.bfloat16, torch.float16]


@pytest.fixture(autouse=True)
def poisoned(poisoned_memory):
    """Fresh tensors hold NaN: what a kernel does not write shows."""


#: Whose numbers are rounded to inputs' type, scales included; scales of rows multiply sums.
NARROW = [name for name in IN_LANES if name != "int8"]
#: Whose scales or tables bfloat16 rounds, before numbers are.
ROUNDED_SCALES = ("groups8", "nf4")


def most(case: Case) -> float:
    """The error that is allowed, in those of the exact result rounded once."""
    if case.dtype == torch.float32:
        return 25  # of sums in another order
    # Each rank rounds its part, and their sum is rounded.
    ranks = {2: 1.8, 3: 2.1}[case.ranks[1]] if case.ranks[0] == "inputs" else 1.0
    if case.format in ROUNDED:
        # An input that lies between two numbers of the format can become the other one.
        return 1.5 * ranks if case.dtype == torch.bfloat16 else 4 * ranks
    if case.format in ROUNDED_SCALES:
        return 1.8 * ranks if case.dtype == torch.bfloat16 else 10 * ranks
    # Gates of the library's products are rounded before they meet what they open.
    library = case.format in ("dense", "fp8-blocks-wide-inputs")
    return 1.1 * ranks * (2.4 if case.form == "gated" and library else 1.0)


def check(case: Case, outcome) -> None:
    assert outcome.got.dtype == case.dtype
    assert outcome.got.shape == outcome.exact.shape
    assert outcome.error < most(case) * outcome.least, (outcome.error / outcome.least, most(case))


#: Interpreted, a program takes milliseconds, and a norm has one for each row.
QUICK = [case for case in pairs(TYPES) if case.rows <= 16 or (case.rows <= 65 and not case.normed)]
REST = [case for case in pairs(TYPES) if case not in QUICK]


@pytest.mark.sampled(3, "slow")
@pytest.mark.parametrize("case", QUICK, ids=str)
def test_kernels(case, device):
    narrow = case.format in NARROW
    check(case, made(case, triton_backend.OPERATIONS, device, N, K, narrow=narrow))


@pytest.mark.slow
@pytest.mark.parametrize("case", REST, ids=str)
def test_kernels_with_more_rows(case, device):
    narrow = case.format in NARROW
    check(case, made(case, triton_backend.OPERATIONS, device, N, K, narrow=narrow))


@pytest.mark.gpu
@pytest.mark.parametrize("case", pairs(TYPES), ids=str)
def test_kernels_on_a_real_shape(case, device):
    narrow = case.format in NARROW
    outcome = made(case, triton_backend.OPERATIONS, device, REAL_N, REAL_K, narrow=narrow)
    if case.format in ROUNDED:
        # The matrix unit keeps fewer bits of sums of e4m3 than float32 has.
        assert outcome.error < (4.5e-2 if case.format != "int8-rounded" else 1e-2)
    else:
        check(case, outcome)


#: A CPU's products have so many outputs: of few numbers an error says little.
CPU_N = 320


@pytest.mark.sampled(9, "slow")
@pytest.mark.parametrize("case", pairs([torch.float32, torch.bfloat16, torch.float16]), ids=str)
def test_a_cpu(case):
    outcome = made(case, cpu.OPERATIONS, torch.device("cpu"), CPU_N, K)
    """A CPU's gates are an operation of their own, in whatever format."""
    limit = most(case) * (2.4 if case.form == "gated" and case.dtype != torch.float32 else 1)
    assert outcome.error < limit * outcome.least, (outcome.error / outcome.least, limit)


#: Those whose inputs stay as they are and whose blocks have 8 bits have no kernel of their own.
WITHOUT_KERNEL = ("fp8-blocks-wide-inputs",)


@pytest.mark.sampled(4, "slow")
@pytest.mark.parametrize("name", [n for n in FORMATS if n not in ("dense", *WITHOUT_KERNEL)])
def test_no_weight_is_written_out(name, device, monkeypatch):
    case = Case(name, "plain", torch.bfloat16, 65, RANKS[0])
    n, k = 192, 512
    sizes = []
    for maker in ("empty", "zeros", "full", "empty_like"):
        monkeypatch.setattr(torch, maker, _noting(getattr(torch, maker), sizes))
    product, x = product_of(case, triton_backend.OPERATIONS, device, n, k)
    sizes.clear()
    product(x)
    assert max(sizes) < n * k


def _noting(make, sizes):
    def noted(*args, **named):
        tensor = make(*args, **named)
        sizes.append(tensor.numel())
        return tensor

    return noted


@pytest.mark.sampled(3, "slow")
@pytest.mark.parametrize("name", [n for n in FORMATS if n not in ("dense", *WITHOUT_KERNEL)])
def test_a_token_is_the_same_in_any_company(name, device):
    """But for the order of sums: some of its numbers are the other neighbour."""
    tokens = []
    for rows in (1, 64, 65):
        case = Case(name, "plain", torch.bfloat16, ROWS[-1], RANKS[0])
        tokens.append(made(case, triton_backend.OPERATIONS, device, N, K, rows).got[0].double())
    for other in tokens[1:]:
        assert (other - tokens[0]).norm() / tokens[0].norm() < 5e-4
