"""`Generate` over a real socket, on the embedded model."""

from __future__ import annotations

import math
from typing import Any

import grpc
import pytest

from support.clients.public_api import violations
from support.clients.shard_generate import generate, text_request
from support.pods.harness import ServerProcess
from tokenpod_client.protos.generate.v3 import generate_pb2 as pb

PROMPT = "def fibonacci(n):\n"


def test_streams_started_then_tokens_then_finished(shard: Any) -> None:
    stream = generate(shard, text_request(PROMPT, stopping={"max_new_tokens": 12}))
    assert stream.started.prompt_tokens > 0
    assert stream.started.model_id == "demo"
    (sample,) = stream.samples
    assert len(sample.token_ids) == 12
    assert sample.finished.reason == pb.FINISH_LENGTH
    assert len(stream.events) > 4, "tokens come one by one, not all at the end"


def test_finished_tells_usage_and_timings(shard: Any) -> None:
    (sample,) = generate(shard, text_request(PROMPT, stopping={"max_new_tokens": 8})).samples
    timings, usage = sample.finished.timings, sample.finished.usage
    assert usage.generated_tokens == 8
    assert timings.queue_ns + timings.prefill_ns == timings.time_to_first_token_ns > 0
    assert timings.total_ns == timings.time_to_first_token_ns + timings.decode_ns
    assert timings.decode_ns > 0


def test_stream_off_sends_one_tokens_event(shard: Any) -> None:
    request = text_request(PROMPT, stopping={"max_new_tokens": 12}, output={"stream": False})
    stream = generate(shard, request)
    assert [e.WhichOneof("event") for e in stream.events] == ["started", "tokens", "finished"]


def test_greedy_is_the_default_and_repeats(shard: Any) -> None:
    request = text_request(PROMPT, stopping={"max_new_tokens": 16})
    first, second = generate(shard, request), generate(shard, request)
    assert first.samples[0].token_ids == second.samples[0].token_ids
    assert not first.samples[0].finished.HasField("seed")


def test_a_repeated_prompt_is_cached(shard: Any) -> None:
    request = text_request(PROMPT * 4 + "# cached?\n", stopping={"max_new_tokens": 4})
    generate(shard, request)
    started = generate(shard, request).started
    assert started.cached_tokens == started.prompt_tokens - 1


def test_same_seed_same_tokens_and_seed_is_told(shard: Any) -> None:
    request = text_request(
        PROMPT, sampling={"temperature": 1.2}, stopping={"max_new_tokens": 16, "ignore_eos": True}
    )
    first = generate(shard, request).samples[0]
    assert first.finished.HasField("seed")
    request.sampling.seed = first.finished.seed
    again = generate(shard, request).samples[0]
    request.sampling.seed = first.finished.seed ^ 1
    other = generate(shard, request).samples[0]
    assert first.token_ids == again.token_ids != other.token_ids


def test_samples_do_not_depend_on_what_else_runs(shard: Any) -> None:
    request = text_request(
        PROMPT,
        sampling={"temperature": 1.0, "seed": 11},
        stopping={"max_new_tokens": 24, "ignore_eos": True},
    )
    alone = generate(shard, request).samples[0].token_ids
    others = [
        shard.Generate(
            text_request(f"import {name}\n", stopping={"max_new_tokens": 60}), timeout=60
        )
        for name in ("os", "sys", "json", "re")
    ]
    among = generate(shard, request).samples[0].token_ids
    for call in others:
        list(call)
    assert alone == among


def test_n_samples_share_the_prompt_and_differ(shard: Any) -> None:
    request = text_request(
        "class Stack:\n    def __init__(self",
        sampling={"n": 2, "temperature": 1.0, "seed": 5},
        stopping={"max_new_tokens": 16, "ignore_eos": True},
    )
    stream = generate(shard, request)
    one, two = stream.samples
    assert one.token_ids != two.token_ids
    assert len(one.token_ids) == len(two.token_ids) == 16


def test_best_of_returns_the_likeliest(shard: Any) -> None:
    request = text_request(
        PROMPT,
        sampling={"best_of": 2, "temperature": 1.5, "seed": 3},
        stopping={"max_new_tokens": 8, "ignore_eos": True},
        output={"stream": False, "logprobs": True},
    )
    best = generate(shard, request).samples[0].finished.cumulative_logprob
    request.sampling.n = 2
    both = generate(shard, request).samples
    assert best == pytest.approx(max(s.finished.cumulative_logprob for s in both), rel=1e-4)


def test_logprobs_and_top_tokens(shard: Any) -> None:
    request = text_request(
        PROMPT,
        stopping={"max_new_tokens": 5},
        output={"logprobs": True, "top_n_tokens": 3},
    )
    (sample,) = generate(shard, request).samples
    assert len(sample.logprobs) == len(sample.tops) == 5
    for token, logprob, top in zip(sample.token_ids, sample.logprobs, sample.tops, strict=True):
        assert len(top.ids) >= 3
        assert top.ids[0] == token, "greedy takes the likeliest"
        assert top.logprobs[0] == pytest.approx(logprob, abs=1e-4)
        assert list(top.logprobs) == sorted(top.logprobs, reverse=True)
    assert sample.finished.cumulative_logprob == pytest.approx(sum(sample.logprobs), abs=1e-3)


def test_prompt_logprobs_come_first_with_nan(shard: Any) -> None:
    request = text_request(PROMPT, stopping={"max_new_tokens": 2}, output={"prompt_logprobs": True})
    started = generate(shard, request).started
    assert len(started.prompt.ids) == len(started.prompt.logprobs) == started.prompt_tokens
    assert math.isnan(started.prompt.logprobs[0])
    assert all(logprob < 0 for logprob in started.prompt.logprobs[1:])
    assert started.cached_tokens == 0


def test_prompt_logprobs_agree_with_generation(shard: Any) -> None:
    """What greedy decoding said of a token is what scoring it as a prompt says."""
    (sample,) = generate(
        shard,
        text_request(PROMPT, stopping={"max_new_tokens": 6}, output={"logprobs": True}),
    ).samples
    prompt = list(shard.Tokens(pb.TokensRequest(text=PROMPT, return_ids=True)).ids)
    request = pb.GenerateRequest(
        token_ids={"ids": prompt + sample.token_ids},
        stopping={"max_new_tokens": 1},
        output={"prompt_logprobs": True},
    )
    scored = generate(shard, request).started.prompt.logprobs[len(prompt) :]
    assert list(scored) == pytest.approx(sample.logprobs, abs=1e-3)


def test_token_ids_are_taken_as_they_are(shard: Any) -> None:
    ids = list(shard.Tokens(pb.TokensRequest(text=PROMPT, return_ids=True)).ids)
    by_text = generate(shard, text_request(PROMPT, stopping={"max_new_tokens": 8}))
    by_ids = generate(
        shard, pb.GenerateRequest(token_ids={"ids": ids}, stopping={"max_new_tokens": 8})
    )
    assert by_ids.started.prompt_tokens == len(ids) == by_text.started.prompt_tokens
    assert by_ids.samples[0].token_ids == by_text.samples[0].token_ids


def test_chat_is_rendered_with_the_template(shard: Any) -> None:
    chat = {"messages": [{"role": "user", "content": "open a file"}]}
    counted = shard.Tokens(pb.TokensRequest(chat=chat)).ntokens
    request = pb.GenerateRequest(chat=chat, stopping={"max_new_tokens": 4})
    assert generate(shard, request).started.prompt_tokens == counted > 3


def test_stop_sequence_is_cut_by_default_and_kept_on_request(shard: Any) -> None:
    (whole,) = generate(shard, text_request(PROMPT, stopping={"max_new_tokens": 40})).samples
    stop = whole.text[len(whole.text) // 2 :][:3]
    stopping = {"max_new_tokens": 40, "stop_sequences": [stop]}
    (cut,) = generate(shard, text_request(PROMPT, stopping=stopping)).samples
    assert cut.finished.reason == pb.FINISH_STOP_SEQUENCE
    assert cut.finished.stop_sequence == stop
    assert cut.text == whole.text[: whole.text.index(stop)]
    stopping["include_stop_sequence"] = True
    (kept,) = generate(shard, text_request(PROMPT, stopping=stopping)).samples
    assert kept.text == cut.text + stop


def test_stop_token_is_named_and_not_in_the_text(shard: Any) -> None:
    (whole,) = generate(shard, text_request(PROMPT, stopping={"max_new_tokens": 12})).samples
    stop = whole.token_ids[-1]
    at = whole.token_ids.index(stop)
    stopping = {"max_new_tokens": 12, "stop_token_ids": [stop]}
    (cut,) = generate(shard, text_request(PROMPT, stopping=stopping)).samples
    assert cut.finished.reason == pb.FINISH_STOP_SEQUENCE
    assert cut.finished.stop_token_id == stop
    assert cut.token_ids == whole.token_ids[: at + 1]
    assert whole.text.startswith(cut.text)


def test_time_limit_keeps_what_was_generated(shard: Any) -> None:
    request = text_request(
        PROMPT, stopping={"time_limit_ms": 300, "max_new_tokens": 2000, "ignore_eos": True}
    )
    (sample,) = generate(shard, request).samples
    assert sample.finished.reason == pb.FINISH_TIME_LIMIT
    assert 0 < len(sample.token_ids) < 2000


def test_logit_bias_bans_and_forces(shard: Any) -> None:
    (free,) = generate(shard, text_request(PROMPT, stopping={"max_new_tokens": 1})).samples
    banned = text_request(
        PROMPT,
        sampling={"logit_bias": {free.token_ids[0]: -100}},
        stopping={"max_new_tokens": 1},
    )
    assert generate(shard, banned).samples[0].token_ids != free.token_ids
    forced = text_request(
        PROMPT,
        sampling={"logit_bias": {77: 100}},
        stopping={"max_new_tokens": 3, "ignore_eos": True},
    )
    assert generate(shard, forced).samples[0].token_ids == [77] * 3


def test_truncate_keeps_the_last_tokens(shard: Any) -> None:
    ids = list(shard.Tokens(pb.TokensRequest(text=PROMPT * 5, return_ids=True)).ids)
    cut = generate(shard, text_request(PROMPT * 5, truncate=7, stopping={"max_new_tokens": 6}))
    last = generate(
        shard, pb.GenerateRequest(token_ids={"ids": ids[-7:]}, stopping={"max_new_tokens": 6})
    )
    assert cut.started.prompt_tokens == 7
    assert cut.samples[0].token_ids == last.samples[0].token_ids


def test_request_id_comes_back_from_field_metadata_or_server(shard: Any) -> None:
    request = text_request(PROMPT, request_id="mine-1", stopping={"max_new_tokens": 1})
    assert generate(shard, request).started.request_id == "mine-1"
    request.request_id = ""
    named = generate(shard, request, metadata=(("x-request-id", "meta-2"),))
    assert named.started.request_id == "meta-2"
    call = shard.Generate(request, timeout=60)
    made = next(iter(call)).started.request_id
    assert dict(call.initial_metadata())["x-request-id"] == made
    assert len(made) >= 16


def test_a_prompt_that_is_too_long_is_refused_with_the_numbers(shard: Any) -> None:
    with pytest.raises(grpc.RpcError) as error:
        generate(shard, text_request("x = 1\n" * 3000))
    assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "--max-input-tokens" in violations(error.value)["prompt"]


def test_cancel_frees_the_slots(server: ServerProcess, shard: Any) -> None:
    """The pool holds fewer than these calls reserve: they pass only if cancelling frees."""
    for _ in range(40):
        call = shard.Generate(
            text_request(PROMPT, stopping={"max_new_tokens": 1900, "ignore_eos": True}),
            timeout=60,
        )
        next(iter(call))
        call.cancel()
    generate(shard, text_request(PROMPT, stopping={"max_new_tokens": 1}), timeout=60)


def test_deadline_ends_a_stream(shard: Any) -> None:
    request = text_request(PROMPT, stopping={"max_new_tokens": 1900, "ignore_eos": True})
    with pytest.raises(grpc.RpcError) as error:
        generate(shard, request, timeout=0.4)
    assert error.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED


def test_a_list_of_ids_that_is_too_long_is_refused_by_its_length(shard: Any) -> None:
    many = pb.TokensRequest(text="word " * 150_000, return_ids=True)
    with pytest.raises(grpc.RpcError) as refused:
        shard.Tokens(many, timeout=60)
    assert "300001" in violations(refused.value)["return_ids"]
    many.return_ids = False
    assert shard.Tokens(many, timeout=60).ntokens == 300_001
