"""Step plans on the wire: `StepPlan` to `tokenpod.shard.v1.Plan` and back.

A plan is made and read once a step on the critical path, so what there is once a row travels in
columns: one table and three runs of int32, which take a row some hundred nanoseconds each way.
`SamplingParams.top_of_processed` stays behind: followers don't sample, and nothing else asks.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain

import numpy as np

from tokenpod.core.messages import SamplingParams
from tokenpod.core.plan import Ints, NewRow, RowWork, StepPlan
from tokenpod.protos.tokenpod.shard.v1 import shard_pb2 as pb

_COLUMNS = 7
#: A count in the table that means "there is none", which differs from an empty one.
_NONE = -1


def encode_plan(number: int, plan: StepPlan) -> pb.Plan:
    """The message for plan `number` of this group's life."""
    works = plan.works
    table: list[int] = []
    tokens: list[Sequence[int]] = []
    following: list[Sequence[int]] = []
    for work in works:
        n_tokens = n_next = _NONE
        if work.tokens is not None:
            n_tokens = len(work.tokens)
            tokens.append(work.tokens)
        if work.next_tokens is not None:
            n_next = len(work.next_tokens)
            following.append(work.next_tokens)
        table += (
            work.row,
            work.start,
            len(work.slots),
            work.output_index,
            work.samples,
            n_tokens,
            n_next,
        )
    slots = np.concatenate([work.slots for work in works]) if works else np.empty(0, np.int64)
    return pb.Plan(
        number=number,
        step=plan.step,
        freed=_packed(plan.freed),
        fresh=[_encode_row(row) for row in plan.fresh],
        works=_packed(table),
        slots=slots.astype("<i4").tobytes(),
        tokens=_packed(chain.from_iterable(tokens)),
        next_tokens=_packed(chain.from_iterable(following)),
    )


def decode_plan(message: pb.Plan) -> StepPlan:
    """The plan that `message` holds."""
    return StepPlan(
        step=message.step,
        freed=_unpacked(message.freed),
        fresh=[_decode_row(row) for row in message.fresh],
        works=list(_decode_works(message)),
    )


def _decode_works(message: pb.Plan) -> Iterator[RowWork]:
    slots = np.frombuffer(message.slots, "<i4").astype(np.int64)
    tokens = _unpacked(message.tokens)
    following = _unpacked(message.next_tokens)
    slot = token = next_token = 0
    columns = iter(_unpacked(message.works))
    for row, start, n_slots, output_index, samples, n_tokens, n_next in zip(
        *[columns] * _COLUMNS, strict=True
    ):
        given = scored = None
        if n_tokens != _NONE:
            given = tokens[token : token + n_tokens]
            token += n_tokens
        if n_next != _NONE:
            scored = following[next_token : next_token + n_next]
            next_token += n_next
        yield RowWork(
            row, start, slots[slot : slot + n_slots], given, bool(samples), output_index, scored
        )
        slot += n_slots


def _encode_row(row: NewRow) -> pb.NewRow:
    return pb.NewRow(
        row=row.row,
        prefix_slots=row.prefix_slots.astype("<i4").tobytes(),
        prompt=_packed(row.prompt),
        sampling=_encode_sampling(row.sampling),
        stream=row.stream,
        min_new_tokens=row.min_new_tokens,
        eos_token_ids=sorted(row.eos_token_ids),
        stop_token_ids=sorted(row.stop_token_ids),
        logprobs=row.logprobs,
        top_n_tokens=row.top_n_tokens,
    )


def _decode_row(row: pb.NewRow) -> NewRow:
    prefix: Ints = np.frombuffer(row.prefix_slots, "<i4").astype(np.int64)
    return NewRow(
        row=row.row,
        prefix_slots=prefix,
        prompt=_unpacked(row.prompt),
        sampling=_decode_sampling(row.sampling),
        stream=row.stream,
        min_new_tokens=row.min_new_tokens,
        eos_token_ids=frozenset(row.eos_token_ids),
        stop_token_ids=frozenset(row.stop_token_ids),
        logprobs=row.logprobs,
        top_n_tokens=row.top_n_tokens,
    )


def _encode_sampling(sampling: SamplingParams) -> pb.Sampling:
    return pb.Sampling(
        do_sample=sampling.do_sample,
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        typical_p=sampling.typical_p,
        repetition_penalty=sampling.repetition_penalty,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        relative_frequency_penalty=sampling.relative_frequency_penalty,
        biased_tokens=list(sampling.logit_bias),
        biases=list(sampling.logit_bias.values()),
        watermark=sampling.watermark,
        seed=sampling.seed,
    )


def _decode_sampling(sampling: pb.Sampling) -> SamplingParams:
    return SamplingParams(
        do_sample=sampling.do_sample,
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        typical_p=sampling.typical_p,
        repetition_penalty=sampling.repetition_penalty,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        relative_frequency_penalty=sampling.relative_frequency_penalty,
        logit_bias=dict(zip(sampling.biased_tokens, sampling.biases, strict=True)),
        watermark=sampling.watermark,
        seed=sampling.seed,
    )


def _packed(numbers: Iterable[int]) -> bytes:
    """Little-endian int32. Raises OverflowError for what does not fit."""
    values = array("i", numbers)
    if sys.byteorder == "big":
        values.byteswap()
    return values.tobytes()


def _unpacked(data: bytes) -> list[int]:
    values = array("i")
    values.frombytes(data)
    if sys.byteorder == "big":
        values.byteswap()
    return values.tolist()
