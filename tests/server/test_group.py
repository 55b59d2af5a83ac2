"""One model over several ranks: the same tokens as one rank's, from one pod and from several."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from typing import Any

import grpc
import pytest

from router.double import Router
from router.startup import RouterSettings
from router.streams import Prompt
from router.wire import V1, V3, Wire
from support.clients.public_api import generate, text_request
from support.pods.faults import Call
from support.pods.groups import ENV, FLAGS, Group, pods
from support.pods.harness import NOT_SERVING, SERVING, ServerProcess, serve
from support.waiting import wait_for
from tokenpod_client.protos.generate.v3 import generate_pb2 as pb
from tokenpod_client.protos.tokenpod.v1 import generation_pb2 as public
from tokenpod_client.protos.tokenpod.v1 import generation_service_pb2 as service
from tokenpod_client.protos.tokenpod.v1.generation_service_pb2_grpc import GenerationServiceStub

PROMPT = "import os\n"
STOPPING = {"max_new_tokens": 12, "ignore_eos": True}


@pytest.fixture(scope="module")
def two_ranks() -> Iterator[ServerProcess]:
    with serve(*FLAGS, "--num-shard", "2", env=ENV) as running:
        yield running
        assert running.stop() == 0


@pytest.fixture(scope="module")
def two_pods() -> Iterator[Group]:
    with pods(2) as running:
        yield running
        # The follower first, as a StatefulSet would.
        assert [pod.stop() for pod in reversed(running.pods)] == [0, 0]


def tokens(server: ServerProcess, **sampling: object) -> list[int]:
    request = text_request(PROMPT, stopping=STOPPING, sampling=sampling)
    return list(generate(server.stub(), request).samples[0].token_ids)


def test_two_ranks_generate_what_one_does(two_ranks: ServerProcess, server: ServerProcess) -> None:
    assert tokens(two_ranks) == tokens(server)
    assert len(two_ranks.engine_pids()) == 2


def test_two_ranks_keep_constraints(two_ranks: ServerProcess, server: ServerProcess) -> None:
    # Followers have no sampler, and masks come to the leader alone.
    texts = []
    for one in (two_ranks, server):
        schema = '{"type": "array", "items": {"enum": [1, 23]}, "minItems": 9}'
        request = public.GenerateRequest(
            text="x = ",
            constraint={"json_schema": schema},
            sampling={"temperature": 2.0, "seed": 4},
            stopping={"max_new_tokens": 60},
        )
        api = GenerationServiceStub(one.channel())
        asked = service.GenerateOnceRequest(request=request)
        (result,) = api.GenerateOnce(asked, timeout=120).results
        texts.append(result.text)
    assert texts[0] == texts[1]
    assert re.match(r"\[\s*(1|23)\s*,", texts[0])


def test_two_pods_generate_what_one_does(two_pods: Group, server: ServerProcess) -> None:
    assert tokens(two_pods.leader) == tokens(server)
    seeded = {"do_sample": True, "seed": 7, "temperature": 0.9}
    assert tokens(two_pods.leader, **seeded) == tokens(server, **seeded)


def test_a_follower_names_the_leader(two_pods: Group) -> None:
    follower = two_pods.pods[1]
    with pytest.raises(grpc.RpcError) as refused:
        list(follower.stub().Generate(text_request(PROMPT, stopping=STOPPING), timeout=30))
    assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert two_pods.leader.address in refused.value.details()
    found = follower.shard().ServiceDiscovery(pb.ServiceDiscoveryRequest(), timeout=30)
    assert list(found.urls) == [two_pods.leader.address]


def test_a_follower_answers_what_needs_no_step(two_pods: Group) -> None:
    leader, follower = (pod.shard() for pod in two_pods.pods)
    for ask, request in [
        ("Info", pb.InfoRequest()),
        ("Health", pb.HealthRequest()),
        ("Tokens", pb.TokensRequest(text=PROMPT)),
    ]:
        answers = [getattr(stub, ask)(request, timeout=30) for stub in (leader, follower)]
        assert answers[0] == answers[1]


def test_every_pod_is_healthy(two_pods: Group) -> None:
    for pod in two_pods.pods:
        for name in ("", "readiness", "startup", "liveness"):
            assert pod.health(name) == SERVING


@pytest.mark.parametrize(
    ("rpc", "request_"),
    [
        ("Warmup", pb.WarmupRequest()),
        ("Prefill", pb.PrefillRequest(batch=pb.Batch(id=1, requests=[pb.Request(inputs=PROMPT)]))),
        ("Decode", pb.DecodeRequest(batches=[pb.CachedBatch(id=1)])),
        ("FilterBatch", pb.FilterBatchRequest(batch_id=77, request_ids=[1])),
        ("ClearCache", pb.ClearCacheRequest()),
    ],
)
def test_a_follower_refuses_what_the_leader_alone_answers_and_names_it(
    two_pods: Group, rpc: str, request_: Any
) -> None:
    with pytest.raises(grpc.RpcError) as refused:
        getattr(two_pods.pods[1].shard(), rpc)(request_, timeout=30)
    assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert two_pods.leader.address in refused.value.details()


async def through_router(wire: Wire, shard: ServerProcess) -> list[tuple[int, ...]]:
    """The tokens of prompts that a router with this shard runs side by side."""
    settings = RouterSettings(max_input_tokens=64, max_total_tokens=128)
    router = await Router.start(shard.uds, wire=wire, settings=settings, seed=1)
    texts = ["import os\n", "def f(x):\n", "class A:\n", "x = 1\n", "for i in"]
    prompts = [
        Prompt(text=text, input_length=16, max_new_tokens=3 + 4 * at)
        for at, text in enumerate(texts)
    ]
    results = await asyncio.gather(*(router.generate(prompt) for prompt in prompts))
    await router.stop()
    return [tuple(token.id for token in result.tokens) for result in results]


@pytest.mark.parametrize("wire", [V1(), V3()], ids=["v1", "v3"])
async def test_a_router_gets_of_two_pods_what_one_gives(
    two_pods: Group, server: ServerProcess, wire: Wire
) -> None:
    assert await through_router(wire, two_pods.leader) == await through_router(wire, server)


# The last one here: the pods that the others share end with it.
def test_a_follower_that_is_to_stop_lets_what_runs_finish(two_pods: Group) -> None:
    leader, follower = two_pods.pods
    running = Call(leader, PROMPT, 50)
    running.wait_for_token()
    assert follower.stop() == 0
    running.seconds(0.0)
    assert running.code is None
    wait_for(lambda: leader.health() == NOT_SERVING)
    refused = Call(leader, PROMPT, 1)
    refused.seconds(0.0)
    assert refused.code is grpc.StatusCode.UNAVAILABLE
    assert leader.stop() == 0
