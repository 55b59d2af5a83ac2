"""A pod whose engine hangs, as the rendered release runs it: it ends by itself and is back."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

import grpc
import pytest

from deploy.emulator import Namespace
from deploy.helm import Helm
from deploy.rollout import until, values
from tokenpod_client.protos.tokenpod.v1 import generation_pb2 as pb
from tokenpod_client.protos.tokenpod.v1.generation_service_pb2_grpc import GenerationServiceStub


def engines(of: int) -> list[int]:
    """Process ids of a server's engines."""
    children = Path(f"/proc/{of}/task/{of}/children").read_text().split()
    return [int(pid) for pid in children if b"engine" in Path(f"/proc/{pid}/cmdline").read_bytes()]


@pytest.mark.slow
async def test_a_pod_whose_engine_hangs_is_restarted_without_a_drain(
    helm: Helm, tmp_path: Path, claims: Path
) -> None:
    given = values()
    given["server"] |= {"stallTimeout": 7}
    async with Namespace.running(helm.install(given), tmp_path, claims) as here:
        await here.until_ready()
        (pod,) = here.pods
        address = f"{pod.address}:{given['ports']['grpc']}"
        async with grpc.aio.insecure_channel(address) as channel:
            stopping = pb.StoppingOptions(max_new_tokens=1500, ignore_eos=True)
            request = pb.GenerateRequest(text="import os\n", stopping=stopping)
            call = GenerationServiceStub(channel).Generate(request, timeout=120)
            await call.read()
            (engine,) = engines(pod.process_id)
            os.kill(engine, signal.SIGSTOP)
            await until(lambda: not pod.ready)
            await until(lambda: bool(pod.exits))
            with contextlib.suppress(grpc.aio.AioRpcError):
                while await call.read() is not grpc.aio.EOF:
                    continue
            assert await call.code() is grpc.StatusCode.UNAVAILABLE
        await until(lambda: pod.ready)
        assert (pod.exits, pod.killed, pod.orphans) == ([1], False, False)
