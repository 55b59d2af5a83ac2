"""Server reflection, for tools such as grpcurl: the old protocol and the new.

grpcio-reflection serves v1alpha only. v1's messages are the same on the wire under another package
name, so its service is the same servicer behind a generic handler, and its description the old one
with the package's name changed.

protobuf's pool does not find the file of a method by the method's name, so that `grpcurl describe
pkg.Service.Method` would fail; that is fixed here.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from typing import Any

import grpc
from google.protobuf import descriptor_pool
from google.protobuf.descriptor import FileDescriptor
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from grpc_reflection.v1alpha._async import ReflectionServicer

from tokenpod.service.rpc.methods import SMALL, Method

V1ALPHA = "grpc.reflection.v1alpha.ServerReflection"
_V1_PACKAGE = "grpc.reflection.v1"
V1 = f"{_V1_PACKAGE}.ServerReflection"

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
    servicer = ReflectionServicer(list(names), _Pools(known))
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


def _pool_of_v1() -> descriptor_pool.DescriptorPool:
    """A pool of v1's protocol alone."""
    file = FileDescriptorProto.FromString(reflection_pb2.DESCRIPTOR.serialized_pb)
    file.name = file.name.replace("v1alpha", "v1")
    file.package = _V1_PACKAGE
    for message in file.message_type:
        for field in message.field:
            if field.type_name:
                field.type_name = _as_v1(field.type_name)
    for method in (method for service in file.service for method in service.method):
        method.input_type = _as_v1(method.input_type)
        method.output_type = _as_v1(method.output_type)
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(file.SerializeToString())
    return pool


def _as_v1(name: str) -> str:
    return name.replace(f".{reflection_pb2.DESCRIPTOR.package}.", f".{_V1_PACKAGE}.")


class _Pools:
    """A descriptor pool and that of reflection's v1, whose symbols include methods."""

    def __init__(self, pool: descriptor_pool.DescriptorPool) -> None:
        self._pools = (pool, _pool_of_v1())

    def FindFileContainingSymbol(self, symbol: str) -> FileDescriptor:  # noqa: N802 - protobuf's name
        """Raises KeyError for an unknown symbol."""
        for pool in self._pools:
            with contextlib.suppress(KeyError):
                return pool.FindFileContainingSymbol(symbol)
            with contextlib.suppress(KeyError):
                return pool.FindMethodByName(symbol).containing_service.file
        raise KeyError(symbol)

    def FindFileByName(self, name: str) -> FileDescriptor:  # noqa: N802 - protobuf's name
        """Raises KeyError for an unknown file."""
        try:
            return self._pools[0].FindFileByName(name)
        except KeyError:
            return self._pools[1].FindFileByName(name)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pools[0], name)
