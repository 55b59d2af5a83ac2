"""A call's samples as the engine brings them, and a reader that falls behind."""

from __future__ import annotations

import tracemalloc
from typing import Any

import grpc
import pytest

from support.engines.engine_link import QuietEngine
from tokenpod.core.outputs import Failure, FailureCode, FinishCode, StepOutputs, Top
from tokenpod.core.requests import Request, StoppingParams
from tokenpod.core.sampling import SamplingParams
from tokenpod.service.calls.call import GenerateCall, Output, Sampling, Stopping
from tokenpod.service.calls.errors import DataLoss, Internal
from tokenpod.service.calls.generation import UNREAD_BYTES, Generation
from tokenpod.service.calls.sample import Sample
from tokenpod.service.dialects.generate_v3.writer import EventWriter
from tokenpod.service.pod.client import NO_LOAD, Sinks
from tokenpod.service.text.reader import StopMatcher, TextReader
from tokenpod.service.text.tokenizers.decoding import Detokenizer
from tokenpod_client.protos.generate.v3 import generate_pb2 as pb

TOP = Top(0, list(range(20)), [-1.0] * 20)


class Words(Detokenizer):
    """Every token is a word."""

    def push(self, token_id: int) -> str:
        return f"w{token_id} "

    def finish(self) -> str:
        return ""


class Names:
    """Names tokens, as a tokenizer does."""

    special_ids: frozenset[int] = frozenset()

    def token_text(self, token_id: int) -> str:
        return f"w{token_id} "


class Call:
    """A call with `n` samples, sequences `first` and on, whose engine is this test."""

    def __init__(
        self,
        n: int = 1,
        *,
        stream: bool = True,
        top_n: int = 0,
        first: int = 0,
        detokenizer: type[Detokenizer] = Words,
        failures_last: bool = False,
    ) -> None:
        engine = QuietEngine()
        self.aborted = engine.aborted
        self.top = TOP if top_n else None
        request = Request(
            sequence_ids=list(range(first, first + n)),
            prompt=[1, 2],
            sampling=SamplingParams(),
            stopping=StoppingParams(max_new_tokens=1_000_000),
        )
        samples = [
            Sample(
                index=index,
                sequence_id=first + index,
                reader=TextReader(detokenizer(), StopMatcher((), include=False)),
                streamed=stream,
            )
            for index in range(n)
        ]
        self.generation = Generation(
            request,
            samples,
            engine,
            streamed=stream,
            failures_last=failures_last,
        )
        asked = GenerateCall(
            prompt="x",
            sampling=Sampling(n=n),
            stopping=Stopping(),
            output=Output(stream=stream, top_n_tokens=top_n),
        )
        tokenizer: Any = Names()
        self.writer = EventWriter(asked, self.generation, tokenizer, model_id="m", request_id="r")

    def step(self, finish: FinishCode = FinishCode.RUNNING) -> None:
        """A token for each sample that the engine still runs."""
        for sample in self.generation.samples:
            if sample.sequence_id not in self.aborted:
                self.generation.on_token(sample.sequence_id, 7, -1.0, finish, self.top)
        self.generation.wake()

    def read(self) -> list[pb.GenerateResponse]:
        """All that can be told now."""
        return list(iter(self.writer.next, None))


@pytest.mark.parametrize("top_n", [0, 20])
@pytest.mark.parametrize("n", [1, 3])
async def test_a_stream_that_nobody_reads_is_given_up_before_it_costs_256_kb(n, top_n):
    call, most = Call(n, top_n=top_n), 0
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        while call.generation.failure is None:
            call.step()
            most = max(most, call.generation.unread_bytes)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    # The text so far, which `finished` repeats, is the request's own output.
    text = sum(len(sample.text) for sample in call.generation.samples)
    assert peak - before - 1.2 * text < 192 * 1024
    assert UNREAD_BYTES / 2 < most <= UNREAD_BYTES + 1000
    assert sorted(call.aborted) == list(range(n))
    assert call.read() == []
    assert call.generation.unread_bytes == 0
    with pytest.raises(type(call.generation.failure)) as lost:
        await call.generation.news()
    assert lost.value.code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "128 KiB" in str(lost.value)


async def test_a_reader_that_catches_up_in_time_misses_nothing():
    call, seen = Call(2, top_n=20), []
    for _ in range(10):
        for _ in range(150):
            call.step()
        seen += call.read()
    call.step(FinishCode.LENGTH)
    seen += call.read()
    assert call.generation.failure is None
    assert call.writer.done
    for index in range(2):
        deltas = [e.tokens for e in seen if e.HasField("tokens") and e.tokens.index == index]
        (finished,) = (
            e.finished for e in seen if e.HasField("finished") and e.finished.index == index
        )
        assert "".join(delta.text for delta in deltas) == finished.text == "w7 " * 1501
        assert sum(len(delta.top_tokens) for delta in deltas) == 1501


async def test_no_sample_waits_for_another_that_always_has_news():
    call = Call(3)
    call.step()
    told = []
    for _ in range(9):
        event = call.writer.next()
        told.append(event.tokens.index)
        call.step()
    assert sorted(told) == [0, 0, 0, 1, 1, 1, 2, 2, 2]


@pytest.mark.parametrize("n", [1, 2])
async def test_samples_that_fail_while_their_tokens_are_written_are_no_whole_answer(n):
    call = Call(n, failures_last=True)
    call.step()
    for _ in range(n):
        assert call.writer.next().HasField("tokens")
    for index in range(n):
        call.generation.on_failure(Failure(index, FailureCode.DATA_LOSS, "NaN"))
    # Before the writer waits for news, where it would hear of it.
    with pytest.raises(DataLoss):
        call.read()


async def test_one_answer_for_all_may_be_as_long_as_it_gets():
    call = Call(stream=False)
    for _ in range(UNREAD_BYTES // 4):
        call.step()
    call.step(FinishCode.LENGTH)
    tokens, finished = (event for event in call.read() if not event.HasField("started"))
    assert call.generation.failure is None
    assert len(tokens.tokens.token_ids) == UNREAD_BYTES // 4 + 1
    assert tokens.tokens.text == finished.finished.text


class Unreadable(Words):
    """Fails at token 3."""

    def push(self, token_id: int) -> str:
        if token_id == 3:
            raise OverflowError("a secret text")
        return super().push(token_id)


async def test_a_text_that_cannot_be_read_ends_its_call_and_no_other() -> None:
    faulty, other = Call(n=2, detokenizer=Unreadable), Call(first=2)
    sinks = Sinks(faulty.aborted.extend)
    sinks.watch([0, 1], faulty.generation)
    sinks.watch([2], other.generation)
    for token in range(5):
        ids, finishes = [0, 1, 2], [FinishCode.RUNNING] * 3
        sinks.forget(faulty.aborted)
        sinks.deliver(StepOutputs(1, 1, ids, [token] * 3, [0.0] * 3, finishes, NO_LOAD))
    with pytest.raises(Internal, match=r"internal error [0-9a-f]{12}"):
        await faulty.generation.news()
    assert {*faulty.aborted} == {0, 1}
    await other.generation.news()
    assert other.generation.samples[0].text == "w0 w1 w2 w3 w4 "
