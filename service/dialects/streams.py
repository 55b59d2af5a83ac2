"""For protocols that stream text: the name of a request, and the loop that writes its events."""

from __future__ import annotations

import uuid
from typing import Any, Protocol

from tokenpod.service.dialects import validate
from tokenpod.service.serving.generation import Generation

#: Metadata of a call, and of its answer: the request's name.
REQUEST_ID_KEY = "x-request-id"


class Writer(Protocol):
    """Turns what a generation brings into a protocol's messages."""

    @property
    def done(self) -> bool:
        """Whether every message has been handed out."""
        ...

    def next(self) -> Any:
        """The next message; None: nothing yet."""
        ...


def request_id_of(named: str, context: Any) -> str:
    """The name of a request: what its message says, else its metadata, else a new one.

    Raises InvalidArgument for a name in metadata that is too long or not printable ASCII.
    """
    if named:
        return named
    for key, value in context.invocation_metadata() or ():
        if key == REQUEST_ID_KEY and value:
            found = value if isinstance(value, str) else value.decode("ascii", "replace")
            validate.check_request_id(found, f"metadata {REQUEST_ID_KEY}")
            return found
    return uuid.uuid4().hex


async def write_all(writer: Writer, generation: Generation, context: Any) -> None:
    """Write a stream to its end. Raises what the generation fails with.

    It writes where a generator would yield: each layer around a generator costs every token one
    more switch of coroutines.
    """
    while not writer.done:
        await generation.news()
        while (message := writer.next()) is not None:
            await context.write(message)
