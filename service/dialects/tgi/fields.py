"""Which fields the messages of a generation of TGI's shard protocol have.

The generations differ in a few fields, which came or went one by one. Each is a fact of its own,
read off the generation's descriptors.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Fields:
    """Whether a generation's messages have these fields."""

    #: `Request`.
    input_chunks: bool
    add_special_tokens: bool
    adapter_id: bool
    chunk_len: bool
    #: `NextTokenChooserParameters`; a `grammar` has a `grammar_type`.
    frequency_penalty: bool
    grammar: bool
    #: `PrefillRequest`: a batch that the new one joins.
    cached_batch: bool
    #: `CachedBatch`: tokens that its next step processes.
    current_tokens: bool
    #: `DecodeResponse` and `PrefillResponse`: nanoseconds of the step.
    timings: bool
    #: `Generation`: its token as scalars; else as lists of one.
    scalar_token: bool
    #: `GeneratedText`.
    prompt_tokens: bool

    @classmethod
    def of(cls, pb: Any) -> Fields:
        """Of the generation whose generated module is `pb`."""

        def has(message: str, field: str) -> bool:
            return field in getattr(pb, message).DESCRIPTOR.fields_by_name

        return cls(
            input_chunks=has("Request", "input_chunks"),
            add_special_tokens=has("Request", "add_special_tokens"),
            adapter_id=has("Request", "adapter_id"),
            chunk_len=has("Request", "chunk_len"),
            frequency_penalty=has("NextTokenChooserParameters", "frequency_penalty"),
            grammar=has("NextTokenChooserParameters", "grammar"),
            cached_batch=has("PrefillRequest", "cached_batch"),
            current_tokens=has("CachedBatch", "current_tokens"),
            timings=has("DecodeResponse", "forward_ns"),
            scalar_token=has("Generation", "token_id"),
            prompt_tokens=has("GeneratedText", "prompt_tokens"),
        )


def given(message: Any, field: str) -> Any:
    """The value of a field; None if its generation has no such field, or nothing is set.

    Where a message can't tell 0 from "not set", 0 is "not set".
    """
    found = message.DESCRIPTOR.fields_by_name.get(field)
    if found is None or (found.has_presence and not message.HasField(field)):
        return None
    value = getattr(message, field)
    return value if found.has_presence else value or None


def known(kind: Any, **values: Any) -> Any:
    """A message of `kind` with those of `values` for which its generation has a field."""
    fields = kind.DESCRIPTOR.fields_by_name
    return kind(**{name: value for name, value in values.items() if name in fields})
