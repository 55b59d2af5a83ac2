"""The rpcs of `tokenpod.v1.AdapterService`."""

from __future__ import annotations

import base64
import binascii
from typing import Any

from tokenpod.service.calls.errors import InvalidArgument
from tokenpod.service.dialects.tokenpod_v1.model import adapter_of
from tokenpod.service.rpc.interceptors import Context
from tokenpod.service.rpc.methods import SMALL, Access, Gate, Method, method_of
from tokenpod.service.serving.adapter_admin import AdapterAdmin, page_of
from tokenpod.service.serving.backend import Backend
from tokenpod_client.protos.tokenpod.v1 import adapter_service_pb2 as pb


async def load_adapter(
    backend: Backend, request: pb.LoadAdapterRequest, context: Context
) -> pb.LoadAdapterResponse:
    """Load an adapter, or another version of one."""
    facts = await _admin(backend).load(request.name, request.path, request.digest)
    return pb.LoadAdapterResponse(adapter=adapter_of(facts))


async def unload_adapter(
    backend: Backend, request: pb.UnloadAdapterRequest, context: Context
) -> pb.UnloadAdapterResponse:
    """Unload an adapter once nobody has it."""
    await _admin(backend).unload(request.name)
    return pb.UnloadAdapterResponse()


async def list_adapters(
    backend: Backend, request: pb.ListAdaptersRequest, context: Context
) -> pb.ListAdaptersResponse:
    """Some of the adapters that there are."""
    adapters = backend.generate.serving.adapters
    page, last = page_of(adapters, request.page_size, _place(request.page_token))
    return pb.ListAdaptersResponse(
        adapters=[adapter_of(each) for each in page],
        next_page_token=base64.urlsafe_b64encode(last.encode()).decode(),
    )


def _admin(backend: Backend) -> AdapterAdmin:
    return AdapterAdmin(backend.generate.serving, backend.admission)


def _place(token: str) -> str:
    """The name that a page ended with."""
    try:
        return base64.b64decode(token, altchars=b"-_", validate=True).decode()
    except (binascii.Error, ValueError):
        raise InvalidArgument("page_token", "is none that this server gave") from None


def _row(name: str, serve: Any, **row: Any) -> Method:
    service = pb.DESCRIPTOR.services_by_name["AdapterService"]
    return method_of(service, name, SMALL, serve=serve, strict=True, gate=Gate.READY, **row)


METHODS = (
    _row("LoadAdapter", load_adapter, access=Access.ADAPTERS),
    _row("UnloadAdapter", unload_adapter, access=Access.ADAPTERS),
    _row("ListAdapters", list_adapters, on_followers=True),
)
