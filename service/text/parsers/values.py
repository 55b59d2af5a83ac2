"""Values of arguments that a model writes as they are, as JSON: what a tool's schema says they are.

A value between tags has no quotes: `12` may be a number or a text. The schema decides; where it
says nothing, what is JSON of another kind than a text is that.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any, NoReturn

from tokenpod.core.constraints import Argument, Arguments, Choice, JsonSchema
from tokenpod.service.text.parsers.calls import MOST_WRITTEN, TOO_LONG, ToolsError

#: Longer schemas are not looked into: reading one would hold up other streams.
_MOST_SCHEMA = 256 * 1024
_TEXT = "string"
_NAMES = {bool: "boolean", int: "integer", float: "number", str: _TEXT, list: "array"}
_NAMES |= {dict: "object", type(None): "null"}
#: What some models write for them.
_PYTHON = {"True": "true", "False": "false", "None": "null"}

Kinds = frozenset[str] | None


def kinds_of(schema: str) -> Mapping[str, Kinds]:
    """The JSON types of a tool's arguments by their names; None: any.

    Args:
        schema: of all arguments, JSON text.
    """
    if len(schema) > _MOST_SCHEMA:
        return {}
    try:
        properties = json.loads(schema or "{}")["properties"]
        return {name: _kinds(each) for name, each in properties.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return {}


def json_of(raw: str, kinds: Kinds) -> str:
    """A value as JSON text.

    Args:
        raw: as the model wrote it.
        kinds: the types that it may have; None: any.
    """
    text = raw.strip()
    if kinds != frozenset({_TEXT}):
        text = _PYTHON.get(text, text) if kinds is not None and _TEXT not in kinds else text
        found = _type_of(text)
        if found and found != _TEXT and (kinds is None or _fits(found, kinds)):
            return text
        if found == _TEXT and kinds is not None and _TEXT not in kinds:
            return text
    return json.dumps(raw, ensure_ascii=False)


def arguments_between(
    schema: Mapping[str, Any],
    texts: tuple[str, str],
    others: tuple[str, str],
    separator: str = "",
) -> Arguments:
    """Arguments that stand between tags, as a constraint: texts as they are, all else as JSON.

    Args:
        schema: of all of them, an object's.
        texts, others: what stands before a value and behind it; `{}` is its name.
        separator: between two.

    Raises ToolsError if the schemas are too long once their definitions are written out.
    """
    shared = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
    needed = {name for name in schema.get("required", []) if isinstance(name, str)}
    found, size = list[Argument](), 0
    for name, each in schema.get("properties", {}).items():
        if not name or any(char in "<>\"'{}:," or char.isspace() for char in name):
            # It would end its own tag.
            continue
        is_text = _kinds(each) == frozenset({_TEXT})
        begin, end = texts if is_text else others
        inside: JsonSchema | Choice | None
        if is_text:
            listed = each.get("enum", [each["const"]] if "const" in each else [])
            inside = Choice(tuple(listed)) if listed and all(listed) else None
        else:
            inside = JsonSchema(json.dumps(each | shared if isinstance(each, dict) else shared))
            # Each has the definitions: together they may be as long as the schema's square.
            size += len(inside.schema)
            if size > MOST_WRITTEN:
                raise ToolsError(TOO_LONG)
        found.append(Argument(begin.replace("{}", name), inside, end, name in needed))
    return Arguments(tuple(found), separator)


def _kinds(schema: Any) -> Kinds:
    if not isinstance(schema, dict):
        return None
    if isinstance(kind := schema.get("type"), str):
        return frozenset({kind})
    if isinstance(kind, list):
        return frozenset(map(str, kind))
    if isinstance(values := schema.get("enum"), list):
        return frozenset(_NAMES[type(value)] for value in values)
    for name in ("anyOf", "oneOf"):
        if isinstance(several := schema.get(name), list):
            every = [_kinds(each) for each in several]
            known = [each for each in every if each is not None]
            return frozenset().union(*known) if len(known) == len(every) else None
    return None


def _fits(found: str, kinds: frozenset[str]) -> bool:
    return found in kinds or (found == "integer" and "number" in kinds) or _TEXT not in kinds


def _type_of(text: str) -> str:
    """The JSON type of a text that is strict JSON; "": it is none."""
    try:
        value = json.loads(text, parse_constant=_refuse, parse_float=_finite, parse_int=_whole)
        # Halves of characters, which no message can hold.
        text.encode()
    except (ValueError, RecursionError):
        return ""
    return _NAMES[type(value)]


def _refuse(word: str) -> NoReturn:
    raise ValueError(word)


def _finite(digits: str) -> float:
    if not math.isfinite(value := float(digits)):
        raise ValueError(digits)
    return value


def _whole(digits: str) -> int:
    _finite(digits)
    return int(digits)
