"""From what a client asks for to the engine's constraint: all refusals that need no compiler."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Generator, Mapping
from typing import Any, TypeVar

from tokenpod.core.constraints import Choice, Constraint, Grammar, JsonSchema, Regex, Tag, Tagged
from tokenpod.service.calls.call import AskedConstraint, ConstraintKind
from tokenpod.service.calls.errors import InvalidArgument
from tokenpod.service.constraints.json_schema import (
    SchemaError,
    check_schema,
    read_json,
    read_schema,
)
from tokenpod.service.constraints.regex import problem_of

_Made = TypeVar("_Made")

#: What is wrong with a constraint follows.
_UNUSABLE = "can't be used"
#: Any JSON object.
_OBJECT = '{"type": "object"}'


async def constraint_of(asked: AskedConstraint) -> Constraint:
    """The engine's constraint, whose size has been checked. Others get their turn meanwhile.

    Raises InvalidArgument with the place and the reason.
    """
    try:
        match asked.kind:
            case ConstraintKind.JSON_SCHEMA:
                return await _json_schema(asked.text)
            case ConstraintKind.JSON_OBJECT:
                return JsonSchema(_OBJECT)
            case ConstraintKind.REGEX:
                if problem := problem_of(asked.text):
                    raise InvalidArgument(asked.field, f"{_UNUSABLE}: {problem}")
                return Regex(asked.text)
            case ConstraintKind.GRAMMAR:
                return Grammar(asked.text)
            case ConstraintKind.CHOICE:
                return Choice(tuple(asked.texts))
            case ConstraintKind.STRUCTURAL_TAG:
                return await _in_turns(tagged_of(read_tags(asked.text)))
            case ConstraintKind.UNKNOWN:
                raise InvalidArgument(asked.field, f"is {asked.text}, which is not known")
    except SchemaError as error:
        raise InvalidArgument(asked.field, f"{_UNUSABLE}: {error}") from None


async def _json_schema(text: str) -> JsonSchema:
    schema = read_schema(text)
    await _in_turns(check_schema(schema))
    return JsonSchema(json.dumps(schema))


async def _in_turns(work: Generator[None, None, _Made]) -> _Made:
    """Do work, with others' turns in between."""
    while True:
        try:
            next(work)
        except StopIteration as done:
            found: _Made = done.value
            return found
        await asyncio.sleep(0)


# -- structural tags ---------------------------------------------------------------------------

MOST_TAGS = 512

#: Yields now and then, so that others get their turn.
Sliced = Generator[None, None, _Made]


def read_tags(text: str) -> dict[str, Any]:
    """The object of a text. Raises SchemaError."""
    found = read_json(text)
    if not isinstance(found, dict):
        raise SchemaError("#", "it is no JSON object")
    return found


def tagged_of(described: Mapping[str, Any]) -> Sliced[Tagged]:
    """The tags. Raises SchemaError."""
    if "structures" in described:
        tags = yield from _structures(_list(described, "structures", "#"))
        triggers = _strings(described, "triggers", "#")
        return _in_text(tags, triggers, least=0, most=None)
    if described.get("type") != "structural_tag":
        raise SchemaError("#", "neither `structures` nor the type `structural_tag` is there")
    form = described.get("format")
    if not isinstance(form, dict):
        raise SchemaError("#/format", "it is no object")
    return (yield from _format(form, "#/format"))


def _structures(structures: list[Any]) -> Sliced[list[Tag]]:
    tags: list[Tag] = []
    for at, each in enumerate(structures):
        place = f"#/structures/{at}"
        content = {"type": "json_schema", "json_schema": _member(each, "schema", place)}
        tag = {"begin": each.get("begin"), "content": content, "end": each.get("end")}
        tags.append((yield from _tag(tag, place)))
    return tags


def _format(form: dict[str, Any], place: str) -> Sliced[Tagged]:
    match form.get("type"):
        case "tag":
            tag = yield from _tag(form, place)
            return Tagged((tag,), least=1, most=1)
        case "triggered_tags":
            tags = yield from _tags(form, place)
            one = bool(form.get("stop_after_first"))
            least = 1 if form.get("at_least_one") or one else 0
            triggers = _strings(form, "triggers", place)
            return _in_text(tags, triggers, least=least, most=1 if one else None)
        case "tags_with_separator":
            tags = yield from _tags(form, place)
            separator = _string(form, "separator", place)
            one = bool(form.get("stop_after_first"))
            least = 1 if form.get("at_least_one") else 0
            return Tagged(tuple(tags), separator=separator, least=least, most=1 if one else None)
        case kind:
            raise SchemaError(f"{place}/type", f"the type {kind!r:.100} is not supported")


def _tags(form: dict[str, Any], place: str) -> Sliced[list[Tag]]:
    tags: list[Tag] = []
    for at, each in enumerate(_list(form, "tags", place)):
        tags.append((yield from _tag(each, f"{place}/tags/{at}")))
    return tags


def _tag(tag: Any, place: str) -> Sliced[Tag]:
    begin, end = _string(tag, "begin", place), _string(tag, "end", place)
    content = _member(tag, "content", place)
    inside: JsonSchema | Regex | None
    match _member(content, "type", f"{place}/content"):
        case "json_schema":
            schema = content.get("json_schema")
            schema = {} if schema is True else schema
            if not isinstance(schema, dict):
                raise SchemaError(f"{place}/content/json_schema", "it is no object")
            yield from check_schema(schema)
            inside = JsonSchema(json.dumps(schema))
        case "regex":
            pattern = _string(content, "pattern", f"{place}/content")
            if problem := problem_of(pattern):
                raise SchemaError(f"{place}/content/pattern", problem)
            inside = Regex(pattern)
        case "any_text":
            inside = None
        case kind:
            raise SchemaError(f"{place}/content", f"the type {kind!r:.100} is not supported")
    if not begin:
        raise SchemaError(f"{place}/begin", "it is empty")
    return Tag(begin, inside, end)


def _in_text(tags: list[Tag], triggers: list[str], *, least: int, most: int | None) -> Tagged:
    for at, trigger in enumerate(triggers):
        if not trigger:
            raise SchemaError(f"#/triggers/{at}", "it is empty")
    for tag in tags:
        if sum(tag.begin.startswith(trigger) for trigger in triggers) != 1:
            problem = f"{tag.begin!r:.100} does not begin with exactly one of them"
            raise SchemaError("#/triggers", problem)
    return Tagged(tuple(tags), least=least, most=most, triggers=tuple(triggers))


def _member(of: Any, name: str, place: str) -> Any:
    if not isinstance(of, dict) or name not in of:
        raise SchemaError(place, f"{name!r} is missing")
    return of[name]


def _string(of: Any, name: str, place: str) -> str:
    found = _member(of, name, place)
    if not isinstance(found, str):
        raise SchemaError(f"{place}/{name}", "it is no string")
    return found


def _list(of: Any, name: str, place: str) -> list[Any]:
    found = _member(of, name, place)
    if not isinstance(found, list) or not 1 <= len(found) <= MOST_TAGS:
        raise SchemaError(f"{place}/{name}", f"it is no list of 1 to {MOST_TAGS}")
    return found


def _strings(of: Any, name: str, place: str) -> list[str]:
    found = _list(of, name, place)
    if not all(isinstance(each, str) for each in found):
        raise SchemaError(f"{place}/{name}", "it holds something that is no string")
    return found
