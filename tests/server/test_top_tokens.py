"""Top tokens on a real server: shard rpcs report what is drawn from, `Generate` the raw logits."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from router.client import ShardClient
from router.conformance.fixtures import ask, tell
from router.records import Sampling
from router.wire import WIRES
from support.clients.public_api import generate, text_request
from support.pods.harness import ServerProcess

PROMPT = "def add(a, b):\n"
KNOBS = {
    "penalties": Sampling(repetition_penalty=1.5, frequency_penalty=1.0),
    "temperature": Sampling(temperature=0.4, seed=1),
    "watermark": Sampling(temperature=0.4, watermark=True, seed=2),
    "top_p": Sampling(top_p=0.9, repetition_penalty=1.2, seed=3),
    "typical_p": Sampling(typical_p=0.9, temperature=0.8, seed=4),
}


@pytest.fixture(params=WIRES, ids=str)
async def shard(request: pytest.FixtureRequest, server: ServerProcess) -> AsyncIterator[Any]:
    """A connection in each wire generation to the server, which holds no batch."""
    client = ShardClient(server.uds, request.param)
    yield client
    await client.clear_cache()
    await client.close()


@pytest.mark.parametrize("sampling", KNOBS.values(), ids=KNOBS)
async def test_a_token_and_its_top_tokens_are_of_one_distribution(
    shard: ShardClient, sampling: Sampling
) -> None:
    among = 0
    wanted = {"max_new_tokens": 12, "top_n_tokens": 20, "sampling": sampling}
    for generation in (await tell(shard, ask(0, PROMPT, **wanted))).generations:
        (top,), token = generation.top_tokens, generation.tokens
        own = dict(zip(top.ids, top.logprobs, strict=True)).get(token.ids[0])
        among += own is not None
        assert own in (None, token.logprobs[0])
    assert among > 6


async def test_five_top_tokens_of_a_request_with_top_k_2_are_two(shard: ShardClient) -> None:
    sampling = Sampling(top_k=2, temperature=1.5, seed=5)
    story = await tell(shard, ask(0, PROMPT, top_n_tokens=5, sampling=sampling))
    assert [len(generation.top_tokens[0].ids) for generation in story.generations] == [2] * 4


def test_generate_reports_those_of_the_raw_logits(stub: Any) -> None:
    def first_tops(**sampling: Any) -> Any:
        output = {"return_logprobs": True, "top_n_tokens": 5}
        request = text_request(
            PROMPT, stopping={"max_new_tokens": 1}, output=output, sampling=sampling
        )
        return generate(stub, request).samples[0].tops[0]

    plain, tuned = first_tops(), first_tops(temperature=0.3, top_k=2, seed=1)
    assert list(tuned.token_ids) == list(plain.token_ids)
    assert list(tuned.logprobs) == pytest.approx(list(plain.logprobs), abs=1e-5)
