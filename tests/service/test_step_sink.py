"""What a router's step says of a sequence that got several tokens in it."""

from __future__ import annotations

from pathlib import Path

import tokenpod.models.demo
from tokenpod.core.outputs import Drafted, FinishCode, Top
from tokenpod.core.requests import Request, StoppingParams
from tokenpod.core.sampling import SamplingParams
from tokenpod.service.serving.calls import ShardRequest
from tokenpod.service.serving.routed import RoutedSequence, StepSink
from tokenpod.service.text.tokenizer import Tokenizer

TOKENIZER = Tokenizer.load(Path(tokenpod.models.demo.__file__).parent)
TEXT = "def add(a, b):\n    return a + b\n"


def sink(*stops: str) -> tuple[StepSink, RoutedSequence]:
    asked = ShardRequest(
        **{"id": 3, "inputs": "x", "truncate": 0, "add_special_tokens": True},
        **{"prefill_logprobs": False, "top_n_tokens": 1, "max_new_tokens": 50},
        **{"stop_sequences": stops, "ignore_eos": False, "do_sample": False, "temperature": 0.0},
        **{"top_k": 0, "top_p": 0.0, "typical_p": 0.0, "repetition_penalty": 0.0},
        **{"frequency_penalty": 0.0, "seed": 0, "watermark": False},
        **{"constraint": None, "adapter_id": None, "chunk_len": None},
    )
    request = Request([7], [5, 6], SamplingParams(), StoppingParams(50))
    sequence = RoutedSequence(asked, request, TOKENIZER)
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
