"""What a router's step says of a sequence that got several tokens in it."""

from __future__ import annotations

from pathlib import Path

import pytest

import tokenpod.models.demo
from tokenpod.core.outputs import Drafted, FinishCode, StepOutputs, Top
from tokenpod.core.requests import Request, StoppingParams
from tokenpod.core.sampling import SamplingParams
from tokenpod.service.calls.call import ShardRequest
from tokenpod.service.pod.client import NO_LOAD, Sinks
from tokenpod.service.serving.routed import RoutedSequence, StepSink
from tokenpod.service.text.tokenizers.decoding import Detokenizer
from tokenpod.service.text.tokenizers.tokenizer import Tokenizer

FOLDER = Path(tokenpod.models.demo.__file__).parent
TOKENIZER = Tokenizer.load(FOLDER)
TEXT = "def add(a, b):\n    return a + b\n"


def sequence_of(
    *stops: str, sequence_id: int = 7, tokenizer: Tokenizer = TOKENIZER
) -> RoutedSequence:
    asked = ShardRequest(
        **{"id": sequence_id - 4, "inputs": "x", "truncate": 0, "add_special_tokens": True},
        **{"prefill_logprobs": False, "top_n_tokens": 1, "max_new_tokens": 50},
        **{"stop_sequences": stops, "ignore_eos": False, "do_sample": False, "temperature": 0.0},
        **{"top_k": 0, "top_p": 0.0, "typical_p": 0.0, "repetition_penalty": 0.0},
        **{"frequency_penalty": 0.0, "seed": 0, "watermark": False},
        **{"constraint": None, "adapter_id": None, "chunk_len": None},
    )
    request = Request([sequence_id], [5, 6], SamplingParams(), StoppingParams(50))
    return RoutedSequence(asked, request, tokenizer)


def sink(*stops: str) -> tuple[StepSink, RoutedSequence]:
    sequence = sequence_of(*stops)
    return StepSink([sequence]), sequence


def hear(into: StepSink, ids: list[int], last: FinishCode = FinishCode.RUNNING) -> None:
    into.on_drafted(Drafted(7, len(ids) - 1, len(ids) - 1))
    for at, token in enumerate(ids):
        finish = last if at == len(ids) - 1 else FinishCode.RUNNING
        into.on_token(7, token, -0.1 * at, finish, Top(at, [token, 9], [-0.1, -2.0]))


def test_all_tokens_of_a_step_are_one_answer_with_their_parts() -> None:
    ids = TOKENIZER.encode(TEXT, add_special_tokens=False)
    step, sequence = sink()
    hear(step, ids, FinishCode.LENGTH)
    (said,) = step.generations
    assert said.tokens.ids == ids
    assert "".join(said.tokens.texts) == TEXT
    assert [top.ids[0] for top in said.tops] == ids
    assert len(said.tokens.logprobs) == len(said.tokens.special) == len(ids)
    assert said.text is not None
    assert (said.text.text, said.text.generated_tokens) == (TEXT, len(ids))
    assert sequence.stopped


def test_what_stands_behind_a_stop_sequence_is_not_told() -> None:
    ids = TOKENIZER.encode(TEXT, add_special_tokens=False)
    step, sequence = sink(":\n")
    hear(step, ids)
    (said,) = step.generations
    assert said.text is not None
    assert said.text.text == "".join(said.tokens.texts)
    assert said.text.text.startswith("def add(a, b):\n")
    assert len(said.tokens.ids) == len(said.tops) == said.text.generated_tokens < len(ids)
    assert sequence.stopped_by_text


class Broken(Detokenizer):
    """Fails at its second token."""

    def __init__(self) -> None:
        self._pushed = 0

    def push(self, token_id: int) -> str:
        self._pushed += 1
        if self._pushed == 2:
            raise OverflowError("a secret text")
        return "x"

    def finish(self) -> str:
        return ""


def test_a_text_that_cannot_be_read_ends_its_request_alone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    broken = Tokenizer.load(FOLDER)
    broken.detokenizer = lambda prompt: Broken()  # type: ignore[method-assign]
    bad, good = sequence_of(tokenizer=broken), sequence_of(sequence_id=9)
    aborted: list[int] = []
    sinks = Sinks(aborted.extend)
    for tokens in ([30, 31], [32, 33]):
        step = StepSink([bad, good])
        sinks.watch([7, 9], step)
        ids = [sequence.sequence_id for sequence in (bad, good)]
        finishes = [FinishCode.RUNNING] * 2
        sinks.deliver(StepOutputs(1, 1, ids, tokens, [0.0, 0.0], finishes, NO_LOAD))
    ended, goes_on = step.generations
    assert aborted == [7]
    assert (ended.request_id, ended.tokens.texts) == (3, [""])
    assert ended.tokens.ids == [min(TOKENIZER.eos_token_ids)]
    assert ended.text is not None
    assert (ended.text.text, ended.text.finish_reason, ended.text.generated_tokens) == ("", 1, 2)
    assert (goes_on.request_id, goes_on.tokens.ids, goes_on.text) == (5, [33], None)
    assert (bad.stopped, good.stopped) == (True, False)
    told = {record.error_id for record in caplog.records}  # type: ignore[attr-defined]
    assert len(told) == 1, "the log says under one id what happened and which request it was"
