"""Drafts over a real socket, on the embedded model: every protocol, with the tokens of none."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import grpc
import pytest

from router.client import ShardClient
from router.conformance.fixtures import Story, batch_of, tell
from router.conformance.fixtures import ask as routed
from router.records import FinishReason
from router.wire import V1, V2, V3, Wire
from support.clients.public_api import ask, finished_of, once, refused, stream, tokens_of
from support.pods.harness import ServerProcess, serve
from tokenpod_client.protos.generate.v3 import generate_pb2 as v3
from tokenpod_client.protos.tokenpod.v1 import generation_pb2 as pb
from tokenpod_client.protos.tokenpod.v1 import generation_service_pb2 as service
from tokenpod_client.protos.tokenpod.v1.generation_service_pb2_grpc import GenerationServiceStub

MOST = 4
#: What it says next, it has said before.
METHOD = """\
    def _read_{0}(self, source):
        if self._{0} is None:
            raise ValueError("no {0} here")
        return self._{0}.read(source)

"""
TEXT = 3 * "".join(map(METHOD.format, ("header", "body", "footer", "index", "table")))
LONG = {"max_new_tokens": 120, "ignore_eos": True}


#: Whether drafts pay depends on how busy the machine is. Here they are always tried.
ALWAYS = """
import sys
if "tokenpod.engine.process" in sys.orig_argv:
    from tokenpod.scheduler.drafts.drafting import Drafting
    made = Drafting.__init__
    Drafting.__init__ = lambda self, source, most, kv, costs: made(self, source, most, kv)
"""


@pytest.fixture(scope="module")
def drafting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("always")
    (folder / "sitecustomize.py").write_text(ALWAYS)
    flags = ("--speculate", str(MOST), "--dtype", "float32", "--front-ends", "2")
    with serve(*flags, env={"PYTHONPATH": str(folder)}) as server:
        yield server


@pytest.fixture(scope="module")
def api(drafting: ServerProcess) -> Any:
    return GenerationServiceStub(drafting.channel())


def both(api: Any, **fields: Any) -> tuple[list[Any], list[Any]]:
    """The same request with drafts and without."""
    wanted = {"text": TEXT, "stopping": LONG} | fields
    drafted, plain = [stream(api, ask(**wanted, **more)) for more in ({}, {"max_draft_tokens": 0})]
    assert ids_of(drafted) == ids_of(plain)
    return drafted, plain


def ids_of(events: list[Any]) -> list[int]:
    return [token for tokens in tokens_of(events) for token in tokens.token_ids]


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"sampling": {"temperature": 0.3, "seed": 5}, "output": {"return_logprobs": True}},
        {"output": {"top_n_tokens": 2, "return_ranks": True, "return_text_offsets": True}},
    ],
    ids=["greedy", "sampled", "told more"],
)
def test_a_stream_has_the_same_tokens_with_drafts(api: Any, fields: dict[str, Any]) -> None:
    drafted, plain = both(api, **fields)
    one, other = (finished_of(events)[0] for events in (drafted, plain))
    assert (one.text, one.finish_reason, one.generated_token_count) == (
        other.text,
        other.finish_reason,
        120,
    )
    for name in ("logprobs", "top_tokens", "ranks", "text_offsets"):
        few, many = ([getattr(t, name) for t in tokens_of(e)] for e in (drafted, plain))
        assert sum(map(len, few)) == sum(map(len, many))
    usage, without = drafted[-1].completed.usage, plain[-1].completed.usage
    assert 0 < usage.accepted_token_count <= usage.drafted_token_count
    assert usage.accepted_token_count < 120
    assert (without.drafted_token_count, without.accepted_token_count) == (0, 0)


def test_what_was_accepted_behind_a_stop_sequence_counts_nowhere(api: Any) -> None:
    stopping = LONG | {"stop_sequences": ["(self"], "min_new_tokens": 60}
    drafted, plain = both(api, stopping=stopping)
    one, other = (finished_of(events)[0] for events in (drafted, plain))
    assert one.finish_reason == other.finish_reason == pb.FINISH_REASON_STOP_SEQUENCE
    assert (one.text, one.generated_token_count) == (other.text, other.generated_token_count)
    usage = drafted[-1].completed.usage
    assert usage.accepted_token_count < usage.generated_token_count == len(ids_of(drafted))


def test_the_model_and_the_load_tell_of_drafts(api: Any) -> None:
    model = api.GetModel(service.GetModelRequest(), timeout=30).model
    assert (model.limits.max_draft_tokens, model.draft_method) == (MOST, "ngram")
    assert "max_draft_tokens" in model.features
    before = api.GetLoad(service.GetLoadRequest(), timeout=30)
    used = [once(api, ask(text=TEXT, stopping=LONG)).usage for _ in range(3)]
    after = api.GetLoad(service.GetLoadRequest(), timeout=30)
    drafted = after.drafted_token_count - before.drafted_token_count
    accepted = after.accepted_token_count - before.accepted_token_count
    assert drafted == sum(usage.drafted_token_count for usage in used)
    assert accepted == sum(usage.accepted_token_count for usage in used) <= drafted
    assert 0 < after.accepted_token_count <= after.drafted_token_count


def test_more_drafts_than_the_server_makes_are_refused(api: Any) -> None:
    error = refused(grpc.StatusCode.INVALID_ARGUMENT, stream, api, ask(max_draft_tokens=MOST + 1))
    assert "max_draft_tokens is 5" in error.details()
    assert "--speculate" in error.details()


def test_info_says_how_many_tokens_are_drafted(drafting: ServerProcess) -> None:
    assert drafting.shard().Info(v3.InfoRequest(), timeout=30).speculate == MOST


async def story(server: ServerProcess, wire: Wire, **wanted: Any) -> Story:
    client = ShardClient(server.uds, wire)
    try:
        return await tell(client, routed(0, TEXT, truncate=1000, **wanted))
    finally:
        await client.clear_cache()
        await client.close()


async def test_a_router_gets_several_tokens_a_step(drafting: ServerProcess) -> None:
    plain = await story(drafting, V1(), max_new_tokens=120, top_n_tokens=2)
    assert {len(each.tokens.ids) for each in plain.generations} == {1}
    for wire in (V2(), V3()):
        drafted = await story(drafting, wire, max_new_tokens=120, top_n_tokens=2)
        sizes = [len(each.tokens.ids) for each in drafted.generations]
        assert drafted.ids == plain.ids
        assert drafted.pieces == plain.pieces
        assert drafted.end == plain.end
        assert 1 < max(sizes) <= MOST + 1
        for each in drafted.generations:
            assert len(each.top_tokens) == len(each.tokens.ids) == len(each.tokens.logprobs)


async def test_a_stop_sequence_ends_a_router_s_request_within_a_step(
    drafting: ServerProcess,
) -> None:
    pieces = (await story(drafting, V1(), max_new_tokens=120)).pieces
    # By TGI's rules one that ends within a token is missed.
    runs = ["".join(pieces[at : at + 5]) for at in range(115)]
    fresh = [run for at, run in enumerate(runs) if run not in "".join(pieces[: at + 4])]
    stop = fresh[-1]
    wanted = {"max_new_tokens": 120, "stop_sequences": (stop,)}
    plain, drafted = [await story(drafting, wire, **wanted) for wire in (V1(), V3())]
    assert drafted.ids == plain.ids
    assert drafted.end == plain.end
    assert drafted.end.finish_reason == FinishReason.STOP_SEQUENCE


async def test_batches_of_a_router_are_joined_and_filtered_between_drafts(
    drafting: ServerProcess,
) -> None:
    alone = (await story(drafting, V1(), max_new_tokens=60)).ids
    client = ShardClient(drafting.uds, V3())
    ids: dict[int, list[int]] = {1: [], 2: []}

    def hear(reply: Any) -> None:
        for each in reply.generations:
            ids[each.request_id] += each.tokens.ids

    reply = await client.prefill(batch_of(1, routed(1, TEXT, truncate=1000, max_new_tokens=60)))
    hear(reply)
    for _ in range(3):
        reply = await client.decode([reply.batch])
        hear(reply)
    other = await client.prefill(batch_of(2, routed(2, TEXT, truncate=1000, max_new_tokens=60)))
    hear(other)
    reply = await client.decode([reply.batch, other.batch])
    hear(reply)
    batch = await client.filter_batch(reply.batch.id, [2])
    while batch is not None:
        reply = await client.decode([batch])
        hear(reply)
        batch = reply.batch
    assert ids[2] == alone
    assert ids[1] == alone[: len(ids[1])]
    await client.close()


# -- a draft model -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def modelled() -> Iterator[ServerProcess]:
    """The served model drafts for itself: every draft of a text without penalties is right."""
    with serve("--speculate", str(MOST), "--draft-model", "demo", "--dtype", "float32") as server:
        yield server


def test_a_draft_model_finds_what_a_text_has_not_repeated(modelled: ServerProcess) -> None:
    api = GenerationServiceStub(modelled.channel())
    model = api.GetModel(service.GetModelRequest(), timeout=30).model
    assert (model.limits.max_draft_tokens, model.draft_method) == (MOST, "draft_model")
    assert modelled.shard().Info(v3.InfoRequest(), timeout=30).speculate == MOST
    drawn = {"temperature": 0.8, "seed": 3}
    drafted, _ = both(api, text="def read(path):", sampling=drawn)
    usage = drafted[-1].completed.usage
    # Whether it pays is learned from what steps take: it is tried in any case.
    assert usage.drafted_token_count >= usage.accepted_token_count > 0
    load = api.GetLoad(service.GetLoadRequest(), timeout=30)
    assert load.drafted_token_count == usage.drafted_token_count
