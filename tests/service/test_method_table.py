"""One table of rpcs: all that is served has a row, each row is served, and the docs show them."""

from __future__ import annotations

import ast
import contextlib
import importlib
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor import ServiceDescriptor
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2
from smg_grpc_proto import vllm_engine_pb2

from support.clients.rpcs import Running, serving
from tokenpod.service.admission.admission import Admission
from tokenpod.service.calls.errors import FailedPrecondition, Unavailable
from tokenpod.service.protocols import TABLE
from tokenpod.service.rpc.health import HealthBoard
from tokenpod.service.rpc.interceptors import ErrorInterceptor
from tokenpod.service.rpc.listen import add_methods
from tokenpod.service.rpc.methods import Access, Gate, Method
from tokenpod.service.rpc.reflection import V1, V1ALPHA, enable_reflection
from tokenpod.service.serving.backend import Backend
from tokenpod.service.serving.generate import GenerateService

ROOT = Path(__file__).resolve().parents[2]
#: Ranks serve it to each other, from the engine.
OF_THE_ENGINE = "tokenpod.shard.v1.PlanService"


def services() -> Iterator[ServiceDescriptor]:
    """Every service that the protos describe, and those of other packages that are served too."""
    for path in sorted((ROOT / "protos").rglob("*.proto")):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        found = importlib.import_module(f"tokenpod_client.{name}_pb2").DESCRIPTOR
        yield from found.services_by_name.values()
    yield vllm_engine_pb2.DESCRIPTOR.services_by_name["VllmEngine"]
    yield health_pb2.DESCRIPTOR.services_by_name["Health"]
    yield reflection_pb2.DESCRIPTOR.services_by_name["ServerReflection"]


def described() -> dict[str, bool]:
    """Every rpc by its full name, and whether it answers with a stream."""
    found = {
        f"/{service.full_name}/{method.name}": method.server_streaming
        for service in services()
        if service.full_name != OF_THE_ENGINE
        for method in service.methods
    }
    # The new protocol of reflection has the messages of the old one, and no stubs here.
    old = {name: streams for name, streams in found.items() if V1ALPHA in name}
    return found | {name.replace(V1ALPHA, V1): streams for name, streams in old.items()}


def test_every_rpc_has_a_row_and_every_row_an_rpc() -> None:
    assert {row.name: row.streams for row in TABLE} == described()


def backend(*, relays: bool = False) -> Backend:
    """One whose model is not ready."""
    admission = Admission(max_requests=9, max_queue_tokens=9)
    generate = GenerateService(admission)
    return Backend(TABLE, admission, generate, healthy=lambda: True, relays=relays)


@pytest.fixture
async def server() -> Any:
    async def prepare(server: grpc.aio.Server) -> None:
        add_methods(backend(), server)
        await HealthBoard().add_to(server, TABLE.served)
        enable_reflection(TABLE, server)

    async with serving(interceptors=[ErrorInterceptor()], prepare=prepare) as running:
        yield running


async def test_every_row_is_served(server: Running) -> None:
    for row in TABLE:
        call: Any = server.channel.stream_stream(row.name)(iter([b""]), timeout=20)
        with contextlib.suppress(grpc.aio.AioRpcError):
            await call.read()
        call.cancel()
        # Handlers may answer UNIMPLEMENTED too, in words of their own.
        assert await call.details() != "Method not found!", row.name


def test_a_pod_that_follows_answers_what_its_rows_say_and_names_the_leader_else() -> None:
    follower, ready = backend(), object()
    follower.admission.closed = None
    with pytest.raises(Unavailable, match="not loaded"):
        follower.check("/generate.v3.TextGenerationService/Info")
    follower.follow(ready, model_id="m", leader_address="pod-0:50051")  # type: ignore[arg-type]
    answered = {"Health", "Info", "ServiceDiscovery", "Tokens", "ServerReflectionInfo"}
    answered |= {"Tokenize", "Detokenize", "GetModel", "ListAdapters", "ModelInfo"}
    answered |= {"HealthCheck", "GetModelInfo", "GetServerInfo", "GetTokenizer"}
    answered |= {"Check", "Watch", "List"}
    answered |= {"GetStatus", "SetLogLevel", "DumpStacks", "TakeProfile"}
    for row in TABLE:
        if row.name.rpartition("/")[2] in answered:
            follower.check(row.name)
        else:
            with pytest.raises(FailedPrecondition, match="ask the leader at pod-0:50051"):
                follower.check(row.name)
    assert list(follower.urls) == ["pod-0:50051"]


def test_a_further_front_end_checks_what_it_serves_itself_alone() -> None:
    further = backend(relays=True)
    for row in TABLE:
        if row.gate is Gate.NONE or row.relayed:
            assert further.check(row.name) is None
        else:
            with pytest.raises(Unavailable, match="not loaded"):
                further.check(row.name)


def literals(path: Path) -> Iterator[str]:
    """The string constants of a module that are no docstrings."""
    tree = ast.parse(path.read_text())
    docs = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docs:
            yield node.value


def test_no_rpc_is_named_outside_of_the_rows() -> None:
    services = {row.service for row in TABLE}
    rpcs = {row.name.rpartition("/")[2] for row in TABLE} - {"Health"}
    rows = {ROOT / "service" / "rpc" / name for name in ("health.py", "reflection.py")}
    faults = [
        f"{path.relative_to(ROOT)}: {literal}"
        for path in (ROOT / "service").rglob("*.py")
        if path not in rows and "dialects" not in path.parts
        for literal in literals(path)
        if literal in rpcs or any(f"/{rpc}" in literal for rpc in rpcs)
        or any(service in literal for service in services)
    ]  # fmt: skip
    assert faults == []


def test_only_dialects_know_the_messages_of_a_protocol() -> None:
    faults = [
        str(path.relative_to(ROOT))
        for path in (ROOT / "service").rglob("*.py")
        if "dialects" not in path.parts
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom)
        and (node.module or "").startswith("tokenpod_client.protos")
    ]
    assert faults == []


# -- docs --------------------------------------------------------------------------------------

BEFORE = {
    Gate.NONE: "nothing",
    Gate.READY: "the model is ready",
    Gate.QUEUE: "a place in the queue, and memory",
    Gate.ROW: "a place in the queue, a row in time, and memory",
}


def facts(row: Method) -> str:
    """What a row of the table in docs/contract.md says of an rpc."""
    cells = (
        BEFORE[row.gate],
        "asks the first" if row.relayed else "answers",
        "answers" if row.on_followers else "refuses",
    )
    return " | ".join(cells)


def named(rows: Iterable[Method]) -> str:
    """Their rpcs, each name once, as the page lists them."""
    return ", ".join(dict.fromkeys(f"`{row.name.rpartition('/')[2]}`" for row in rows))


def shown() -> set[str]:
    """The rows of the table: one for all rpcs that are alike."""
    alike = defaultdict(list)
    for row in TABLE:
        alike[facts(row)].append(row)
    return {f"| {named(rows)} | {said} |" for said, rows in alike.items()}


def test_the_contract_shows_the_table() -> None:
    page = (ROOT / "docs" / "contract.md").read_text()
    table = page.partition("| rpcs | before")[2].partition("\n\n")[0].splitlines()
    assert set(table[2:]) == shown()


def test_the_contract_says_who_needs_which_token_and_what_makes_no_span() -> None:
    page = (ROOT / "docs" / "contract.md").read_text()
    by = {access: named(row for row in TABLE if row.access is access) for access in Access}
    assert f"but {by[Access.HEALTH]}, which need none, " in page
    assert f"{by[Access.ADAPTERS]}, which need one of `--adapter-token-file`, " in page
    assert f"and {by[Access.ADMIN]}, which need one of `--admin-token-file`." in page
    silent = named(row for row in TABLE if not row.traced)
    assert f"Every call makes a span in traces, but {silent}.\n" in page


def test_the_limits_of_messages_are_those_in_the_docs() -> None:
    page = (ROOT / "docs" / "contract.md").read_text()
    page = page.partition("\n## Messages\n")[2].partition("\n## ")[0]
    for row in TABLE:
        name, own = row.name.rpartition("/")[2], row.limits
        lines = [line for line in page.splitlines() if line.startswith("|") and f"`{name}`" in line]
        (line,) = lines or [each for each in page.splitlines() if each.startswith("| all others")]
        _, _, most, fields, elements, _ = (cell.strip() for cell in line.split("|"))
        sizes = [own.size, *([own.trusted] if own.trusted else [])]
        for size in sizes:
            assert f"{size.fields:,}" in fields, row.name
            assert f"{size.elements:,}" in elements, row.name
        told = {None: "the listener's", 4096: "4 KiB", 1 << 20: "1 MiB"}
        assert most == told[own.bytes], row.name
