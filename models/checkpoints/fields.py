"""Typed reading of a model's JSON files, whose contents are not trusted."""

from __future__ import annotations

import json
import sys
from collections import ChainMap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

from tokenpod.models.checkpoints.errors import ModelError

T = TypeVar("T")

#: No file of settings of a real model comes near it.
MAX_JSON_BYTES = 64 << 20

#: Whole numbers of a file may be larger.
_LARGEST = sys.float_info.max


class Fields:
    """An object of a JSON file; each getter checks type and range, and names the field it refuses.

    A field that is absent or null has the default; without a default it is an error.
    """

    def __init__(self, values: Mapping[str, Any], source: str) -> None:
        self.values = values
        self.source = source

    def __contains__(self, name: str) -> bool:
        return self.values.get(name) is not None

    def defaulting(self, **defaults: Any) -> Fields:
        """The same with `defaults` for fields that are absent or null."""
        missing = {name: value for name, value in defaults.items() if name not in self}
        return Fields(ChainMap(missing, cast(Any, self.values)), self.source)

    def replacing(self, **values: Any) -> Fields:
        """The same with `values` in place of what these fields say."""
        return Fields(ChainMap(values, cast(Any, self.values)), self.source)

    def only(self, name: str, *supported: Any) -> None:
        """Raise ModelError if a field is there and none of the values that are supported."""
        if name in self and self.values[name] not in supported:
            choices = ", ".join(map(repr, supported))
            raise ModelError(
                f"{self.source}: {name} {_shown(self.values[name])} is not supported "
                f"(supported: {choices})"
            )

    def integer(self, name: str, default: int | None = None, *, most: int = 1 << 31) -> int:
        """A whole number from 1 to `most`."""
        value = self._value(name, default)
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
            raise self._refused(name, value, f"a whole number from 1 to {most:,}")
        return value

    def one_of(self, name: str, choices: Sequence[int], default: int | None = None) -> int:
        """One of a few whole numbers; ModelError names those there are."""
        value = self.integer(name, default)
        self.only(name, *choices)
        return value

    def count(self, name: str, default: int, *, most: int = 1 << 16) -> int:
        """A whole number from 0 to `most`."""
        return 0 if self._value(name, default) == 0 else self.integer(name, default, most=most)

    def real(self, name: str, default: float | None = None, *, most: float = _LARGEST) -> float:
        """A positive, finite number, of at most `most`."""
        value = self._value(name, default)
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise self._refused(name, value, "a number")
        if not 0 < value < float("inf"):
            raise self._refused(name, value, "a positive, finite number")
        if value > most:
            raise self._refused(name, value, f"a number of at most {most:g}")
        return float(value)

    def optional_real(
        self, name: str, default: float | None, *, most: float = _LARGEST
    ) -> float | None:
        """A positive, finite number, of at most `most`; absent is the default, null is none."""
        if self.values.get(name, default) is None:
            return None
        return self.real(name, default, most=most)

    def optional_integer(self, name: str, default: int | None) -> int | None:
        """A whole number from 1 on; absent is the default, null is none."""
        return None if self.values.get(name, default) is None else self.integer(name, default)

    def first(self, *names: str) -> str:
        """The first of these fields that is there; if none is, the last."""
        return next((name for name in names if name in self), names[-1])

    def reals(self, name: str, count: int) -> tuple[float, ...]:
        """A list of so many positive, finite numbers."""
        value = self._value(name, None)
        if (
            not isinstance(value, list)
            or len(value) != count
            or not all(type(item) in (int, float) and 0 < item <= _LARGEST for item in value)
        ):
            raise self._refused(name, value, f"a list of {count} positive, finite numbers")
        return tuple(map(float, value))

    def counts(self, name: str, count: int) -> tuple[int, ...]:
        """A list of so many whole numbers from 0 on."""
        value = self._value(name, None)
        if (
            not isinstance(value, list)
            or len(value) != count
            or not all(type(item) is int and 0 <= item <= 1 << 31 for item in value)
        ):
            raise self._refused(name, value, f"a list of {count} whole numbers from 0 on")
        return tuple(value)

    def choice(self, name: str, choices: Mapping[str, T], default: str | None = None) -> T:
        """What `choices` has for a string; ModelError names those there are."""
        value = self.text(name, default)
        if value not in choices:
            raise ModelError(
                f"{self.source}: {name} {_shown(value)} is not supported "
                f"(supported: {', '.join(choices)})"
            )
        return choices[value]

    def flag(self, name: str, default: bool) -> bool:
        """True or false."""
        value = self._value(name, default)
        if not isinstance(value, bool):
            raise self._refused(name, value, "true or false")
        return value

    def text(self, name: str, default: str | None = None) -> str:
        """A string."""
        value = self._value(name, default)
        if not isinstance(value, str):
            raise self._refused(name, value, "a string")
        return value

    def texts(self, name: str) -> tuple[str, ...]:
        """A list of strings."""
        value = self._value(name, None)
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self._refused(name, value, "a list of strings")
        return tuple(value)

    def indices(self, name: str) -> frozenset[int]:
        """A list of whole numbers from 0 on; absent is empty."""
        value = self.values.get(name)
        items = [] if value is None else value
        if not isinstance(items, list) or not all(
            type(item) is int and item >= 0 for item in items
        ):
            raise self._refused(name, value, "a list of whole numbers from 0 on")
        return frozenset(items)

    def token_ids(self, name: str) -> frozenset[int]:
        """A token id, a list of them, or none."""
        value = self.values.get(name)
        ids = [] if value is None else value if isinstance(value, list) else [value]
        if not all(isinstance(item, int) and not isinstance(item, bool) for item in ids):
            raise self._refused(name, value, "a token id or a list of them")
        return frozenset(ids)

    def fields(self, name: str) -> Fields:
        """A nested object."""
        value = self._value(name, None)
        if not isinstance(value, dict):
            raise self._refused(name, value, "an object")
        return Fields(value, f"{self.source}: {name}")

    def _value(self, name: str, default: object) -> Any:
        value = self.values.get(name)
        if value is None:
            value = default
        if value is None:
            raise ModelError(f"{self.source}: {name} is missing")
        return value

    def _refused(self, name: str, value: object, expected: str) -> ModelError:
        return ModelError(f"{self.source}: {name} is {_shown(value)}; expected {expected}")


def _shown(value: object) -> str:
    """As it stands in an error."""
    shown = repr(value)
    return shown if len(shown) <= 80 else shown[:77] + "..."


def read_fields(path: Path) -> Fields:
    """The object in a JSON file; ModelError if there is none."""
    try:
        if path.stat().st_size > MAX_JSON_BYTES:
            raise ModelError(f"{path}: larger than {MAX_JSON_BYTES >> 20} MiB")
        values = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise ModelError(f"{path}: no such file") from None
    except OSError as error:
        raise ModelError(f"{path}: can't be read ({error.strerror})") from None
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path}: not valid JSON ({error})") from None
    if not isinstance(values, dict):
        raise ModelError(f"{path}: expected a JSON object")
    return Fields(values, path.name)
