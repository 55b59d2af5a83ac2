"""Options of a channel, which the library and the commands share."""

from __future__ import annotations

#: Answers may be of any size: it is the server that bounds them.
OPTIONS: tuple[tuple[str, int], ...] = (("grpc.max_receive_message_length", -1),)


def metadata_of(token: str | None) -> tuple[tuple[str, str], ...]:
    """What identifies the caller on every call."""
    return (("authorization", f"Bearer {token}"),) if token else ()
