"""JSON schemas whose texts have no end: each needs another one within.

A schema has an end if all that it needs has one (what `allOf` and `$ref` name, properties that are
required, items that there must be), and one of what it may be. What has an end is found from the
leaves up, each part once: what is left has none.
"""

from __future__ import annotations

import re
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from typing import Any

#: Parts that are looked at before others get their turn.
_SLICE = 256
#: A JSON pointer's index (RFC 6901): ASCII digits, of which Python takes others, too.
_INDEX = re.compile("0|[1-9][0-9]{0,8}")


@dataclass(slots=True, eq=False)
class _Part:
    """Has an end once so many of the parts that it waits for have one."""

    place: str
    missing: int = 0
    needs: list[_Part] = field(default_factory=list)
    needed_by: list[_Part] = field(default_factory=list)

    @property
    def ends(self) -> bool:
        return self.missing <= 0

    def all_of(self, parts: list[_Part]) -> _Part:
        """Wait for all of these."""
        return self._of(parts, len(parts))

    def one_of(self, parts: list[_Part]) -> _Part:
        """Wait for one of these."""
        return self._of(parts, 1)

    def _of(self, parts: list[_Part], missing: int) -> _Part:
        self.needs, self.missing = parts, missing
        for part in parts:
            part.needed_by.append(self)
        return self


def endless_part(schema: dict[str, Any]) -> Generator[None, None, str]:
    """Where a schema needs itself again; empty: some text has an end. Yields now and then.

    A `$ref` that leads nowhere is left to the compiler.
    """
    parts: dict[int, _Part] = {}
    waiting: list[tuple[dict[str, Any], _Part]] = []

    def part_of(value: Any, place: str) -> _Part:
        if not isinstance(value, dict):
            return _Part(place)
        if id(value) not in parts:
            parts[id(value)] = part = _Part(place)
            waiting.append((value, part))
        return parts[id(value)]

    root = part_of(schema, "#")
    while waiting:
        if len(parts) % _SLICE == 0:
            yield
        each, part = waiting.pop()
        part.all_of([*_needs(each, part.place, schema, part_of)])
    ended = [part for part in _below(root) if part.ends]
    for looked, part in enumerate(ended, 1):  # grows meanwhile
        if looked % _SLICE == 0:
            yield
        for other in part.needed_by:
            other.missing -= 1
            if other.missing == 0:
                ended.append(other)
    return "" if root.ends else _place(root)


def _needs(
    schema: dict[str, Any], place: str, root: dict[str, Any], part_of: Any
) -> Iterator[_Part]:
    """What all texts of a schema need."""
    reference = schema.get("$ref")
    if isinstance(reference, str) and (found := _target(root, reference)) is not None:
        yield _Part(f"{place}/$ref").all_of([part_of(found, reference)])
    if "enum" in schema or "const" in schema:
        return
    for at, each in enumerate(_list(schema.get("allOf"))):
        yield part_of(each, f"{place}/allOf/{at}")
    for keyword in ("anyOf", "oneOf"):
        if some := _list(schema.get(keyword)):
            each_of = [part_of(each, f"{place}/{keyword}/{at}") for at, each in enumerate(some)]
            yield _Part(f"{place}/{keyword}").one_of(each_of)
    kinds = schema.get("type")
    kinds = kinds if isinstance(kinds, list) else [kinds]
    if {*map(str, kinds)} <= {"object", "array"}:
        inside = {"object": _properties, "array": _items}
        yield _Part(place).one_of(
            [_Part(place).all_of([*inside[str(kind)](schema, place, part_of)]) for kind in kinds]
        )


def _properties(schema: dict[str, Any], place: str, part_of: Any) -> Iterator[_Part]:
    known = schema.get("properties")
    for name in _list(schema.get("required")):
        if isinstance(known, dict) and isinstance(name, str) and name in known:
            yield part_of(known[name], f"{place}/properties/{name[:100]}")


def _items(schema: dict[str, Any], place: str, part_of: Any) -> Iterator[_Part]:
    least = schema.get("minItems", 0)
    least = least if isinstance(least, int) else 0
    items, behind = schema.get("prefixItems", schema.get("items")), schema.get("items")
    keyword = "prefixItems" if "prefixItems" in schema else "items"
    if isinstance(behind, list):
        behind = schema.get("additionalItems")
    first = _list(items)
    for at, each in enumerate(first[:least]):
        yield part_of(each, f"{place}/{keyword}/{at}")
    if least > len(first) and behind is not None:
        yield part_of(behind, f"{place}/items")


def _target(root: dict[str, Any], reference: str) -> Any:
    """What a reference within the schema names; None: nothing that is found."""
    found: Any = root
    for step in reference.lstrip("#").split("/")[1:]:
        name = step.replace("~1", "/").replace("~0", "~")
        if isinstance(found, dict) and name in found:
            found = found[name]
        elif isinstance(found, list) and _INDEX.fullmatch(name) and int(name) < len(found):
            found = found[int(name)]
        else:
            return None
    return found if reference == "#" or reference.startswith("#/") else None


def _below(root: _Part) -> list[_Part]:
    """A part and all that it needs, each once."""
    found, seen = [root], {id(root)}
    for part in found:  # grows meanwhile
        for other in part.needs:
            if id(other) not in seen:
                seen.add(id(other))
                found.append(other)
    return found


def _place(root: _Part) -> str:
    """Where a part without an end comes back to one that it is within."""
    part: _Part | None = root
    seen, place = set[int](), root.place
    while part is not None and id(part) not in seen:
        seen.add(id(part))
        if part.place.endswith("/$ref"):
            place = part.place
        part = next((each for each in part.needs if not each.ends), None)
    return place


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
