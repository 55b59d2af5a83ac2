"""What dialects' codecs share: fields by their names, and lists that are copied in slices."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor

from tokenpod.service.calls.errors import FieldError, InvalidArgument

#: Token ids that are copied before others get their turn: some milliseconds.
_SLICE_IDS = 32_768


def given(message: Any, kind: type) -> dict[str, Any]:
    """The fields that a message and a dataclass both have, by their names.

    Those that may be absent and are have no entry: the dataclass's default stands for them. Lists
    become tuples, maps dicts.
    """
    found = {}
    for name, present, made in _shared(message.DESCRIPTOR, kind):
        if not present or message.HasField(name):
            value = getattr(message, name)
            found[name] = value if made is None else made(value)
    return found


@functools.lru_cache
def _shared(
    descriptor: Descriptor, kind: type
) -> Sequence[tuple[str, bool, Callable[[Any], Any] | None]]:
    """Name, whether it may be absent, and how its value is copied: of each field that both have."""
    names = {field.name for field in fields(kind)}
    shared = (field for field in descriptor.fields if field.name in names)
    return [(f.name, f.has_presence, _made(f)) for f in shared if f.is_repeated or _is_plain(f)]


def _is_plain(field: FieldDescriptor) -> bool:
    return field.message_type is None


def is_map(field: FieldDescriptor) -> bool:
    """Whether a field is a map."""
    return field.message_type is not None and field.message_type.GetOptions().map_entry


def _made(field: FieldDescriptor) -> Callable[[Any], Any] | None:
    if is_map(field):
        return dict
    return tuple if field.is_repeated else None


def unless_unset(message: Any, field: str) -> bool:
    """A bool that is true unless a client says otherwise."""
    return getattr(message, field) if message.HasField(field) else True


async def copied(ids: Sequence[int]) -> tuple[int, ...]:
    """Token ids of a message. Other tasks get their turn while a long list is copied."""
    found: list[int] = []
    for at in range(0, len(ids), _SLICE_IDS):
        if at:
            await asyncio.sleep(0)
        found += ids[at : at + _SLICE_IDS]
    return tuple(found)


@contextlib.contextmanager
def within(path: str) -> Iterator[None]:
    """Let errors that name a field say that it lies below `path`."""
    try:
        yield
    except FieldError as error:
        # A key of metadata lies in no message.
        inside = "" if error.field.startswith("metadata ") else f"{path}."
        error.rename(f"{inside}{error.field}")
        raise


@contextlib.contextmanager
def field_names(names: Mapping[str, str]) -> Iterator[None]:
    """Let InvalidArgument name fields as a dialect's clients know them.

    Args:
        names: the dialect's path of a field or of a message, by ours; others stay as they are.
    """
    try:
        yield
    except InvalidArgument as error:
        error.rename(_renamed(error.field, names))
        raise


def _renamed(field: str, names: Mapping[str, str]) -> str:
    """`field` with the longest part of its path that has another name replaced."""
    ends = [len(field), *(match.start() for match in reversed([*re.finditer(r"[.\[]", field)]))]
    for end in ends:
        if field[:end] in names:
            return names[field[:end]] + field[end:]
    return field
