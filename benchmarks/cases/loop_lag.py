"""How long a front end's event loop is held by the worst messages that a client can send.

A real server runs in a process of its own, whose loop notes the longest time between two of its
turns: on the clock, and as processor time of its own thread, which does not count what else runs on
the machine. Every method is sent every message. The last lines are the worst; the exit status is 1
if one of them took more than `--most-ms` of processor time.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import multiprocessing
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

import grpc
import uvloop

from benchmarks.support.pod import free_port
from benchmarks.support.report import Report
from tokenpod.service.config.sources import ServerSettings
from tokenpod.service.pod.model_store import resolve_model
from tokenpod.service.protocols import TABLE
from tokenpod.service.server import Server
from tokenpod.service.telemetry.logs import configure_logging
from tokenpod_client.protos.generate.v3 import generate_pb2 as pb
from tokenpod_client.protos.tei.v1 import tei_pb2 as tei
from tokenpod_client.protos.tokenpod.v1 import embedding_service_pb2 as es

MOST_BYTES = 4 * 1024 * 1024


async def watched(asked: Connection) -> None:
    """Note the longest time between two turns of the loop; send it when asked, and forget it."""
    loop, held = asyncio.get_running_loop(), [0.0, 0.0]  # on the clock, of the processor

    def tell() -> None:
        try:
            asked.recv()
        except EOFError:
            loop.remove_reader(asked.fileno())
            return
        asked.send(tuple(held))
        held[:] = 0.0, 0.0

    loop.add_reader(asked.fileno(), tell)
    while True:
        wall, cpu = time.perf_counter(), time.thread_time()
        await asyncio.sleep(0.0005)
        held[0] = max(held[0], time.perf_counter() - wall)
        held[1] = max(held[1], time.thread_time() - cpu)


def serve(port: int, asked: Connection, model: str) -> None:
    """Run a server until the process is ended."""
    settings = ServerSettings(
        hostname="127.0.0.1", port=port, health_port=0, threads=1, model_id=model
    )

    async def both() -> None:
        noting = asyncio.create_task(watched(asked))
        writer = configure_logging(level="info", json_output=False)
        await Server(settings, resolve_model(model, None), writer, []).run()
        noting.cancel()

    uvloop.run(both())


def varint(number: int) -> bytes:
    """As on the wire."""
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*out, number])


def nested(tag: int, unit: bytes) -> bytes:
    """A field of the request that is full of `unit`."""
    inner = unit * ((MOST_BYTES - 16) // len(unit))
    return bytes([tag << 3 | 2]) + varint(len(inner)) + inner


def messages() -> Iterator[tuple[str, bytes]]:
    """Legal ones and others, all of almost 4 MB or at the limits of a method."""
    full = MOST_BYTES - 64
    yield "unknown fields", b"\xf8\x7f\x01" * (full // 3)
    yield "groups", b"\x0b\x0c" * (full // 2)
    yield "empty fields", b"\x0a\x00" * (full // 2)
    yield "noise", bytes(range(255, 0, -1)) * (full // 255)
    for tag, inner in ((1, 2), (3, 1), (4, 10), (5, 3)):
        yield f"{tag} full of empty {inner}", nested(tag, bytes([inner << 3 | 2, 0]))
    yield (
        "ids of a byte",
        nested(2, b"\x0a" + varint(MOST_BYTES - 32) + b"\x01" * (full - 32))[:full],
    )
    ids = pb.TokenIds(ids=[100_000] * 262_144)
    yield "as many ids as may be", pb.GenerateRequest(token_ids=ids).SerializeToString()
    biases = pb.SamplingOptions(logit_bias=dict.fromkeys(range(3000), 1.0))
    yield "biases", pb.GenerateRequest(text="x", sampling=biases).SerializeToString()
    chat = pb.Chat(messages=[pb.ChatMessage(role="user", content="x")] * 2600)
    yield "a long chat", pb.GenerateRequest(chat=chat).SerializeToString()
    yield "a text", pb.GenerateRequest(text="é" * (full // 2)).SerializeToString()
    bad = pb.GenerateRequest(text="x" * (full - 16)).SerializeToString() + b"\x42\x01\xff"
    yield "a text, and one that is none", bad
    stopping = pb.StoppingCriteriaParameters(max_new_tokens=1)
    request = pb.Request(id=1, inputs="x", stopping_parameters=stopping)
    requests = [pb.Request.FromString(request.SerializeToString()) for _ in range(2000)]
    for at, each in enumerate(requests):
        each.id = at
    batch = pb.Batch(id=1, requests=requests, size=2000)
    yield "2,000 requests", pb.PrefillRequest(batch=batch).SerializeToString()
    empty = pb.Batch(id=1, requests=[pb.Request()] * 60_000)
    yield "60,000 empty requests", pb.PrefillRequest(batch=empty).SerializeToString()
    slots = pb.Request(id=1, inputs="x", slots=range(1_000_000), stopping_parameters=stopping)
    yield "a million slots", pb.PrefillRequest(batch=pb.Batch(requests=[slots])).SerializeToString()
    names = pb.FilterBatchRequest(batch_id=1, request_ids=[2**31] * 131_000)
    yield "131,000 names", names.SerializeToString()
    # Of what makes vectors, and lists tokens.
    yield (
        "so many tokens as are listed",
        tei.EncodeRequest(inputs=160_000 * "x ").SerializeToString(),
    )
    texts = [{"text": 15_000 * "x"}] * 256
    yield "256 texts, cut", es.EmbedRequest(inputs=texts, truncation=1).SerializeToString()
    lists = [{"tokens": {"ids": 1000 * [5]}}] * 256
    yield (
        "256 lists of tokens, cut",
        es.EmbedRequest(inputs=lists, truncation=1).SerializeToString(),
    )
    short = [{"text": 60 * "x"}] * 256
    yield "vectors of tokens", es.EmbedRequest(inputs=short, token_vectors=True).SerializeToString()
    yield (
        "30,000 documents",
        es.ScoreRequest(query="x", documents=30_000 * ["y"]).SerializeToString(),
    )


def methods() -> Iterator[tuple[str, bool]]:
    """Every method, and whether it answers with a stream."""
    for row in TABLE:
        if row.serve is not None or row.name == "/grpc.health.v1.Health/Check":
            yield row.name, row.streams


def send(channel: grpc.Channel, method: str, streams: bool, data: bytes) -> str:
    """The code that the call ends with."""
    try:
        if streams:
            next(iter(channel.unary_stream(method)(data, timeout=60)), None)
        else:
            channel.unary_unary(method)(data, timeout=60)
    except grpc.RpcError as error:
        return str(error.code().name)
    return "OK"


SMOKE = {
    "cpu": "--only biases --most-ms 1000",
}


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--most-ms", type=float, default=20.0)
    parser.add_argument("--only", default="", metavar="NAME", help="messages whose name has it")
    parser.add_argument("--model", default="demo", help="one that embeds is asked for vectors")
    parser.add_argument("--times", type=int, default=1, help="that each message is sent")


def run(arguments: argparse.Namespace, report: Report) -> int:
    """Send all, and list the worst; 1 if one of them took too long."""
    most = arguments.most_ms
    chosen = [each for each in messages() if arguments.only in each[0]] * arguments.times
    port = free_port()
    ask, asked = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(
        target=serve, args=(port, asked, arguments.model)
    )
    process.start()
    rows: list[tuple[float, float, str, str, str]] = []
    try:
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            info: Any = channel.unary_unary("/generate.v3.TextGenerationService/Info")
            deadline = time.monotonic() + 120
            while time.monotonic() < deadline:
                with contextlib.suppress(grpc.RpcError):
                    info(b"", timeout=5)
                    break
                time.sleep(0.2)
            for name, data in chosen:
                for method, streams in methods():
                    ask.send("start")
                    ask.recv()
                    code = send(channel, method, streams, data)
                    ask.send("end")
                    wall, cpu = ask.recv()
                    rows.append((cpu * 1000, wall * 1000, method, name, code))
    finally:
        process.terminate()
        process.join()
    rows.sort()
    report.note(f"{len(rows)} calls; the loop was held for")
    for cpu, wall, method, name, code in rows[-15:]:
        report.row("worst", processor_ms=cpu, clock_ms=wall, method=method, message=name, code=code)
    return int(rows[-1][0] > most)
