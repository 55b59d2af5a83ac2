"""Each limit at its edge, and the words a client reads."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
from msgspec import structs

from support.texts.chat_templates import turns
from tokenpod.core.requests import BeamParams
from tokenpod.service.calls.call import (
    GenerateCall,
    Output,
    Sampling,
    ShardBatch,
    ShardRequest,
    Stopping,
    TokensCall,
    sampling_params,
    shard_sampling_params,
)
from tokenpod.service.calls.chats import Tool
from tokenpod.service.calls.errors import InvalidArgument
from tokenpod.service.calls.limits import (
    RequestLimits,
    check_generate,
    check_group,
    check_prompt_tops,
    check_tokens,
    max_new_tokens,
)
from tokenpod.service.dialects.fields import field_names
from tokenpod.service.serving import shard_checks as checks

LIMITS = RequestLimits(
    vocab_size=100,
    max_input_tokens=40,
    max_total_tokens=50,
    max_samples=4,
    max_stop_sequences=2,
    max_stop_sequence_bytes=8,
    max_top_n_tokens=5,
    max_logit_bias=3,
    max_constraint_bytes=100,
    slots=120,
    rows=3,
)
SHARD = ShardRequest(
    id=1,
    inputs="x",
    truncate=10,
    add_special_tokens=True,
    prefill_logprobs=False,
    top_n_tokens=0,
    max_new_tokens=5,
    stop_sequences=(),
    ignore_eos=False,
    do_sample=False,
    temperature=0.0,
    top_k=0,
    top_p=0.0,
    typical_p=0.0,
    repetition_penalty=0.0,
    frequency_penalty=0.0,
    seed=0,
    watermark=False,
    constraint=None,
    adapter_id=None,
    chunk_len=None,
)


def _check(
    prompt: Any = "x",
    sampling: dict[str, Any] | None = None,
    stopping: dict[str, Any] | None = None,
    output: dict[str, Any] | None = None,
    **fields: Any,
) -> None:
    call = GenerateCall(
        prompt,
        Sampling(**(sampling or {})),
        Stopping(**(stopping or {})),
        Output(**(output or {})),
        **fields,
    )
    check_generate(call, LIMITS)


ACCEPTED: list[dict[str, Any]] = [
    {},
    {"prompt": [0, 99]},
    {"prompt": turns(("user", "hello"))},
    {"sampling": {"temperature": 0.0}},
    {"sampling": {"temperature": 100.0, "top_p": 1.0, "min_p": 1.0, "typical_p": 1.0}},
    {"sampling": {"presence_penalty": -2.0, "frequency_penalty": 2.0}},
    {"sampling": {"repetition_penalty": 100.0, "top_k": 2**32 - 1, "seed": 2**64 - 1}},
    {"sampling": {"logit_bias": {0: -100.0, 1: 0.0, 99: 100.0}}},
    {"sampling": {"n": 3}},
    {"sampling": {"n": 2, "best_of": 3}, "output": {"stream": False}},
    {"stopping": {"max_new_tokens": 3, "min_new_tokens": 3}},
    {"stopping": {"stop_sequences": ["12345678", "éééé"], "stop_token_ids": [1, 2, 99]}},
    {"output": {"top_n_tokens": 5}},
    {"priority": -100, "request_id": "~" * 256},
]


@pytest.mark.parametrize("fields", ACCEPTED, ids=str)
def test_the_edge_itself_is_allowed(fields: dict[str, Any]) -> None:
    _check(**fields)


REFUSED: list[tuple[str, str, dict[str, Any]]] = [
    ("prompt", "one of text, token_ids and chat", {"prompt": None}),
    ("text", "is empty", {"prompt": ""}),
    ("token_ids.ids", "is empty", {"prompt": []}),
    ("token_ids.ids[1]", "is 100; token ids of this model are below 100", {"prompt": [1, 100]}),
    ("chat.messages", "is empty", {"prompt": turns()}),
    ("sampling.temperature", "is -0.1; must be from 0 to 100", {"sampling": {"temperature": -0.1}}),
    (
        "sampling.temperature",
        "is 0 (greedy)",
        {"sampling": {"temperature": 0.0, "do_sample": True}},
    ),
    ("sampling.top_p", "is 1.1", {"sampling": {"top_p": 1.1}}),
    ("sampling.min_p", "is 1.1", {"sampling": {"min_p": 1.1}}),
    ("sampling.typical_p", "is -1", {"sampling": {"typical_p": -1.0}}),
    ("sampling.repetition_penalty", "is 101", {"sampling": {"repetition_penalty": 101.0}}),
    ("sampling.presence_penalty", "from -2 to 2", {"sampling": {"presence_penalty": 2.1}}),
    ("sampling.frequency_penalty", "from -2 to 2", {"sampling": {"frequency_penalty": -2.1}}),
    (
        "sampling.logit_bias",
        "--max-logit-bias",
        {"sampling": {"logit_bias": dict.fromkeys("abcd")}},
    ),
    ("sampling.logit_bias[100]", "below 100", {"sampling": {"logit_bias": {100: 1.0}}}),
    ("sampling.logit_bias[7]", "is 101", {"sampling": {"logit_bias": {7: 101.0}}}),
    ("sampling.n", "at most 3", {"sampling": {"n": 4}}),
    ("sampling.best_of", "at least sampling.n, 2", {"sampling": {"n": 2, "best_of": 1}}),
    ("sampling.best_of", "set output.stream false", {"sampling": {"best_of": 2}}),
    ("stopping.max_new_tokens", "is 0", {"stopping": {"max_new_tokens": 0}}),
    (
        "stopping.min_new_tokens",
        "is 4; must be at most 3",
        {"stopping": {"max_new_tokens": 3, "min_new_tokens": 4}},
    ),
    ("stopping.stop_sequences", "--max-stop-sequences", {"stopping": {"stop_sequences": "abc"}}),
    ("stopping.stop_sequences[1]", "is empty", {"stopping": {"stop_sequences": ["a", ""]}}),
    ("stopping.stop_sequences[0]", "has 9 bytes", {"stopping": {"stop_sequences": ["ééééx"]}}),
    ("stopping.stop_token_ids", "has 4 entries", {"stopping": {"stop_token_ids": [1] * 4}}),
    ("stopping.stop_token_ids[0]", "is 100", {"stopping": {"stop_token_ids": [100]}}),
    ("output.top_n_tokens", "--max-top-n-tokens", {"output": {"top_n_tokens": 6}}),
    ("priority", "is 101", {"priority": 101}),
    ("request_id", "has 257 characters; at most 256", {"request_id": "x" * 257}),
    ("request_id", "must be printable ASCII", {"request_id": "é"}),
    ("request_id", "must be printable ASCII", {"request_id": "a\nb"}),
]


@pytest.mark.parametrize(("field", "words", "fields"), REFUSED, ids=str)
def test_beyond_the_edge_the_field_and_the_limit_are_named(
    field: str, words: str, fields: dict[str, Any]
) -> None:
    with pytest.raises(InvalidArgument) as caught:
        _check(**fields)
    assert caught.value.field == field
    assert words in caught.value.problem


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(
    "name",
    [
        *("temperature", "top_p", "min_p", "typical_p", "repetition_penalty"),
        *("presence_penalty", "frequency_penalty"),
    ],
)
def test_what_is_not_finite_is_refused(name: str, value: float) -> None:
    with pytest.raises(InvalidArgument, match=f"sampling.{name}"):
        _check(sampling={name: value})


def test_a_text_to_count_may_be_empty_but_a_chat_may_not() -> None:
    check_tokens(TokensCall(""), LIMITS)
    with pytest.raises(InvalidArgument, match=r"chat\.messages"):
        check_tokens(TokensCall(turns()), LIMITS)


def test_the_schemas_of_tools_are_limited_together() -> None:
    tools = [Tool("a", "x" * 1000, "é" * 25), Tool("b", "", "é" * 25)]
    chat = structs.replace(turns(("user", "x")), tools=tools)
    check_tokens(TokensCall(chat), LIMITS)
    _check(prompt=chat)
    chat = structs.replace(chat, tools=[*tools, Tool("c", "", "{}")])
    refused = r"^chat\.tools has schemas of 102 bytes; .* 100 "
    with pytest.raises(InvalidArgument, match=refused):
        check_tokens(TokensCall(chat), LIMITS)
    with pytest.raises(InvalidArgument, match=refused):
        _check(prompt=chat)


# -- prompt and output together ----------------------------------------------------------------


def test_an_unset_bound_is_the_room_that_is_left() -> None:
    assert max_new_tokens(40, None, LIMITS) == 10
    assert max_new_tokens(40, 10, LIMITS) == 10


@pytest.mark.parametrize(
    ("prompt", "wanted", "field", "words"),
    [
        (0, 1, "prompt", "has no tokens"),
        (41, 1, "prompt", "--max-input-tokens"),
        (40, 11, "stopping.max_new_tokens", "at most 10 are possible (--max-total-tokens 50)"),
    ],
)
def test_prompt_and_output_are_bounded(prompt: int, wanted: int, field: str, words: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        max_new_tokens(prompt, wanted, LIMITS)
    assert caught.value.field == field
    assert words in caught.value.problem


def test_samples_of_a_request_must_fit_at_once() -> None:
    # 40 + 3 * 26 + 2 of 120: the last tokens are not written.
    three = GenerateCall("x", Sampling(n=3), Stopping(), Output())
    beams = dataclasses.replace(three, sampling=Sampling(), beam=BeamParams(3))
    for call, field in ((three, "sampling.n"), (beams, "sampling.beam.width")):
        check_group(40, 27, call, LIMITS)
        with pytest.raises(InvalidArgument, match="--max-batch-total-tokens") as error:
            check_group(40, 28, call, LIMITS)
        assert error.value.field == field


# -- what "not set" means ----------------------------------------------------------------------


def test_likeliest_tokens_of_a_prompt_are_bounded_together() -> None:
    check_prompt_tops(6553, 5)
    check_prompt_tops(1_000_000, 0)
    with pytest.raises(InvalidArgument, match="with 6554 prompt tokens at most 4") as error:
        check_prompt_tops(6554, 5)
    assert error.value.field == "output.prompt_top_n_tokens"


def test_zeros_are_neutral() -> None:
    params = sampling_params(Sampling(), seed=0)
    assert params == type(params)()
    assert shard_sampling_params(SHARD) == type(params)(top_of_processed=True)


@pytest.mark.parametrize(
    ("fields", "samples"),
    [
        ({}, False),
        ({"temperature": 0.0}, False),
        ({"temperature": 0.0, "top_k": 5}, False),
        ({"temperature": 1.0}, True),
        ({"top_k": 5}, True),
        ({"top_p": 0.9}, True),
        ({"top_p": 1.0}, False),
        ({"min_p": 0.1}, True),
        ({"typical_p": 0.9}, True),
        ({"n": 2}, True),
        ({"best_of": 2}, True),
        ({"repetition_penalty": 1.2}, False),
        ({"top_k": 5, "do_sample": False}, False),
        ({"do_sample": True}, True),
    ],
)
def test_sampling_is_inferred_as_the_protocol_says(fields: dict[str, Any], samples: bool) -> None:
    assert sampling_params(Sampling(**fields), seed=1).do_sample is samples


@pytest.mark.parametrize("value", [1e-45, 1e-30])
def test_divisors_stay_where_float32_holds_the_quotient(value: float) -> None:
    sampling = Sampling(temperature=value, repetition_penalty=value)
    shard = dataclasses.replace(SHARD, temperature=value, repetition_penalty=3.4e38)
    params = sampling_params(sampling, seed=0)
    assert params.temperature == params.repetition_penalty == 1e-6
    held = shard_sampling_params(shard)
    assert (held.temperature, held.repetition_penalty) == (1e-6, 1e6)


# -- the shard protocol ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "fields"),
    [
        ("inputs", {"inputs": ""}),
        ("parameters.temperature", {"temperature": -1.0}),
        ("parameters.top_p", {"top_p": 1.1}),
        ("parameters.typical_p", {"typical_p": math.nan}),
        ("parameters.repetition_penalty", {"repetition_penalty": math.inf}),
        ("parameters.frequency_penalty", {"frequency_penalty": 3.0}),
        ("stopping_parameters.max_new_tokens", {"max_new_tokens": 0}),
        ("stopping_parameters.stop_sequences", {"stop_sequences": ["x"] * 257}),
        ("top_n_tokens", {"top_n_tokens": 65}),
        ("chunk_len", {"chunk_len": 0}),
    ],
)
def test_a_routers_field_is_refused_by_its_path(field: str, fields: dict[str, Any]) -> None:
    bad = dataclasses.replace(SHARD, id=2, **fields)
    with pytest.raises(InvalidArgument) as caught:
        checks.check_request(bad, 1, LIMITS)
    assert caught.value.field == f"batch.requests[1].{field}"


def test_a_routers_batch_has_requests_of_different_ids() -> None:
    checks.check_batch(ShardBatch(7, [SHARD]))
    for requests in ([], [SHARD, SHARD]):
        with pytest.raises(InvalidArgument, match=r"batch\.requests"):
            checks.check_batch(ShardBatch(7, requests))


def test_a_routers_prompt_and_bound_fit_together() -> None:
    checks.check_length(SHARD, 0, 45, LIMITS)
    with pytest.raises(InvalidArgument, match="--max-total-tokens 50"):
        checks.check_length(SHARD, 0, 46, LIMITS)
    with pytest.raises(InvalidArgument, match="has no tokens"):
        checks.check_length(SHARD, 0, 0, LIMITS)


@pytest.mark.parametrize(
    ("field", "told"),
    [
        ("sampling.top_p", "params.sampling.top_p"),
        ("sampling.logit_bias[7]", "params.bias[7]"),
        ("sampling", "params.sampling"),
        ("samplings", "samplings"),
        ("prompt", "prompt"),
        ("max_new", "max_new"),
    ],
)
def test_a_dialect_tells_its_own_names_of_fields(field: str, told: str) -> None:
    names = {"sampling": "params.sampling", "sampling.logit_bias": "params.bias"}
    with pytest.raises(InvalidArgument) as refused, field_names(names):
        raise InvalidArgument(field, "is 2; must be from 0 to 1")
    assert refused.value.field == told
    assert refused.value.message == f"{told} is 2; must be from 0 to 1"
