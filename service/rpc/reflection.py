"""Server reflection, for tools such as grpcurl: the old protocol and the new.

grpcio-reflection serves v1alpha only. v1's messages are the same on the wire under another package
name, so its service is the same servicer behind a generic handler. v1 has no descriptor here, so it
is not listed among the services: a list must not name what cannot be described.

protobuf's pool does not find the file of a method by the method's name, so that `grpcurl describe
pkg.Service.Method` would fail; that is fixed here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import grpc
from google.protobuf import descriptor_pool
from google.protobuf.descriptor import FileDescriptor
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from grpc_reflection.v1alpha._async import ReflectionServicer

from tokenpod.service.rpc.methods import SMALL, Method

V1ALPHA = "grpc.reflection.v1alpha.ServerReflection"
V1 = "grpc.reflection.v1.ServerReflection"

#: Each front end answers for itself: what is described is the same in all.
METHODS = tuple(
    Method(
        f"/{service}/ServerReflectionInfo",
        SMALL,
        streams=True,
        relayed=False,
        on_followers=True,
        traced=False,
    )
    for service in (V1ALPHA, V1)
)


def enable_reflection(
    table: Iterable[Method],
    server: grpc.aio.Server,
    *,
    files: Sequence[FileDescriptor] | None = None,
) -> None:
    """Serve reflection of these services.

    Args:
        table: what is served; its services are listed.
        server: does not run yet.
        files: nothing but what is in them can be described; None: all that this process knows.
    """
    names = dict.fromkeys(row.service for row in table)
    known = descriptor_pool.Default() if files is None else _pool_of(files)
    pool = _MethodFindingPool(known)
    servicer = ReflectionServicer([name for name in names if name != V1], pool)
    reflection_pb2_grpc.add_ServerReflectionServicer_to_server(servicer, server)
    handler = grpc.stream_stream_rpc_method_handler(
        servicer.ServerReflectionInfo,
        request_deserializer=reflection_pb2.ServerReflectionRequest.FromString,
        response_serializer=reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    methods = {"ServerReflectionInfo": handler}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(V1, methods),))


def _pool_of(files: Sequence[FileDescriptor]) -> descriptor_pool.DescriptorPool:
    """A pool of these files, what they import, and reflection itself."""
    pool, there = descriptor_pool.DescriptorPool(), set[str]()

    def add(file: FileDescriptor) -> None:
        if file.name in there:
            return
        there.add(file.name)
        for imported in file.dependencies:
            add(imported)
        pool.AddSerializedFile(file.serialized_pb)

    for file in (*files, reflection_pb2.DESCRIPTOR):
        add(file)
    return pool


class _MethodFindingPool:
    """A descriptor pool whose symbols include methods."""

    def __init__(self, pool: descriptor_pool.DescriptorPool) -> None:
        self._pool = pool

    def FindFileContainingSymbol(self, symbol: str) -> FileDescriptor:  # noqa: N802 - protobuf's name
        """Raises KeyError for an unknown symbol."""
        try:
            return self._pool.FindFileContainingSymbol(symbol)
        except KeyError:
            return self._pool.FindMethodByName(symbol).containing_service.file

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pool, name)
