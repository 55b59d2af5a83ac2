"""Interceptors around every rpc: exceptions become statuses, callers show a token, servers close.

A streaming handler can be an async generator, or a coroutine that calls `context.write` (as
grpcio's own Health/Watch does). `behaviour_of` makes the second of the first, so every layer around
a handler wraps one coroutine, whatever the rpc's arity.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import inspect
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

import grpc

from tokenpod.service.admission.admission import DRAINING
from tokenpod.service.calls.errors import (
    RETRY_SECONDS,
    Internal,
    ServiceError,
    Unauthenticated,
    Unavailable,
)
from tokenpod.service.rpc.token_file import TokenFile

log = logging.getLogger("tokenpod.rpc")

#: grpc.RpcMethodHandler and grpc.aio.ServicerContext, which are generic in their stubs only.
Handler = Any
Continuation = Callable[[grpc.HandlerCallDetails], Awaitable[Handler]]
Context = Any
#: Keys and values that a call carries; None: none.
Metadata = Iterable[tuple[str, str | bytes]] | None
#: (request or stream of requests, context) -> response, or None where it writes a stream.
Behaviour = Callable[[Any, Context], Awaitable[Any]]

#: Metadata in which a caller shows its token.
TOKEN_KEY = "authorization"  # noqa: S105 (a name, not a token)
#: Of a call's authentication context: what encrypts it.
_SECURITY = "transport_security_type"
_NO_TOKEN = "the call has no token"  # noqa: S105 (a text, not a token)


class Interceptor(grpc.aio.ServerInterceptor, ABC):
    """Wraps the handlers of a server."""

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> Handler:
        """Called by grpc."""
        handler = await continuation(handler_call_details)
        return handler and self.wrap(handler, handler_call_details)

    @abstractmethod
    def wrap(self, handler: Handler, details: grpc.HandlerCallDetails) -> Handler:
        """The handler of this call, or another one in its place."""


class Layers(Interceptor):
    """Several interceptors as one: grpc has a coroutine for each of its own, on every call.

    Args:
        layers: the outermost first.
    """

    def __init__(self, layers: Sequence[Interceptor]) -> None:
        self._inwards = tuple(reversed(layers))

    def wrap(self, handler: Handler, details: grpc.HandlerCallDetails) -> Handler:
        """The handler within all layers."""
        for layer in self._inwards:
            handler = layer.wrap(handler, details)
        return handler


class ErrorInterceptor(Interceptor):
    """Turns what a handler raises into a status with details.

    `context.abort` and cancellations pass untouched: they are answers already. Anything that is not
    a ServiceError is a fault of ours: the client gets an error id, the log the traceback under it.
    """

    def __init__(self) -> None:
        self._wrapped = Wrapped(_guarded)

    def wrap(self, handler: Handler, details: grpc.HandlerCallDetails) -> Handler:
        """Guard every call."""
        return self._wrapped(handler, details.method)


class AuthInterceptor(Interceptor):
    """Lets a call pass only with `authorization: Bearer TOKEN`.

    A missing or unknown token is UNAUTHENTICATED, as gRPC has it: the caller can fix it with a
    better one. Tokens are compared in constant time.

    Args:
        token_file: the tokens that are known, one on each line; read again when it changes.
        exempt: full names of the methods that need none of these tokens.
        only: those of all that need one; None: all others.
        plaintext: calls without TLS need none: they come by the loopback port.
    """

    def __init__(
        self,
        token_file: Path,
        exempt: Collection[str] = (),
        only: Collection[str] | None = None,
        *,
        plaintext: bool = False,
    ) -> None:
        self._tokens = TokenFile(token_file)
        self._exempt, self._only = exempt, only
        self._over_tls = Wrapped(self._asking_over_tls) if plaintext else None

    def wrap(self, handler: Handler, details: grpc.HandlerCallDetails) -> Handler:
        """Refuse calls without a known token."""
        if details.method in self._exempt:
            return handler
        if self._only is not None and details.method not in self._only:
            return handler
        if self._over_tls is not None:
            return self._over_tls(handler, details.method)
        fault = self._fault(details.invocation_metadata)
        return handler if fault is None else refusing(handler, fault)

    def _asking_over_tls(self, handler: Handler, method: str) -> Handler:
        """A handler that asks callers over TLS for a token. Only the call itself tells them."""
        inner = behaviour_of(handler)

        async def ask(requests: Any, context: Context) -> Any:
            if context.auth_context().get(_SECURITY) != [b"insecure"]:
                fault = self._fault(context.invocation_metadata())
                if fault is not None:
                    raise fault
            return await inner(requests, context)

        return with_behaviour(handler, ask)

    def _fault(self, metadata: Metadata) -> Unauthenticated | None:
        """What is wrong with the token of a call; None: nothing."""
        given = metadata_of(metadata, TOKEN_KEY)
        # With two tokens, a proxy before this server may have checked the other one.
        if len(given) == 1 and self._knows(given[0]):
            return None
        problem = "the call carries a token that is not known" if any(given) else _NO_TOKEN
        if len(given) > 1:
            problem = f"the call carries {len(given)} tokens; it must carry one"
        return Unauthenticated(f"{problem} (authorization: Bearer TOKEN)")

    def _knows(self, authorization: str) -> bool:
        scheme, _, token = authorization.partition(" ")
        if scheme.lower() != "bearer" or not token:
            return False
        return self._tokens.knows(token.strip().encode())


def caller_of(context: Any) -> str:
    """A caller's identity as a digest: its certificate and its token; the same for all without."""
    digest = hashlib.blake2b(digest_size=8)
    for identity in context.peer_identities() or ():
        digest.update(b"\0certificate " + identity)
    for key, value in context.invocation_metadata() or ():
        if key == TOKEN_KEY:
            digest.update(b"\0token " + (value.encode() if isinstance(value, str) else value))
    return digest.hexdigest()


# -- handlers of every kind --------------------------------------------------------------------

#: How a handler is called and made, by whether requests and answers are streams.
ARITIES: dict[tuple[bool, bool], tuple[str, Callable[..., Handler]]] = {
    (False, False): ("unary_unary", grpc.unary_unary_rpc_method_handler),
    (False, True): ("unary_stream", grpc.unary_stream_rpc_method_handler),
    (True, False): ("stream_unary", grpc.stream_unary_rpc_method_handler),
    (True, True): ("stream_stream", grpc.stream_stream_rpc_method_handler),
}


def behaviour_of(handler: Handler) -> Behaviour:
    """The coroutine function behind `handler`; of a generator, one that writes what it yields."""
    name, _ = ARITIES[handler.request_streaming, handler.response_streaming]
    behaviour: Any = getattr(handler, name)
    if not inspect.isasyncgenfunction(behaviour):
        found: Behaviour = behaviour
        return found

    async def write(request: Any, context: Context) -> None:
        # A client that goes away leaves the generator in the middle: it ends here and now.
        async with contextlib.aclosing(behaviour(request, context)) as stream:
            async for message in stream:
                await context.write(message)

    return write


def with_behaviour(handler: Handler, behaviour: Behaviour) -> Handler:
    """`handler` with another function behind it."""
    _, make = ARITIES[handler.request_streaming, handler.response_streaming]
    return make(behaviour, handler.request_deserializer, handler.response_serializer)


class Wrapped:
    """Handlers with something around them, made once: a method has the same one for every call.

    Args:
        wrap: (handler, full name of its method) -> what stands for it.
    """

    def __init__(self, wrap: Callable[[Handler, str], Handler]) -> None:
        self._wrap = wrap
        self._made: dict[str, tuple[Handler, Handler]] = {}

    def __call__(self, handler: Handler, method: str) -> Handler:
        """The wrapped `handler`; made again only if the method has another handler now."""
        known = self._made.get(method)
        if known is None or known[0] is not handler:
            known = self._made[method] = (handler, self._wrap(handler, method))
        return known[1]


def unparsed(handler: Handler, behaviour: Behaviour) -> Handler:
    """One that answers as `handler` does, and whose behaviour reads requests as bytes.

    It is one of a stream of requests, which are read only when they are asked for.
    """
    _, make = ARITIES[True, handler.response_streaming]
    return make(behaviour, None, handler.response_serializer)


def metadata_of(metadata: Metadata, key: str) -> list[str]:
    """The values that a call's metadata have under this key."""
    return [str(value) for name, value in metadata or () if name == key]


async def _at_once() -> None:
    """Wait for nothing."""


def refusing(
    handler: Handler, error: ServiceError, after: Callable[[], Awaitable[None]] = _at_once
) -> Handler:
    """A handler that answers `error` after `after`. What was sent is not even read."""

    async def refuse(requests: Any, context: Context) -> None:
        await after()
        await _abort(context, error)

    return unparsed(handler, refuse)


def _guarded(handler: Handler, method: str) -> Handler:
    inner = behaviour_of(handler)

    async def guarded(request: Any, context: Context) -> Any:
        try:
            return await inner(request, context)
        except grpc.aio.InternalError as error:
            # A message can't be written any more: the client has left, and its cancel follows.
            raise asyncio.CancelledError from error
        except Exception as error:
            await _answer(error, context, method)

    return with_behaviour(handler, guarded)


async def _answer(error: Exception, context: Context, method: str) -> None:
    """End the call with the status that `error` stands for."""
    if isinstance(error, grpc.aio.AbortError):
        raise error
    fault: ServiceError
    if not isinstance(error, ServiceError):
        fault = internal = Internal()
        extra = {"error_id": internal.error_id, "method": method}
        log.error("internal error", exc_info=error, extra=extra)
    else:
        fault = error
    # gRPC keeps what `abort` raises in the call's state, a cycle with every frame on the way here.
    # So what the call has read goes now, with its frames, and not when garbage is collected.
    error.with_traceback(None)
    error.__context__ = error.__cause__ = None
    await _abort(context, fault)


async def _abort(context: Context, error: ServiceError) -> None:
    try:
        await context.abort(error.code, error.message, error.answer())
    except grpc.aio.AbortError as aborted:
        # For telemetry, which is outside of this.
        aborted.reason = error.label  # type: ignore[attr-defined]
        raise


#: Seconds in which a client that retries calls again: the hint of a refusal is a little shorter.
AGAIN_SECONDS = 1.25 * RETRY_SECONDS
_DRAINING = Unavailable(DRAINING, retry_after=RETRY_SECONDS)


class Closing(Interceptor):
    """Delays the answers to the last calls of a server. It comes after authorisation.

    gRPC announces a stop to clients (GOAWAY) and cancels the calls that they send before they have
    read it, with CANCELLED, which clients do not retry. But a client that waits for an answer sends
    no call. So the last calls get no answer until GOAWAY has been sent to all clients; then they
    are refused, with a hint to retry.

        serving -- clients call again, and wait --> stop: GOAWAY --> the waiting calls are refused

    Args:
        most: calls that wait at the same time; more are refused at once.
        exempt: full names of the methods whose calls pass: probes must not wait.
        now: seconds of a clock that never goes back.
    """

    def __init__(
        self,
        most: int,
        exempt: Collection[str] = (),
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._most = most
        self._exempt = exempt
        self._now = now
        self._called_at = -float("inf")
        self._kept = 0
        #: Set once GOAWAY has been sent to all clients; None while the server serves.
        self._told: asyncio.Event | None = None
        self._why: ServiceError = _DRAINING

    async def stop(
        self,
        server: grpc.aio.Server,
        grace: float,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        why: ServiceError = _DRAINING,
    ) -> None:
        """Stop `server`, for good; at once if no call has come recently.

        A server that has been stopped stays so.

        Args:
            server: what this interceptor is part of.
            grace: seconds that running calls get after that.
            sleep: may return early, if it has become urgent.
            why: the error of the calls that waited.
        """
        if self._told is not None:
            await server.stop(None)
            return
        self._told, self._why = asyncio.Event(), why
        if self._now() - self._called_at < AGAIN_SECONDS:
            await sleep(AGAIN_SECONDS)
        stopping = asyncio.create_task(server.stop(grace))
        # The stop begins. On each connection GOAWAY goes ahead of the answers.
        await asyncio.sleep(0)
        self._told.set()
        await stopping

    def wrap(self, handler: Handler, details: grpc.HandlerCallDetails) -> Handler:
        """While the server closes, let the call wait and refuse it."""
        if details.method in self._exempt:
            return handler
        self._called_at = self._now()
        if self._told is None:
            return handler
        return refusing(handler, self._why, self._keep)

    async def _keep(self) -> None:
        """Wait until GOAWAY has been sent to all clients."""
        assert self._told is not None
        if self._kept >= self._most:
            return
        self._kept += 1
        try:
            await self._told.wait()
        finally:
            self._kept -= 1
