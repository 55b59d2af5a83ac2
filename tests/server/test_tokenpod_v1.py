"""`tokenpod.v1` over a real socket, on the embedded model, and beside `generate.v3`."""

from __future__ import annotations

import math
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from support.clients.public_api import (
    PROMPT,
    SHORT,
    ask,
    finished_of,
    once,
    refused,
    said,
    stream,
    tokens_of,
    violations,
)
from support.clients.shard_generate import generate
from support.pods.harness import ServerProcess
from support.waiting import wait_for
from tokenpod_client.protos.generate.v3 import generate_pb2 as v3
from tokenpod_client.protos.tokenpod.v1 import generation_pb2 as pb
from tokenpod_client.protos.tokenpod.v1 import generation_service_pb2 as service
from tokenpod_client.protos.tokenpod.v1.generation_service_pb2_grpc import GenerationServiceStub


@pytest.fixture(scope="module")
def api(server: ServerProcess) -> Any:
    return GenerationServiceStub(server.channel())


# -- the stream --------------------------------------------------------------------------------


def test_a_stream_is_started_tokens_finished_completed(api: Any) -> None:
    events = stream(api, ask(stopping={"max_new_tokens": 12}, request_id="one"))
    kinds = [event.WhichOneof("event") for event in events]
    assert kinds[0] == "started"
    assert kinds[-2:] == ["finished", "completed"]
    assert set(kinds[1:-2]) == {"tokens"}
    started, finished, usage = events[0].started, events[-2].finished, events[-1].completed.usage
    assert (started.request_id, started.model, started.max_new_tokens) == ("one", "demo", 12)
    assert finished.text == "".join(tokens.text for tokens in tokens_of(events))
    assert finished.finish_reason == pb.FINISH_REASON_LENGTH
    assert not finished.HasField("message"), "the prompt was no chat"
    assert usage.prompt_token_count == started.prompt_token_count
    assert usage.generated_token_count == finished.generated_token_count == 12


EQUAL: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"sampling": {"temperature": 1.2, "top_k": 40, "top_p": 0.9, "seed": 7}},
    "penalties": {
        "sampling": {
            **{"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": -0.5},
            **{"typical_p": 0.8, "min_p": 0.01, "temperature": 0.7, "seed": 3},
        }
    },
    "bias": {"sampling": {"logit_bias": {300: 5.0, 5: -100.0}}},
    "samples": {"sampling": {"n": 2, "temperature": 1.0, "seed": 5}},
    "stop": {"stopping": {"max_new_tokens": 40, "stop_sequences": ["return"]}},
    "stop kept": {
        "stopping": {
            **{"max_new_tokens": 40, "stop_sequences": ["return"]},
            **{"include_stop_sequence": True, "min_new_tokens": 2},
        }
    },
    "logprobs": {
        "output": {"return_logprobs": True, "top_n_tokens": 3, "return_prompt_logprobs": True}
    },
    "token ids": {"token_ids": {"ids": [5, 17, 301, 44]}},
    "truncated": {"text": PROMPT * 8, "truncate": 9},
}


@pytest.mark.parametrize("kind", EQUAL)
def test_the_same_request_gives_the_same_in_both_protocols(api: Any, shard: Any, kind: str) -> None:
    fields = {"text": PROMPT, "stopping": SHORT} | EQUAL[kind]
    if "token_ids" in fields:
        del fields["text"]
    ours = stream(api, pb.GenerateRequest(**fields))
    output = {name.removeprefix("return_"): x for name, x in fields.get("output", {}).items()}
    theirs = generate(shard, v3.GenerateRequest(**fields | {"output": output}))
    finished = sorted(finished_of(ours), key=lambda each: each.sample_index)
    assert len(finished) == len(theirs.samples)
    for mine, other in zip(finished, theirs.samples, strict=True):
        runs = tokens_of(ours, mine.sample_index)
        assert [t for run in runs for t in run.token_ids] == other.token_ids
        assert mine.text == other.text == "".join(run.text for run in runs)
        assert pb.FinishReason.Name(mine.finish_reason).removeprefix(
            "FINISH_REASON_"
        ) in v3.Finish.Name(other.finished.reason)
        assert mine.stop_sequence == other.finished.stop_sequence
        logprobs = [x for run in runs for x in run.logprobs]
        assert logprobs == pytest.approx(other.logprobs, abs=1e-4)
        tops = [list(top.token_ids) for run in runs for top in run.top_tokens]
        assert tops == [list(top.ids) for top in other.tops]
    mine, other = ours[0].started.prompt_tokens, theirs.started.prompt
    assert list(mine.token_ids) == list(other.ids)
    assert list(mine.texts) == list(other.texts)
    assert list(mine.logprobs) == pytest.approx(list(other.logprobs)[1:], abs=1e-4)
    assert all(math.isfinite(each) for each in mine.logprobs)


def test_a_whole_answer_is_what_the_stream_adds_up_to(api: Any) -> None:
    request = ask(
        sampling={"n": 2, "temperature": 1.0, "seed": 9},
        output={"return_logprobs": True, "return_text_offsets": True, "top_n_tokens": 2},
    )
    events, answer = stream(api, request), once(api, request)
    assert answer.started.seed == events[0].started.seed == 9
    assert answer.usage.generated_token_count == 16
    for each in finished_of(events):
        runs, result = tokens_of(events, each.sample_index), answer.results[each.sample_index]
        assert result.text == each.text
        assert result.finish_reason == each.finish_reason
        assert result.tokens.WhichOneof("delta") is None
        for name in ("token_ids", "special", "text_offsets"):
            joined = [x for run in runs for x in getattr(run, name)]
            assert list(getattr(result.tokens, name)) == joined, name
        assert len(result.tokens.logprobs) == len(result.tokens.top_tokens) == 8


def test_the_best_of_several_is_for_a_whole_answer(api: Any) -> None:
    request = ask(sampling={"best_of": 2, "temperature": 1.0, "seed": 4})
    answer = once(api, request)
    assert len(answer.results) == 1
    assert answer.usage.generated_token_count == 16, "both samples were generated"
    error = refused(grpc.StatusCode.INVALID_ARGUMENT, stream, api, request)
    assert "GenerateOnce" in violations(error)["sampling.best_of"]


# -- chats -------------------------------------------------------------------------------------


def test_a_chat_of_parts_is_the_chat_of_texts(api: Any, shard: Any) -> None:
    parts = {"messages": [{"role": "user", "content": [{"text": "Sum "}, {"text": "a list."}]}]}
    ours = once(api, pb.GenerateRequest(chat=parts, stopping=SHORT))
    plain = {"messages": [{"role": "user", "content": "Sum a list."}]}
    theirs = generate(shard, v3.GenerateRequest(chat=plain, stopping=SHORT))
    assert ours.results[0].text == theirs.samples[0].text
    assert list(ours.results[0].tokens.token_ids) == theirs.samples[0].token_ids


def test_an_answer_goes_back_as_the_next_turns_history(api: Any) -> None:
    first = pb.GenerateRequest(chat=said(("user", "Sum a list.")), stopping=SHORT)
    answer = once(api, first).results[0]
    assert answer.message.role == "assistant"
    again = pb.GenerateRequest(chat=first.chat, stopping=SHORT)
    again.chat.messages.append(answer.message)
    again.chat.messages.add(role="user", content=[{"text": "Shorter."}])
    by_hand = said(("user", "Sum a list."), ("assistant", answer.text), ("user", "Shorter."))
    same = pb.GenerateRequest(chat=by_hand, stopping=SHORT)
    assert once(api, again).results[0].text == once(api, same).results[0].text


# -- output ------------------------------------------------------------------------------------


def test_offsets_say_where_each_tokens_text_begins(api: Any) -> None:
    # Characters of several tokens come with the last of them.
    ids = list(api.Tokenize(service.TokenizeRequest(text="é", return_token_ids=True)).token_ids)
    bias = dict.fromkeys(ids[1:], 100.0)
    request = ask(
        sampling={"logit_bias": bias},
        output={"return_text_offsets": True},
        stopping={"max_new_tokens": 9},
    )
    events = stream(api, request)
    offsets = [at for run in tokens_of(events) for at in run.text_offsets]
    text = finished_of(events)[0].text
    assert len(offsets) == 9
    assert offsets == sorted(offsets)
    assert offsets[0] == 0
    assert offsets[-1] <= len(text)
    plain = stream(api, ask(output={"return_text_offsets": True}))
    said, written = finished_of(plain)[0].text, 0
    for run in tokens_of(plain):
        assert run.text_offsets[0] == written  # tokens that came together are one event
        assert said[written:].startswith(run.text)
        written += len(run.text)


def test_the_final_text_can_be_left_out(api: Any) -> None:
    events = stream(api, ask(output={"return_final_text": False}))
    assert "".join(run.text for run in tokens_of(events))
    assert finished_of(events)[0].text == ""
    chat = pb.GenerateRequest(
        chat=said(("user", "x")), stopping=SHORT, output={"return_final_text": False}
    )
    assert not once(api, chat).results[0].HasField("message")


def test_special_tokens_are_shown_if_asked_for(api: Any) -> None:
    # The beginning-of-text token, again and again.
    forced = {"sampling": {"logit_bias": {0: 100.0}}, "stopping": {"max_new_tokens": 3}}
    hidden = once(api, ask(**forced)).results[0]
    shown = once(api, ask(**forced, output={"skip_special_tokens": False})).results[0]
    assert list(hidden.tokens.token_ids) == list(shown.tokens.token_ids) == [0, 0, 0]
    assert hidden.text == ""
    asked = service.DetokenizeRequest(token_ids=[0], skip_special_tokens=False)
    name = api.Detokenize(asked).text
    assert name
    assert shown.text == name * 3


def test_spaces_are_put_around_special_tokens_that_are_shown(api: Any) -> None:
    forced = {"sampling": {"logit_bias": {0: 100.0}}, "stopping": {"max_new_tokens": 3}}
    output = {"skip_special_tokens": False, "spaces_between_special_tokens": True}
    shown = once(api, ask(**forced, output=output)).results[0]
    name = api.Detokenize(service.DetokenizeRequest(token_ids=[0], skip_special_tokens=False)).text
    assert shown.text == " ".join([name] * 3)


def test_a_tokens_rank_is_its_place_among_all(api: Any) -> None:
    output = {"return_ranks": True, "top_n_tokens": 5}
    sampling = {"temperature": 3.0, "seed": 5, "n": 2}
    answer = once(api, ask(sampling=sampling, output=output))
    ranks = []
    for result in answer.results:
        tokens = result.tokens
        assert len(tokens.ranks) == len(tokens.token_ids) == 8
        for token, rank, top in zip(tokens.token_ids, tokens.ranks, tokens.top_tokens, strict=True):
            assert (rank <= len(top.token_ids)) == (token in top.token_ids)
            best = list(top.token_ids)
            assert token not in best or best.index(token) == rank - 1
        ranks += tokens.ranks
    assert max(ranks) > 5
    greedy = stream(api, ask(output={"return_ranks": True}))
    assert [rank for run in tokens_of(greedy) for rank in run.ranks] == [1] * 8


def test_the_likeliest_tokens_at_each_position_of_a_prompt_are_told(api: Any) -> None:
    """They are those that the model would have generated there."""
    (result,) = once(api, ask(output={"top_n_tokens": 2, "return_logprobs": True})).results
    generated = result.tokens
    first = stream(
        api, ask(stopping={"max_new_tokens": 1}, output={"return_prompt_logprobs": True})
    )[0]
    before = list(first.started.prompt_tokens.token_ids)
    ids = {"ids": [*before, *generated.token_ids]}
    asked = pb.GenerateRequest(
        token_ids=ids,
        stopping={"max_new_tokens": 1},
        output={"prompt_top_n_tokens": 2, "return_ranks": True, "return_final_text": False},
    )
    for told in (
        once(api, asked).started.prompt_tokens,
        stream(api, asked)[0].started.prompt_tokens,
    ):
        assert list(told.token_ids) == ids["ids"]
        assert len(told.texts) == len(told.token_ids)
        assert not told.logprobs, "not asked for"
        assert len(told.ranks) == len(told.top_tokens) == len(told.token_ids) - 1
        for position, top in enumerate(generated.top_tokens, len(before) - 1):
            scored = told.top_tokens[position]
            assert list(scored.token_ids) == list(top.token_ids)[:2]
            assert list(scored.logprobs) == pytest.approx(list(top.logprobs)[:2], abs=1e-3)
            assert len(scored.texts) == 2
            assert told.ranks[position] == 1, "it was generated greedily"
        assert max(told.ranks) > 1
    assert not first.started.prompt_tokens.top_tokens
    assert not first.started.prompt_tokens.ranks


def test_a_long_prompts_top_tokens_are_told_in_pieces(api: Any) -> None:
    def request(tokens: int, top_n: int) -> pb.GenerateRequest:
        return pb.GenerateRequest(
            token_ids={"ids": [at % 500 for at in range(tokens)]},
            stopping={"max_new_tokens": 1},
            output={"prompt_top_n_tokens": top_n},
        )

    told = once(api, request(1900, 5)).started.prompt_tokens
    assert [len(top.token_ids) for top in told.top_tokens] == [5] * 1899


def test_only_allowed_tokens_are_drawn(api: Any) -> None:
    allowed = [44, 300, 5, 17]
    greedy = ask(sampling={"allowed_token_ids": allowed}, output={"return_logprobs": True})
    (result,) = once(api, greedy).results
    assert {*result.tokens.token_ids} <= {*allowed}
    drawn = ask(sampling={"allowed_token_ids": allowed, "temperature": 50.0, "seed": 3})
    assert {*once(api, drawn).results[0].tokens.token_ids} == {*allowed}
    alone = ask(sampling={"allowed_token_ids": [7]}, output={"return_logprobs": True})
    (result,) = once(api, alone).results
    assert list(result.tokens.token_ids) == [7] * 8
    assert list(result.tokens.logprobs) == [0.0] * 8


def test_the_tokens_of_a_bad_word_never_follow_each_other(api: Any) -> None:
    def generated(words: list[str]) -> list[int]:
        asked = ask(sampling={"bad_words": words}, stopping={"max_new_tokens": 32})
        return list(once(api, asked).results[0].tokens.token_ids)

    def tokens(text: str) -> list[int]:
        asked = service.TokenizeRequest(text=text, add_special_tokens=False, return_token_ids=True)
        return list(api.Tokenize(asked).token_ids)

    def runs(ids: list[int], size: int) -> list[list[int]]:
        return [ids[at : at + size] for at in range(len(ids) - size + 1)]

    words: dict[str, list[int]] = {}
    said = generated([])
    for size in (1, 2, 3, 2, 1):
        # A text that the tokenizer writes as the model did.
        texts = (
            (api.Detokenize(service.DetokenizeRequest(token_ids=run)).text, run)
            for run in runs(said, size)
        )
        text, run = next((text, run) for text, run in texts if tokens(text) == run)
        words[text] = run
        said = generated([*words])
        assert not any(run in runs(said, len(run)) for run in words.values())
    assert len(words) == 5


def test_a_words_tokens_are_counted_in_each_spelling(api: Any) -> None:
    def tokens(text: str) -> int:
        return api.Tokenize(
            service.TokenizeRequest(text=text, add_special_tokens=False)
        ).token_count

    words = [f"word{at} of {at * at}" for at in range(200)]
    sizes = {word: tokens(word) + tokens(f" {word}") for word in words}
    error = refused(grpc.StatusCode.INVALID_ARGUMENT, once, api, ask(sampling={"bad_words": words}))
    assert f"has {sum(sizes.values())} tokens" in error.details()
    assert "allows 1024 (--max-logit-bias)" in error.details()
    fits = []
    while sum(sizes[word] for word in fits) + max(sizes.values()) <= 1000:
        fits.append(words[len(fits)])
    allowed = [*range(24)]
    once(api, ask(sampling={"bad_words": fits, "allowed_token_ids": allowed}))


def test_an_end_becomes_likelier(api: Any) -> None:
    def length(**stopping: Any) -> int:
        asked = ask(stopping={"max_new_tokens": 60, **stopping})
        return int(once(api, asked).results[0].generated_token_count)

    assert length() == 60
    assert 3 < length(eos_boost={"start_token_count": 2, "factor": 100.0}) < 7
    assert 21 < length(eos_boost={"start_token_count": 20, "factor": 100.0}) < 25


def test_a_salt_keeps_prefixes_apart(api: Any) -> None:
    def cached(salt: str) -> int:
        request = ask(text="zq9 salted\n" + PROMPT * 3, cache_salt=salt, stopping=SHORT)
        return once(api, request).started.cached_token_count

    assert cached("a") == 0
    assert cached("a") > 10
    assert cached("b") == 0
    assert cached("") <= 1


def test_a_time_limit_is_a_duration_and_is_told(api: Any) -> None:
    stopping = {"time_limit": {"nanos": 300_000_000}, "ignore_eos": True, "max_new_tokens": 1900}
    events = stream(api, ask(stopping=stopping))
    started = events[0].started if events[0].HasField("started") else None
    assert finished_of(events)[0].finish_reason == pb.FINISH_REASON_TIME_LIMIT
    assert started is not None
    assert started.time_limit.nanos == 300_000_000


# -- names -------------------------------------------------------------------------------------


def test_another_model_is_not_found_and_the_served_one_is_named(api: Any) -> None:
    assert once(api, ask(model="demo")).started.model == "demo"
    calls = [
        (stream, api, ask(model="other")),
        (once, api, ask(model="other")),
        (api.Tokenize, service.TokenizeRequest(text="x", model="other")),
        (api.Detokenize, service.DetokenizeRequest(token_ids=[5], model="other")),
        (api.GetModel, service.GetModelRequest(name="other")),
    ]
    for call in calls:
        error = refused(grpc.StatusCode.NOT_FOUND, *call)
        assert error.details() == "there is no model 'other'; this server has 'demo'"
    status = rpc_status.from_call(error)
    resource = error_details_pb2.ResourceInfo()
    assert any(detail.Unpack(resource) for detail in status.details)
    assert (resource.resource_type, resource.resource_name) == ("model", "other")


def test_a_name_that_is_under_way_is_taken_until_its_call_has_ended(api: Any) -> None:
    long = ask(request_id="twin", stopping={"max_new_tokens": 1900, "ignore_eos": True})
    running = api.Generate(long, timeout=120)
    assert next(running).started.request_id == "twin"
    error = refused(grpc.StatusCode.ALREADY_EXISTS, stream, api, ask(request_id="twin"))
    assert "'twin'" in error.details()
    named = (("x-request-id", "twin"),)
    with pytest.raises(grpc.RpcError) as caught:
        once(api, ask(), metadata=named)
    assert caught.value.code() is grpc.StatusCode.ALREADY_EXISTS
    # Another caller's names are its own.
    other = (("authorization", "Bearer someone"),)
    assert stream(api, ask(request_id="twin"), metadata=other)
    running.cancel()

    def given_back() -> bool:
        try:
            return once(api, ask(request_id="twin")).started.request_id == "twin"
        except grpc.RpcError as error:
            if error.code() is not grpc.StatusCode.ALREADY_EXISTS:
                raise
            return False

    wait_for(given_back)


def test_labels_are_in_the_log(api: Any, server: ServerProcess) -> None:
    once(api, ask(labels={"team": "search", "job": "night ly"}, request_id="labelled"))
    (line,) = server.logged("labelled")
    assert "team" in line
    assert "night ly" in line
