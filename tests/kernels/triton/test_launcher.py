"""Launches of the same kind find the same kernel, and no others do."""

import random
from itertools import combinations
from typing import NamedTuple

import pytest
import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature
from triton.tools.tensor_descriptor import TensorDescriptor

from tokenpod.kernels.gpu.launcher import Launched, kinds, launched


class Pair(NamedTuple):
    first: torch.Tensor
    count: int | None


def _add(x, y, pair, n, scale, BLOCK: tl.constexpr, TWICE: tl.constexpr = False):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    added = tl.load(x + i, mask=i < n, other=0.0) * scale
    if TWICE:
        added *= 2
    tl.store(y + i, added + n, mask=i < n)


ADD = JITFunction(_add)
FLOATS = torch.zeros(64)
ARGUMENTS = [
    *(None, True, False, 0.5, 1.0, 2.0),
    *(0, 1, -1, 2, 15, 16, 17, -16, 2**31 - 1, 2**31 - 16, 2**31, 2**31 + 16, -(2**31), 2**40),
    *(FLOATS, FLOATS[1:], FLOATS[4:], FLOATS.half(), FLOATS.half()[1:], FLOATS.int()),
    *(Pair(FLOATS, 1), Pair(FLOATS[1:], 1), Pair(FLOATS, 16), Pair(FLOATS, None)),
    TensorDescriptor.from_tensor(FLOATS.view(8, 8), [4, 8]),
    TensorDescriptor.from_tensor(FLOATS.view(8, 8), [8, 8]),
    TensorDescriptor.from_tensor(FLOATS.half().view(8, 8), [8, 8]),
]


def test_arguments_of_one_kind_are_one_to_triton():
    """No kernel is launched with arguments for which Triton would compile another one."""
    bind = create_function_from_signature(
        ADD.signature, ADD.params, make_backend(GPUTarget("cuda", 90, 32))
    )

    def specialised(each):
        _, specialisation, _ = bind(each, *(FLOATS, None, 7, 0.5), BLOCK=64)
        return str(specialisation[0])

    alike = 0
    for one, other in combinations(ARGUMENTS, 2):
        if kinds((one,)) == kinds((other,)):
            alike += 1
            assert specialised(one) == specialised(other), (one, other)
    assert alike > 20
    with pytest.raises(TypeError, match="a kernel's argument is of"):
        kinds((object(),))


def test_constants_come_last():
    def mixed(x, BLOCK: tl.constexpr, n):
        pass

    with pytest.raises(AssertionError, match="mixed: constants come last"):
        Launched(JITFunction(mixed))


def test_interpreted_kernels_stay_as_they_are():
    interpreted = triton.jit(_add)
    assert isinstance(launched(interpreted), JITFunction) == isinstance(interpreted, JITFunction)


@pytest.mark.gpu
def test_launches_give_what_triton_gives(monkeypatch):
    """Also those after the first of a kind, which Triton's own launch does not see."""
    add, looked_at = Launched(ADD), []
    run = JITFunction.run
    monkeypatch.setattr(
        JITFunction, "run", lambda self, *a, **named: looked_at.append(1) or run(self, *a, **named)
    )
    chance, x = random.Random(1), torch.randn(4096, device="cuda")
    for _ in range(200):
        first, n = chance.choice([0, 1, 4, 16]), chance.choice([1, 16, 17, 1000, 1024])
        scale, twice = chance.choice([0.5, 1.0, 3.0]), chance.choice([None, False, True])
        named = {"BLOCK": chance.choice([64, 128])} | ({} if twice is None else {"TWICE": twice})
        y = torch.full((2048,), -1.0, device="cuda")
        pair = chance.choice([None, Pair(x, 1)])
        add[(triton.cdiv(n, named["BLOCK"]),)](x[first:], y, pair, n, scale, **named)
        truth = torch.full_like(y, -1.0)
        truth[:n] = x[first : first + n] * scale * (2 if twice else 1) + n
        torch.testing.assert_close(y, truth)
    assert len(looked_at) < 120
