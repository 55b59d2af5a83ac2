"""Kernels of state spaces and short convolutions say what the reference says, over ragged rows."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from support.kernels.attention_steps import Spec
from support.kernels.delta_steps import (
    WALKS,
    copied,
    drawn_states,
    let_memories_come_late,
    one_row,
    step_of,
    walk,
    with_ring,
)
from support.kernels.interpreted import INTERPRETED
from support.kernels.space_steps import (
    NORMS,
    SMALL,
    SpaceNet,
    convolution_inputs,
    convolution_states,
    drawn_convolution,
    drawn_space,
    space_inputs,
)
from tokenpod.kernels.attention.triton_attention import prepare_capture
from tokenpod.kernels.mixers import (
    reference_space,
    short_convolution,
    space_kernels,
    triton_space,
)
from tokenpod.kernels.mixers.convolution import plan_recurrent as as_it_came
from tokenpod.kernels.mixers.recurrent_plan import plan_recurrent
from tokenpod.kernels.mixers.triton_convolution import short_convolution as triton_convolution
from tokenpod.kernels.operations.batch import CHUNKS, RaggedRows
from tokenpod.kernels.operations.recurrent_ops import MemoryShape

pytestmark = pytest.mark.compute

#: ‖error‖ / ‖result‖ of what is found and of memories; weights and inputs are the same.
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 1.5e-2, torch.float16: 2e-3}
#: Of Nemotron-H and Granite 4, whose heads share queries and keys; of Falcon-H1.
REAL = {
    "groups": MemoryShape(8, 128, 128, 64, 4),
    "one group": MemoryShape(1, 48, 128, 64, 4),
    "wide": MemoryShape(2, 24, 256, 64, 4),
}
ODD = MemoryShape(key_heads=1, value_heads=3, key_dim=20, value_dim=40, width=3)

SPECS = {
    "decode": [(1, 7), (1, 1), (1, 64), (0, 0)],
    "prompts": [(65, 65), (2, 2), (3, 131)],
    "mixed": [(1, 3), (1, 40), (66, 70), (2, 3)],
}


def error(got, expected):
    wide, known = got.float(), ~expected.isnan()
    assert not wide[known].isnan().any()
    return ((wide - expected)[known].norm() / expected[known].norm().clamp(min=1e-30)).item()


def wide(given):
    """The same numbers in float32."""
    if isinstance(given, torch.Tensor):
        return given.float()
    return type(given)(
        *(
            x._replace(weight=x.weight.float())
            if hasattr(x, "_replace")
            else x.float()
            if isinstance(x, torch.Tensor)
            else x
            for x in given
        )
    )


def live_rows(batch):
    """The batch without its padding, which comes last."""
    live = [i for i, context in enumerate(batch.b_context) if context]
    assert live == [*range(len(live))]
    return replace(batch, b_row=batch.b_row[: len(live)], b_context=batch.b_context[: len(live)])


def check_space(shape, specs, dtype, device, norm="groups"):
    batch = step_of([Spec(max(tokens, 1), context) for tokens, context in specs], device)
    weights = drawn_space(shape, dtype, device, norm=norm, bias=norm != "none")
    states = drawn_states(shape, batch, dtype)
    given = space_inputs(shape, batch.tokens, dtype, device)
    wanted, kept = copied(states), live_rows(batch)
    wanted = wanted._replace(inputs=wanted.inputs.float())
    if batch.single_rows > len(kept.b_row):
        kept = replace(kept, single_rows=len(kept.b_row))
    expected = reference_space.state_space(
        wide(given), wide(weights), shape, wanted, as_it_came(kept)
    )
    out = triton_space.state_space(given, weights, shape, states, plan_recurrent(batch))
    n = kept.b_start[len(kept.b_row)]
    assert error(out[:n], expected[:n]) < TOLERANCE[dtype]
    assert (out[n:] == 0).all()
    assert error(states.memory, wanted.memory) < TOLERANCE[dtype]
    assert torch.equal(states.seen, wanted.seen)
    torch.testing.assert_close(states.inputs.float(), wanted.inputs, rtol=0, atol=0, equal_nan=True)


def check_convolution(channels, width, specs, dtype, device, bias=True):
    batch = step_of([Spec(max(tokens, 1), context) for tokens, context in specs], device)
    weights = drawn_convolution(channels, width, dtype, device, bias=bias)
    states = convolution_states(channels, width, batch, dtype)
    given = convolution_inputs(channels, batch.tokens, dtype, device)
    wanted, kept = copied(states), live_rows(batch)
    expected = short_convolution.one_by_one(given, *weights, wanted, as_it_came(kept))
    out = triton_convolution(given, *weights, states, plan_recurrent(batch))
    n = kept.b_start[len(kept.b_row)]
    assert error(out[:n], expected[:n].float()) < TOLERANCE[dtype]
    assert (out[n:] == 0).all()
    torch.testing.assert_close(states.inputs, wanted.inputs, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("specs", SPECS.values(), ids=SPECS)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_ragged_rows(specs, dtype, device, poisoned_memory):
    check_space(SMALL, specs, dtype, device)
    check_convolution(20, 3, specs, dtype, device)


@pytest.mark.parametrize("norm", [x for x in NORMS if x != "groups"])
def test_other_norms(norm, device, poisoned_memory):
    check_space(SMALL, SPECS["decode"], torch.float32, device, norm)
    check_space(SMALL, SPECS["mixed"], torch.bfloat16, device, norm)


@pytest.mark.parametrize("specs", [SPECS["decode"], SPECS["mixed"]], ids=["decode", "mixed"])
def test_sizes_that_are_no_powers_of_two(specs, device, poisoned_memory):
    check_space(ODD, specs, torch.float32, device, "none")
    check_convolution(24, 2, specs, torch.float32, device, bias=False)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "specs",
    [
        [(1, 9)],
        [(1, 100 + i) for i in range(64)],
        [(1000, 1000)],
        [(1, 40), (1, 1), (512, 3000), (77, 77), (2, 300)],
    ],
    ids=["one", "decode", "prompt", "mixed"],
)
@pytest.mark.parametrize("shape", REAL.values(), ids=REAL)
def test_real_shapes(shape, specs, dtype, device):
    check_space(shape, specs, dtype, device)
    check_convolution(2048, 3, specs, dtype, device)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", REAL.values(), ids=REAL)
def test_real_shapes_in_float32(shape, device):
    check_space(shape, [(1, 40), (1, 1), (512, 3000), (77, 77), (2, 300)], torch.float32, device)


@pytest.mark.parametrize("cut", [(1, 69), (64, 6), (23, 1, 46)], ids=str)
def test_however_a_text_is_cut_its_state_is_the_same(cut, device):
    n, weights = sum(cut), drawn_space(SMALL, device=device)
    given, whole = space_inputs(SMALL, n, device=device), one_row(step_of([Spec(n, n)], device), 2)
    first = drawn_states(SMALL, whole)
    parts = copied(first)
    expected = triton_space.state_space(given, weights, SMALL, first, plan_recurrent(whole))
    found, at = [], 0
    for count in cut:
        batch = one_row(step_of([Spec(count, at + count)], device), 2)
        own = type(given)(*(x[at : at + count] for x in given))
        found.append(triton_space.state_space(own, weights, SMALL, parts, plan_recurrent(batch)))
        at += count
    assert error(torch.cat(found), expected) < TOLERANCE[torch.float32]
    assert error(parts.memory[2], first.memory[2]) < TOLERANCE[torch.float32]
    assert torch.equal(parts.inputs[2], first.inputs[2])
    assert (parts.seen[2] == n).all()


def test_a_position_that_is_computed_again_changes_nothing(device):
    batch, weights = step_of([Spec(1, 5), Spec(1, 9)], device), drawn_space(SMALL, device=device)
    states, given = drawn_states(SMALL, batch), space_inputs(SMALL, 2, device=device)
    plan = plan_recurrent(batch)
    first = triton_space.state_space(given, weights, SMALL, states, plan)
    kept = copied(states)
    again = triton_space.state_space(given, weights, SMALL, states, plan)
    assert error(again, first) < TOLERANCE[torch.float32]
    for old, new in zip(kept, states, strict=True):
        torch.testing.assert_close(old, new, rtol=0, atol=0, equal_nan=True)


def test_a_prompt_may_begin_where_there_is_room_for_single_rows(device):
    """As in captured steps, whose rows of one token are fewer than they have room for."""
    batch, weights = step_of([Spec(1, 3), Spec(9, 12)], device), drawn_space(SMALL, device=device)
    given, wanted = space_inputs(SMALL, 10, device=device), drawn_states(SMALL, batch)
    states, plan = copied(wanted), plan_recurrent(batch)
    expected = triton_space.state_space(given, weights, SMALL, wanted, plan)
    nobody = torch.zeros(3, dtype=torch.int32, device=device)
    paged = replace(
        batch.paged,
        b_row=torch.cat([batch.paged.b_row[:1], nobody]),
        b_context=torch.cat([batch.paged.b_context[:1], nobody]),
    )
    roomy = replace(plan, single_rows=4, paged=paged)
    out = triton_space.state_space(given, weights, SMALL, states, roomy)
    assert torch.equal(out, expected)
    for got, own in zip(states, wanted, strict=True):
        torch.testing.assert_close(got, own, rtol=0, atol=0, equal_nan=True)


def test_captured_steps_have_room_for_chunks(device):
    """Rows with several tokens come as chunks in the step's integers, filled up with empty ones."""
    specs = [Spec(1, 3), Spec(66, 70), Spec(2, 3)]
    batch, weights = step_of(specs, device), drawn_space(SMALL, device=device)
    tiles = prepare_capture([CHUNKS], 8)
    room = torch.full((tiles.count(80),), 7, dtype=torch.int32)
    rows = RaggedRows(batch.b_start, batch.b_context, batch.b_runs, batch.b_row, batch.single_rows)
    assert tiles.fill(rows, room.numpy())
    paged = replace(batch.paged, tiles=tiles.by_kind(room.to(device)))
    plans = plan_recurrent(batch), plan_recurrent(replace(batch, paged=paged))
    states = drawn_states(SMALL, batch)
    wanted, given = copied(states), space_inputs(SMALL, batch.tokens, device=device)
    expected = triton_space.state_space(given, weights, SMALL, wanted, plans[0])
    out = triton_space.state_space(given, weights, SMALL, states, plans[1])
    assert torch.equal(out, expected)
    short, said = drawn_convolution(20, 3, device=device), convolution_inputs(20, batch.tokens)
    rings = [convolution_states(20, 3, batch) for _ in plans]
    found = [
        triton_convolution(said.to(device), *short, own, plan)
        for own, plan in zip(rings, plans, strict=True)
    ]
    assert torch.equal(*found)
    for got, own in zip((*states, *rings[0]), (*wanted, *rings[1]), strict=True):
        torch.testing.assert_close(got, own, rtol=0, atol=0, equal_nan=True)


SHAPES = [SMALL, *(pytest.param(x, marks=pytest.mark.gpu) for x in REAL.values())]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("steps", WALKS.values(), ids=WALKS)
def test_wrong_drafts_leave_nothing(shape, steps, device):
    net = SpaceNet(triton_space, shape, device)
    (found, states), (expected, plain) = walk(net, steps, plan_recurrent)
    assert error(found, expected) < TOLERANCE[torch.float32]
    assert error(states.memory[2], plain.memory[2]) < TOLERANCE[torch.float32]
    assert torch.equal(states.seen, plain.seen)


@pytest.mark.skipif(not INTERPRETED, reason="kernels are interpreted")
def test_memories_are_read_when_they_have_caught_up(monkeypatch):
    """A launch may begin before those before it have ended: all but what it waits for."""
    net = SpaceNet(triton_space, SMALL)
    let_memories_come_late(monkeypatch, triton_space, space_kernels)
    steps = WALKS["none for a while"]
    (found, states), (expected, plain) = walk(net, steps, plan_recurrent)
    assert error(found, expected) < TOLERANCE[torch.float32]
    assert error(states.memory[2], plain.memory[2]) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_with_drafts_beside_others(shape, dtype, device, poisoned_memory):
    """In one step: rows that decode, are behind, have drafts, and have a prompt's piece."""
    specs = [Spec(1, 9), Spec(1, 4), Spec(4, 12), Spec(3, 20), Spec(70, 74)]
    batch = replace(step_of(specs, device), b_drafts=[0, 0, 3, 2, 0])
    weights = drawn_space(shape, dtype, device)
    states = with_ring(drawn_states(shape, batch, dtype), shape, 4, beside=1)
    states.inputs[:, shape.channels :] = space_inputs(shape, 99, dtype, device).step[:1, :1]
    behind = torch.tensor([2, 0, 3, 0, 4], device=device, dtype=torch.int32)
    states.seen[torch.tensor(batch.b_row, device=device)] -= behind[:, None]
    given, wanted = space_inputs(shape, batch.tokens, dtype, device), copied(states)
    wanted = wanted._replace(inputs=wanted.inputs.float())
    expected = reference_space.state_space(
        wide(given), wide(weights), shape, wanted, as_it_came(batch)
    )
    out = triton_space.state_space(given, weights, shape, states, plan_recurrent(batch))
    assert error(out, expected) < TOLERANCE[dtype]
    assert error(states.memory, wanted.memory) < TOLERANCE[dtype]
    assert torch.equal(states.seen, wanted.seen)
    torch.testing.assert_close(states.inputs.float(), wanted.inputs, rtol=0, atol=0, equal_nan=True)
