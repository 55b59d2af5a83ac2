"""The gauges of the engine's load, as a collector hears of them from a real server."""

from __future__ import annotations

from support.clients.public_api import text_request
from support.outside.collector import collecting
from support.pods.harness import serve

LONG = {"max_new_tokens": 1900, "ignore_eos": True}


def test_gauges_are_back_at_zero_once_all_calls_have_been_cancelled() -> None:
    with collecting() as collector, serve("--otlp-endpoint", collector.endpoint) as server:
        stub = server.stub()
        streams = [stub.Generate(text_request("import os\n", stopping=LONG)) for _ in range(3)]
        for stream in streams:
            assert next(stream).WhichOneof("event") == "started"
        for stream in streams:
            stream.cancel()
        # The end of a server sends what its gauges say then; no step has followed the cancels.
        assert server.stop() == 0
        (_, running), *_ = collector.points("tokenpod.requests.running")
        (_, used), *_ = collector.points("tokenpod.kv.utilization")
        assert (running.as_int, used.as_double) == (0, 0.0)
