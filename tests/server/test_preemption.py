"""Streams of a server whose memory runs out: what clients read is what they read otherwise."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from support.clients.public_api import ask, once
from support.pods.harness import serve
from tokenpod_client.protos.tokenpod.v1 import generation_service_pb2 as service
from tokenpod_client.protos.tokenpod.v1.generation_service_pb2_grpc import GenerationServiceStub

STOPPING = {"max_new_tokens": 90, "ignore_eos": True}


def asked(number: int, stops: list[str]) -> Any:
    sampling = {"seed": number, "temperature": 0.8} if number % 2 else {}
    return ask(
        text=f"def function_{number}(value):\n",
        stopping={**STOPPING, "stop_sequences": stops},
        sampling=sampling,
    )


def told(api: Any, number: int, stops: list[str]) -> tuple[str, int]:
    (result,) = once(api, asked(number, stops)).results
    return result.text, result.finish_reason


SWAPPED = ("--host-kv-bytes", str(32 << 20), "--preemption", "swap")


@pytest.mark.parametrize(
    "more",
    [
        pytest.param((), id="computed again", marks=pytest.mark.slow),
        pytest.param(SWAPPED, id="swapped"),
    ],
)
def test_preempted_streams_say_the_same_and_end_at_the_same_stops(more: tuple[str, ...]) -> None:
    flags = ("--admission", "optimistic", "--max-batch-total-tokens", "220", *more)
    with serve(*flags, "--max-total-tokens", "200") as server:
        api = GenerationServiceStub(server.channel())
        plain = [told(api, number, [])[0] for number in range(10)]
        # From the middle of one token to that of another, two thirds into the text.
        stops = [
            [text[2 * len(text) // 3 :][:7]] if at < 4 else [] for at, text in enumerate(plain)
        ]
        calm = [told(api, number, stops[number]) for number in range(10)]
        load, asks = service.GetLoadRequest(), service.GetModelRequest()
        assert api.GetLoad(load).preemption_count == 0
        with ThreadPoolExecutor(10) as pool:
            crowded = [*pool.map(lambda number: told(api, number, stops[number]), range(10))]
        after = api.GetLoad(load)
        assert after.preemption_count > 0
        assert (after.swapped_token_count > 0) == (after.fetched_token_count > 0) == bool(more)
        assert after.swapped_sequence_count == 0
        assert after.host_total_token_count == api.GetModel(asks).model.host_token_count
        assert after.host_total_token_count == (4096 if more else 0)
        # In steps of other shapes numbers are rounded otherwise, which may decide one token.
        assert sum(ours != theirs for ours, theirs in zip(calm, crowded, strict=True)) <= 1
        assert after.stopped_request_count == 8
