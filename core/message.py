"""The base of all that travels between processes."""

from __future__ import annotations

import msgspec


class Message(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Base of everything that travels: immutable, encoded as an array that begins with its type."""
