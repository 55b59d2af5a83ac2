"""Plans on the wire: what comes out is what went in, every field that followers read."""

from __future__ import annotations

import dataclasses
import typing

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenpod.core.messages import SamplingParams
from tokenpod.core.plan import NewRow, RowWork, StepPlan
from tokenpod.engine.shards.codec import decode_plan, encode_plan
from tokenpod.protos.tokenpod.shard.v1 import shard_pb2 as pb

int31 = st.integers(0, 2**31 - 1)
tokens = st.lists(int31, max_size=6)
slots = tokens.map(lambda ids: np.array(ids, np.int64))
numbers = st.floats(allow_nan=False)

samplings = st.builds(
    SamplingParams,
    do_sample=st.booleans(),
    temperature=numbers,
    top_k=st.integers(0, 2**32),
    top_p=numbers,
    min_p=numbers,
    typical_p=numbers,
    repetition_penalty=numbers,
    presence_penalty=numbers,
    frequency_penalty=numbers,
    relative_frequency_penalty=numbers,
    logit_bias=st.dictionaries(int31, numbers, max_size=4),
    watermark=st.booleans(),
    seed=st.integers(0, 2**64 - 1),
)
rows = st.builds(
    NewRow,
    row=int31,
    prefix_slots=slots,
    prompt=tokens,
    sampling=samplings,
    stream=int31,
    min_new_tokens=int31,
    eos_token_ids=st.frozensets(int31, max_size=3),
    stop_token_ids=st.frozensets(int31, max_size=3),
    logprobs=st.booleans(),
    top_n_tokens=int31,
)
works = st.builds(
    RowWork,
    row=int31,
    start=int31,
    slots=slots,
    tokens=st.none() | tokens,
    samples=st.booleans(),
    output_index=int31,
    next_tokens=st.none() | tokens,
)
plans = st.builds(
    StepPlan,
    step=st.integers(0, 2**63 - 1),
    freed=tokens,
    fresh=st.lists(rows, max_size=3),
    works=st.lists(works, max_size=5),
)


def plain(value: object) -> object:
    """A value whose parts compare with ==."""
    if isinstance(value, np.ndarray):
        assert value.dtype == np.int64
        return value.tolist()
    if dataclasses.is_dataclass(value):
        return [plain(getattr(value, field.name)) for field in dataclasses.fields(value)]
    if isinstance(value, list):
        return [plain(item) for item in value]
    return value


def sent(plan: StepPlan) -> StepPlan:
    return decode_plan(pb.Plan.FromString(encode_plan(7, plan).SerializeToString()))


@given(plans)
@settings(max_examples=150, derandomize=True, deadline=None)
def test_every_field_survives(plan: StepPlan) -> None:
    assert plain(sent(plan)) == plain(plan)


@pytest.mark.parametrize("kind", [SamplingParams, NewRow, RowWork, StepPlan])
def test_no_field_is_left_out_of_the_test_above(kind: type) -> None:
    strategy = {SamplingParams: samplings, NewRow: rows, RowWork: works, StepPlan: plans}[kind]
    drawn = typing.cast(typing.Any, strategy).wrapped_strategy.kwargs
    assert set(drawn) == set(typing.get_type_hints(kind)) - {"top_of_processed"}


def test_what_only_the_leaders_sampler_reads_stays_with_it() -> None:
    asked = SamplingParams(do_sample=True, top_of_processed=True)
    row = NewRow(1, np.array([2]), [3], asked, 0, 0, frozenset(), frozenset(), True, 5)
    (arrived,) = sent(StepPlan(1, [], [row], [])).fresh
    assert arrived.sampling == SamplingParams(do_sample=True)


def test_a_plan_has_its_number() -> None:
    assert encode_plan(7, StepPlan(1, [], [], [])).number == 7


def test_a_token_that_the_wire_cannot_hold_is_an_error() -> None:
    work = RowWork(0, 0, np.array([1]), [2**31], samples=True, output_index=0)
    with pytest.raises(OverflowError):
        encode_plan(1, StepPlan(1, [], [], [work]))
