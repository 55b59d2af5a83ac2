"""A router's requests that can't be served end alone, whatever goes wrong with one of them."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping
from itertools import count
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend

from support.checkpoints.demo import DEMO
from tokenpod.core.constraints import Constraint, Regex
from tokenpod.service.calls.call import (
    AskedConstraint,
    ConstraintKind,
    ShardBatch,
    ShardRequest,
)
from tokenpod.service.calls.errors import Unimplemented
from tokenpod.service.calls.limits import RequestLimits
from tokenpod.service.serving.images import Images
from tokenpod.service.serving.serving import Serving
from tokenpod.service.serving.shard_requests import Opened, ShardRequests
from tokenpod.service.text.encoder import Encoder
from tokenpod.service.text.tokenizers.tokenizer import Tokenizer

LIMITS = RequestLimits(
    vocab_size=4096,
    max_input_tokens=99,
    max_total_tokens=100,
    max_samples=1,
    max_stop_sequences=4,
    max_stop_sequence_bytes=80,
    max_top_n_tokens=5,
    max_logit_bias=5,
    max_constraint_bytes=1000,
    slots=1000,
    rows=8,
)


class Failing(Serving):
    """Constraints with this text meet this exception."""

    problems: Mapping[str, Exception] = MappingProxyType({})

    async def constraint_of(self, asked: AskedConstraint | None) -> Constraint | None:
        if asked is None:
            return None
        if asked.text in self.problems:
            raise self.problems[asked.text]
        return Regex(asked.text)


def serving() -> Failing:
    backend = Backend.from_file(str(DEMO / "tokenizer.json"))
    tokenizer = Tokenizer(backend, eos_token_ids=frozenset([1]))
    workers: Any = None  # short texts need none
    ids = count()
    client: Any = SimpleNamespace(new_sequence_ids=lambda n: [next(ids) for _ in range(n)])
    none: dict[str, Any] = {field.name: None for field in dataclasses.fields(Serving)}
    given: dict[str, Any] = {
        "client": client,
        "encoder": Encoder(tokenizer, workers, DEMO),
        "limits": LIMITS,
    }
    given |= {"images": Images(None, client)}
    adapters = SimpleNamespace(get=lambda name: None)
    return Failing(**{**none, **given, "adapters": adapters})


def asked(number: int, constraint: str = "") -> ShardRequest:
    regex = AskedConstraint(ConstraintKind.REGEX, "parameters.grammar", constraint)
    return ShardRequest(
        id=number,
        inputs="x = 1",
        truncate=50,
        add_special_tokens=True,
        prefill_logprobs=False,
        top_n_tokens=0,
        max_new_tokens=4,
        stop_sequences=(),
        ignore_eos=False,
        do_sample=False,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        typical_p=1.0,
        repetition_penalty=1.0,
        frequency_penalty=0.0,
        seed=0,
        watermark=False,
        constraint=regex if constraint else None,
        adapter_id=None,
        chunk_len=None,
    )


@pytest.mark.parametrize(
    ("problem", "level", "message"),
    [
        (ZeroDivisionError(), logging.ERROR, "internal error"),
        (Unimplemented("grammar", "can't be served"), logging.WARNING, "can't be served"),
    ],
)
async def test_what_goes_wrong_with_one_request_is_its_own(
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    problem: Exception,
    level: int,
    message: str,
) -> None:
    monkeypatch.setattr(Failing, "problems", {"bad": problem})
    batch = ShardBatch(1, [asked(5), asked(6, "bad"), asked(7, "good")])
    opened = Opened()
    await ShardRequests(serving()).open(batch, opened)
    assert [sequence.request_id for sequence in opened.sequences] == [5, 7]
    assert [request.constraint for request in opened.requests] == [None, Regex("good")]
    (refused,) = opened.refused
    assert refused.request_id == 6
    assert refused.text is not None
    assert (refused.tokens.ids, refused.text.text) == ([1], "")
    (record,) = caplog.records
    assert record.levelno == level
    assert message in record.message
    assert (level == logging.ERROR) == hasattr(record, "error_id")
