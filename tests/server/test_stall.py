"""A reader that stops: the others go on, and what it costs is bounded."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

from support.clients.public_api import generate, text_request
from support.pods.harness import serve
from tokenpod_client.protos.tokenpod.v1.generation_service_pb2_grpc import GenerationServiceStub

#: Room for one request of two samples with 1900 tokens each and a few short ones, not for two.
SLOTS = 6000
LONG = {"max_new_tokens": 1900, "ignore_eos": True}


def test_a_stalled_reader_loses_its_stream_and_slows_nobody() -> None:
    with serve(
        *("--max-batch-total-tokens", str(SLOTS)),
        *("--max-top-n-tokens", "20"),
    ) as server:
        # A window that stays at 64 kB, and a channel of its own: other calls have theirs.
        options = [("grpc.http2.bdp_probe", 0), ("grpc.use_local_subchannel_pool", 1)]
        with grpc.insecure_channel(server.address, options=options) as channel:
            # Much to send a token, so that the window is full soon.
            greedy = text_request(
                "import os\n",
                stopping=LONG,
                sampling={"n": 2, "temperature": 1.0, "seed": 3},
                output={"top_n_tokens": 20, "return_logprobs": True},
            )
            stalled = GenerationServiceStub(channel).Generate(greedy, timeout=120)
            assert next(stalled).WhichOneof("event") == "started"

            stub = server.stub()
            short = text_request("import sys\n", stopping={**LONG, "max_new_tokens": 60})
            with ThreadPoolExecutor(4) as readers:
                streams = list(readers.map(lambda _: generate(stub, short), range(4)))
            assert [len(stream.samples[0].token_ids) for stream in streams] == [60] * 4

            # Fits once the stalled one's slots are free, though nobody has read it meanwhile.
            next_one = stub.Generate(text_request("x = 1\n", stopping=LONG, sampling={"n": 2}))
            assert next(next_one).WhichOneof("event") == "started"
            next_one.cancel()

            events = []
            with pytest.raises(grpc.RpcError) as lost:
                events.extend(stalled)
            got = sum(len(event.tokens.token_ids) for event in events)
            assert lost.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert "128 KiB" in lost.value.details()
            assert 0 < got < 2 * 1900
        assert server.stop() == 0
