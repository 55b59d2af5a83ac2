"""The kernels of the gated delta net say what the reference says, over ragged rows."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from support.kernels.attention_steps import Spec
from support.kernels.delta_steps import (
    KIMI,
    SMALL,
    WALKS,
    Delta,
    copied,
    drawn_inputs,
    drawn_states,
    drawn_weights,
    let_memories_come_late,
    one_row,
    run,
    some,
    step_of,
    walk,
    with_ring,
)
from support.kernels.interpreted import INTERPRETED
from tokenpod.kernels.attention.triton_attention import prepare_capture
from tokenpod.kernels.mixers import delta_step, reference_delta, triton_delta
from tokenpod.kernels.mixers.recurrent_plan import plan_recurrent
from tokenpod.kernels.operations.batch import CHUNKS, RaggedRows
from tokenpod.kernels.operations.recurrent_ops import MemoryShape

pytestmark = pytest.mark.compute

#: ‖error‖ / ‖result‖ of what heads find and of memories; weights and inputs are the same.
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 1.5e-2, torch.float16: 2e-3}
REAL = MemoryShape(key_heads=16, value_heads=32, key_dim=128, value_dim=128, width=4)
#: Kimi Linear's.
REAL_KIMI = MemoryShape(key_heads=32, value_heads=32, key_dim=128, value_dim=128, width=4)
ODD = MemoryShape(key_heads=1, value_heads=3, key_dim=20, value_dim=40, width=3)
ODD_KIMI = MemoryShape(key_heads=3, value_heads=3, key_dim=20, value_dim=40, width=3)

SHAPES = [
    SMALL,
    KIMI,
    *(pytest.param(each, marks=pytest.mark.gpu) for each in (REAL, REAL_KIMI)),
]

SPECS = {
    "decode": [(1, 7), (1, 1), (1, 64), (0, 0)],
    "prompts": [(65, 65), (2, 2), (3, 131)],
    "mixed": [(1, 3), (1, 40), (66, 70), (2, 3)],
}


@pytest.fixture(params=[SMALL, KIMI], ids=["one decay", "decays of numbers"])
def shape(request):
    return request.param


def error(got, expected):
    wide, known = got.float(), ~expected.isnan()
    assert not wide[known].isnan().any()
    return ((wide - expected)[known].norm() / expected[known].norm()).item()


def check(shape, specs, dtype, device):
    padded = [Spec(max(tokens, 1), context) for tokens, context in specs]
    batch = step_of(padded, device)
    weights = drawn_weights(shape, dtype, device)
    states, given = (
        drawn_states(shape, batch, dtype),
        drawn_inputs(shape, batch.tokens, dtype, device),
    )
    # What the definition says of the same numbers, in float32.
    exact = weights._replace(conv=weights.conv.float())
    exact = exact._replace(norm=exact.norm._replace(weight=exact.norm.weight.float()))
    wanted = copied(states)
    wanted = wanted._replace(inputs=wanted.inputs.float())
    live = [i for i, context in enumerate(batch.b_context) if context]
    kept = replace(batch, b_row=batch.b_row[: len(live)], b_context=batch.b_context[: len(live)])
    assert live == [*range(len(live))] or batch.tokens == batch.rows
    if batch.tokens == batch.rows:
        kept = replace(
            batch,
            b_row=[batch.b_row[i] for i in live],
            b_context=[batch.b_context[i] for i in live],
        )
    wide = type(given)(*(x.float() for x in given))
    expected = run(reference_delta, wide, exact, shape, wanted, kept)
    out = run(triton_delta, given, weights, shape, states, batch, plan_recurrent)
    n = kept.b_start[len(live)]
    assert error(out[:n], expected[:n]) < TOLERANCE[dtype]
    assert (out[n:] == 0).all()
    assert error(states.memory, wanted.memory) < TOLERANCE[dtype]
    assert torch.equal(states.seen, wanted.seen)
    torch.testing.assert_close(states.inputs.float(), wanted.inputs, rtol=0, atol=0, equal_nan=True)


@pytest.mark.sampled(5, "slow")
@pytest.mark.parametrize("specs", SPECS.values(), ids=SPECS)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_ragged_rows(shape, specs, dtype, device, poisoned_memory):
    check(shape, specs, dtype, device)


@pytest.mark.parametrize("shape", [ODD, ODD_KIMI], ids=str)
@pytest.mark.parametrize("specs", [SPECS["decode"], SPECS["mixed"]], ids=["decode", "mixed"])
def test_sizes_that_are_no_powers_of_two(shape, specs, device, poisoned_memory):
    check(shape, specs, torch.float32, device)


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
@pytest.mark.parametrize("shape", [REAL, REAL_KIMI], ids=str)
def test_real_shapes(shape, specs, dtype, device):
    check(shape, specs, dtype, device)


@pytest.mark.parametrize("cut", [(1, 69), (64, 6), (23, 1, 46)], ids=str)
def test_however_a_text_is_cut_its_state_is_the_same(cut, device, shape):
    n, weights = sum(cut), drawn_weights(shape, device=device)
    given, whole = drawn_inputs(shape, n, device=device), one_row(step_of([Spec(n, n)], device), 2)
    first = drawn_states(shape, whole)
    parts = copied(first)
    plan = plan_recurrent
    expected = run(triton_delta, given, weights, shape, first, whole, plan)
    found, at = [], 0
    for count in cut:
        batch = one_row(step_of([Spec(count, at + count)], device), 2)
        own = some(given, at, at + count)
        found.append(run(triton_delta, own, weights, shape, parts, batch, plan))
        at += count
    assert error(torch.cat(found), expected) < TOLERANCE[torch.float32]
    assert error(parts.memory[2], first.memory[2]) < TOLERANCE[torch.float32]
    assert torch.equal(parts.inputs[2], first.inputs[2])
    assert (parts.seen[2] == n).all()


def test_a_position_that_is_computed_again_changes_nothing(device, shape):
    batch, weights = step_of([Spec(1, 5), Spec(1, 9)], device), drawn_weights(shape, device=device)
    states, given = drawn_states(shape, batch), drawn_inputs(shape, 2, device=device)
    first = run(triton_delta, given, weights, shape, states, batch, plan_recurrent)
    kept = copied(states)
    again = run(triton_delta, given, weights, shape, states, batch, plan_recurrent)
    assert error(again, first) < TOLERANCE[torch.float32]
    for old, new in zip(kept, states, strict=True):
        torch.testing.assert_close(old, new, rtol=0, atol=0, equal_nan=True)


@pytest.mark.sampled(3, "slow")
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("steps", WALKS.values(), ids=WALKS)
def test_wrong_drafts_leave_nothing(shape, steps, device):
    net = Delta(triton_delta, shape, device)
    (found, states), (expected, plain) = walk(net, steps, plan_recurrent)
    assert error(found, expected) < TOLERANCE[torch.float32]
    assert error(states.memory[2], plain.memory[2]) < TOLERANCE[torch.float32]
    assert torch.equal(states.seen, plain.seen)


@pytest.mark.skipif(not INTERPRETED, reason="kernels are interpreted")
def test_memories_are_read_when_they_have_caught_up(monkeypatch):
    """A launch may begin before those before it have ended: all but what it waits for."""
    net = Delta(triton_delta, SMALL)
    let_memories_come_late(monkeypatch, triton_delta, delta_step)
    steps = WALKS["none for a while"]
    (found, states), (expected, plain) = walk(net, steps, plan_recurrent)
    assert error(found, expected) < TOLERANCE[torch.float32]
    assert error(states.memory[2], plain.memory[2]) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_with_drafts_beside_others(shape, dtype, device, poisoned_memory):
    """In one step: rows that decode, are behind, have drafts, and have a prompt's piece."""
    specs = [Spec(1, 9), Spec(1, 4), Spec(4, 12), Spec(3, 20), Spec(40, 44)]
    batch = step_of(specs, device)
    batch = replace(batch, b_drafts=[0, 0, 3, 2, 0])
    weights = drawn_weights(shape, dtype, device)
    states = with_ring(drawn_states(shape, batch, dtype), shape, 4)
    states.inputs[:, shape.channels :] = drawn_inputs(shape, 99, dtype, device).write[:1, :1]
    behind = torch.tensor([2, 0, 3, 0, 4], device=device, dtype=torch.int32)
    states.seen[torch.tensor(batch.b_row, device=device)] -= behind[:, None]
    given, wanted = drawn_inputs(shape, batch.tokens, dtype, device), copied(states)
    exact = weights._replace(conv=weights.conv.float())
    exact = exact._replace(norm=exact.norm._replace(weight=exact.norm.weight.float()))
    wanted = wanted._replace(inputs=wanted.inputs.float())
    wide = type(given)(*(x.float() for x in given))
    expected = run(reference_delta, wide, exact, shape, wanted, batch)
    out = run(triton_delta, given, weights, shape, states, batch, plan_recurrent)
    assert error(out, expected) < TOLERANCE[dtype]
    assert error(states.memory, wanted.memory) < TOLERANCE[dtype]
    assert torch.equal(states.seen, wanted.seen)
    torch.testing.assert_close(states.inputs.float(), wanted.inputs, rtol=0, atol=0, equal_nan=True)


def test_equal_keys_are_solved_exactly(device, shape):
    """A text that repeats one token: the system has no small numbers, and powers of it explode."""
    batch, weights = step_of([Spec(64, 64)], device), drawn_weights(shape, device=device)
    given = drawn_inputs(shape, 64, device=device)
    for part in given:
        part[:] = part[:1].clone()
    given.write.fill_(8.0)
    given.decay.fill_(-20.0)
    wanted = drawn_states(shape, batch)
    states = copied(wanted)
    expected = run(reference_delta, given, weights, shape, wanted, batch)
    out = run(triton_delta, given, weights, shape, states, batch, plan_recurrent)
    assert error(out, expected) < TOLERANCE[torch.float32]
    assert error(states.memory, wanted.memory) < TOLERANCE[torch.float32]


def test_numbers_that_are_forgotten_at_once_lie_beside_some_that_stay(device):
    """What is left of the ones over a chunk is a number that float32 has not."""
    batch, weights = step_of([Spec(70, 70)], device), drawn_weights(KIMI, device=device)
    weights.shift[::2], weights.shift[1::2] = 60.0, -60.0
    wanted, given = drawn_states(KIMI, batch), drawn_inputs(KIMI, 70, device=device)
    states = copied(wanted)
    expected = run(reference_delta, given, weights, KIMI, wanted, batch)
    out = run(triton_delta, given, weights, KIMI, states, batch, plan_recurrent)
    assert error(out, expected) < TOLERANCE[torch.float32]
    assert error(states.memory, wanted.memory) < TOLERANCE[torch.float32]


def test_captured_steps_have_room_for_chunks(device, shape):
    """Rows with several tokens come as chunks in the step's integers, filled up with empty ones."""
    specs = [Spec(1, 3), Spec(66, 70), Spec(2, 3)]
    batch, weights = step_of(specs, device), drawn_weights(shape, device=device)
    tiles = prepare_capture([CHUNKS], 8)
    room = torch.full((tiles.count(80),), 7, dtype=torch.int32)
    rows = RaggedRows(batch.b_start, batch.b_context, batch.b_runs, batch.b_row, batch.single_rows)
    assert tiles.fill(rows, room.numpy())
    paged = replace(batch.paged, tiles=tiles.by_kind(room.to(device)))
    states = drawn_states(shape, batch)
    wanted, given = copied(states), drawn_inputs(shape, batch.tokens, device=device)
    expected = run(triton_delta, given, weights, shape, wanted, batch, plan_recurrent)
    plan = plan_recurrent(replace(batch, paged=paged))
    out = triton_delta.gated_delta(given, weights, shape, states, plan)
    assert torch.equal(out, expected)
    for got, own in zip(states, wanted, strict=True):
        torch.testing.assert_close(got, own, rtol=0, atol=0, equal_nan=True)
    many = replace(rows, b_start=[0, *range(1, 20, 2)], b_context=[2] * 10, b_row=[0] * 10)
    assert not tiles.fill(many, room.numpy())
