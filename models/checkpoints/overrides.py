"""Fields of config.json that the operator replaces (`--config-override`): rope, lengths.

What is given passes through the same getters as the file, so the same values are refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tokenpod.models.checkpoints.errors import ModelError
from tokenpod.models.checkpoints.fields import Fields

#: Two names of one object, by the age of the file: what is said under one is said under both.
_ROPE = ("rope_scaling", "rope_parameters")
#: What a new way to stretch leaves as it is, unless it says otherwise.
_KEPT = ("rope_theta", "partial_rotary_factor")


class Overridden(Fields):
    """config.json with `given` in place of what the file says; fields of `text_config` too.

    ModelError: rope that differs by the type of layer is replaced in part.
    """

    def __init__(self, fields: Fields, given: Mapping[str, Any]) -> None:
        self._watched = [top := _replaced(fields, given)]
        nested = given.get("text_config")
        if isinstance(nested, dict) and "text_config" in fields:
            text = _replaced(fields.fields("text_config"), nested)
            top["text_config"] = text
            self._watched.append(text)
        super().__init__(top, f"{fields.source} with config_override")

    def check_all_read(self, architecture: str) -> None:
        """Raise ModelError if a field was given that the architecture's map has not asked for."""
        unread = sorted(name for values in self._watched for name in values.unread)
        if unread:
            raise ModelError(f"config_override: {architecture} does not read {', '.join(unread)}")


class _Watched(dict[str, Any]):
    """Values that know which of the given ones nobody has asked for."""

    def __init__(self, values: Mapping[str, Any], given: Mapping[str, Any]) -> None:
        super().__init__(values)
        self.unread = set(given)

    def __getitem__(self, name: str) -> Any:
        self.unread.discard(name)
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        """As a dict's."""
        self.unread.discard(name)
        return super().get(name, default)


def _replaced(fields: Fields, given: Mapping[str, Any]) -> _Watched:
    values = {**fields.values, **given}
    stored = next((fields.fields(name).values for name in _ROPE if name in fields), {})
    theirs = [name for name in _ROPE if name in given]
    if theirs:
        new = given[theirs[0]]
        if new is None or isinstance(new, dict):
            kept = {name: stored[name] for name in _KEPT if name in stored}
            values |= dict.fromkeys(_ROPE) | {theirs[0]: (kept | (new or {})) or None}
    elif any(name in given for name in _KEPT) and stored:
        if any(isinstance(value, dict) for value in stored.values()):
            raise ModelError(
                "config_override: rope differs by the type of layer; give all of rope_parameters"
            )
        changed = {name: given[name] for name in _KEPT if name in given}
        values |= {name: {**stored, **changed} for name in _ROPE if name in fields}
    return _Watched(values, given)
