"""`GetTokenizer`: a large tokenizer is packed once, kept once, and streamed to all who ask."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hashlib
import io
import json
import os
import random
import zipfile
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from smg_grpc_proto import vllm_engine_pb2_grpc as rpc
from smg_grpc_proto.generated import common_pb2 as common
from tokenizers import Tokenizer, models

from support.pods.costs import forget_peak, peak_bytes
from tokenpod.service.admission.admission import Admission
from tokenpod.service.admission.memory_budget import MemoryBudget
from tokenpod.service.config.sources import ServerSettings
from tokenpod.service.dialects.vllm.methods import METHODS
from tokenpod.service.rpc.interceptors import ErrorInterceptor
from tokenpod.service.rpc.listen import add_methods
from tokenpod.service.rpc.methods import MethodTable
from tokenpod.service.serving.backend import Backend
from tokenpod.service.serving.generate import GenerateService
from tokenpod.service.serving.serving import Serving
from tokenpod.service.text.encoder import Encoder
from tokenpod.service.text.tokenizer_archive import TokenizerArchive

pytestmark = pytest.mark.pod

MEGABYTE = 1024 * 1024
TOKENS = 100_000
CALLS = 200


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model's folder with a tokenizer of so many tokens."""
    rng, folder = random.Random(7), tmp_path_factory.mktemp("model")
    words = {f"{rng.getrandbits(40):x}{index:x}": index for index in range(TOKENS)}
    Tokenizer(models.WordLevel(words, unk_token=next(iter(words)))).save(
        str(folder / "tokenizer.json")
    )
    (folder / "config.json").write_text(json.dumps({"eos_token_id": 0}))
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    return folder


class Counted(Encoder):
    """Counts how often the tokenizer is read."""

    reads = 0

    def text_model(self) -> Any:
        self.reads += 1
        return super().text_model()


@dataclasses.dataclass
class Pod:
    """Its rpcs of a gateway on a socket."""

    encoder: Counted
    memory: MemoryBudget
    serving: Serving
    engine: Any

    async def fetch(self) -> tuple[int, str]:
        """How many bytes come, and the digest, which is the one that comes with them."""
        size, digest, said = 0, hashlib.sha256(), ""
        async for chunk in self.engine.GetTokenizer(common.GetTokenizerRequest(), timeout=300):
            assert not said, "the last message has the digest"
            size, said = size + len(chunk.data), chunk.sha256
            digest.update(chunk.data)
        assert said == digest.hexdigest()
        return size, said


@contextlib.asynccontextmanager
async def running(folder: Path, most: int = 1024 * MEGABYTE) -> AsyncIterator[Pod]:
    settings = ServerSettings(text_workers=1)
    admission = Admission(max_requests=9, max_bytes=most, max_message_bytes=4 * MEGABYTE)
    generate = GenerateService(admission)
    backend = Backend(MethodTable(METHODS), admission, generate, healthy=lambda: True)
    server = grpc.aio.server(interceptors=[ErrorInterceptor()])
    add_methods(backend, server)
    port = server.add_insecure_port("127.0.0.1:0")
    async with contextlib.AsyncExitStack() as life:
        encoder = await Counted.start(folder, settings, life)
        none: dict[str, Any] = dict.fromkeys(field.name for field in dataclasses.fields(Serving))
        archive = TokenizerArchive(encoder, admission.memory, generate.aside)
        serving = Serving(**{**none, "encoder": encoder, "archive": archive})
        generate._serving = serving
        ready: Any = SimpleNamespace()
        backend.follow(ready, model_id="m", leader_address="leader:1")
        await server.start()
        life.push_async_callback(server.stop, None)
        channel = await life.enter_async_context(grpc.aio.insecure_channel(f"127.0.0.1:{port}"))
        assert isinstance(encoder, Counted)
        yield Pod(encoder, admission.memory, serving, rpc.VllmEngineStub(channel))


async def test_many_calls_at_once_get_the_one_copy(folder: Path) -> None:
    async with running(folder) as pod:
        forget_peak(os.getpid())
        before = peak_bytes(os.getpid())
        answers = await asyncio.gather(*(pod.fetch() for _ in range(CALLS)))
        assert len(set(answers)) == 1
        assert pod.encoder.reads == 1
        size, _ = answers[0]
        assert size > MEGABYTE
        assert peak_bytes(os.getpid()) - before < 150 * MEGABYTE, "less than a copy for each"
        await pod.fetch()
        assert pod.encoder.reads == 1


async def test_the_zip_has_the_files_that_this_server_uses(folder: Path) -> None:
    async with running(folder) as pod:
        archive = await pod.serving.archive.get()
        with zipfile.ZipFile(io.BytesIO(archive.data)) as found:
            assert json.loads(found.read("tokenizer_config.json")) == {
                "chat_template": "{{ messages }}"
            }
            there = Tokenizer.from_buffer(found.read("tokenizer.json"))
            assert found.read("config.json") == (folder / "config.json").read_bytes()
        assert there.get_vocab_size() == TOKENS


async def test_the_zip_is_counted_until_another_model_is_served(folder: Path) -> None:
    async with running(folder) as pod:
        size, _ = await pod.fetch()
        assert pod.memory.taken == 0
        pod.memory.reserve(1)
        with pytest.raises(Exception, match=f"has {1024 * MEGABYTE - size} for them"):
            pod.memory.reserve(1024 * MEGABYTE - size)
        pod.serving.archive.release()
        pod.memory.reserve(1024 * MEGABYTE - size)


async def test_a_zip_that_would_leave_too_little_is_refused(folder: Path) -> None:
    async with running(folder, most=2 * MEGABYTE) as pod:
        with pytest.raises(grpc.aio.AioRpcError, match="--max-front-end-bytes") as refused:
            await pod.fetch()
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert pod.memory.taken == 0


async def test_a_caller_that_leaves_ends_it_for_nobody(folder: Path) -> None:
    async with running(folder) as pod:
        first = asyncio.create_task(pod.serving.archive.get())
        second = asyncio.create_task(pod.serving.archive.get())
        await asyncio.sleep(0)
        first.cancel()
        assert (await second).sha256
        assert pod.encoder.reads == 1
