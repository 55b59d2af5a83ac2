"""Checks of the values that programs pass: an error names the place and the forms that it takes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from google.protobuf.descriptor import FieldDescriptor as Field

#: Characters of a value in an error.
_SHOWN = 80

_SCALARS = {
    Field.TYPE_BOOL: "True or False",
    Field.TYPE_STRING: "a text",
    Field.TYPE_BYTES: "bytes",
    Field.TYPE_FLOAT: "a number",
    Field.TYPE_DOUBLE: "a number",
    Field.TYPE_INT32: f"a whole number from {-(2**31)} to {2**31 - 1}",
    Field.TYPE_UINT32: f"a whole number from 0 to {2**32 - 1}",
    Field.TYPE_UINT64: f"a whole number from 0 to {2**64 - 1}",
}


def wrong(where: str, value: object, forms: str) -> TypeError:
    """The error for a value at `where` that has none of `forms`."""
    shown = " ".join(repr(value).split())
    shown = shown if len(shown) <= _SHOWN else f"{shown[:_SHOWN]}..."
    return TypeError(f"{where} is {shown}: it must be {forms}")


def text_of(where: str, value: object) -> str:
    """A text. Raises TypeError for anything else, and for one that UTF-8 can't write."""
    if not isinstance(value, str):
        raise wrong(where, value, "a text")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise wrong(where, value, "a text without halves of surrogate pairs") from None
    return value


def entries_of(where: str, value: Any, forms: str, known: Sequence[str]) -> dict[str, Any]:
    """The entries of a mapping that are set; None is as if not there.

    Pydantic's objects count as what they dump, so that messages of other clients can be sent back.
    Raises TypeError for what is no mapping, and for a key that is set and not known.
    """
    if not isinstance(value, Mapping) and hasattr(value, "model_dump"):
        value = value.model_dump(exclude_none=True)
    if not isinstance(value, Mapping):
        raise wrong(where, value, forms)
    found = {str(key): each for key, each in value.items() if each is not None}
    for key in found.keys() - set(known):
        if found.pop(key) not in ([], {}, ""):
            raise TypeError(f"{where} has the key {key!r}, which is not known: it must be {forms}")
    return found


def schema_text(where: str, value: object) -> str:
    """A JSON Schema as JSON text: of a dict, of a pydantic model, or as it is given.

    The order of properties stays, since models are asked to write them in it. Raises TypeError.
    """
    if isinstance(value, str):
        return text_of(where, value)
    if callable(made := getattr(value, "model_json_schema", None)):
        value = made()
    if isinstance(value, (Mapping, bool)):
        try:
            return json.dumps(value, ensure_ascii=False, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise TypeError(f"{where} can't be written as JSON: {error}") from None
    raise wrong(
        where, value, "a JSON Schema as a dict, as JSON text, or as a pydantic model's class"
    )


def fill(kind: Any, given: Mapping[str, Any], within: str = "") -> Any:
    """A message with these fields. Raises TypeError that names the field that can't be set.

    Args:
        kind: the message's class.
        given: values by names of fields.
        within: what stands before the names in an error.
    """
    fields = kind.DESCRIPTOR.fields_by_name
    for name, value in given.items():
        # Protobuf would take each letter for a text of its own.
        if isinstance(value, (str, bytes)) and fields[name].is_repeated:
            raise wrong(within + name, value, form_of(fields[name]))
    try:
        return kind(**given)
    except (TypeError, ValueError):
        for name, value in given.items():
            try:
                kind(**{name: value})
            except (TypeError, ValueError):
                raise wrong(within + name, value, form_of(fields[name])) from None
        raise


def form_of(field: Any) -> str:
    """What a field takes, for an error."""
    kind = field.message_type
    if kind is not None and kind.GetOptions().map_entry:
        key, value = (form_of(kind.fields_by_name[name]) for name in ("key", "value"))
        return f"a mapping; each key {key}, each value {value}"
    if field.is_repeated:
        return f"a list, each of it {_one_of(field)}"
    return _one_of(field)


def _one_of(field: Any) -> str:
    if field.enum_type is not None:
        return f"one of {', '.join(field.enum_type.values_by_name)}"
    if field.message_type is not None:
        if field.message_type.full_name == "google.protobuf.Duration":
            return "seconds as a number, or a timedelta"
        names = ", ".join(field.message_type.fields_by_name)
        return f"a mapping with fields of {field.message_type.name} ({names}), or that message"
    return _SCALARS[field.type]
