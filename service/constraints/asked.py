"""From what a client asks for to the engine's constraint: all refusals that need no compiler."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Generator
from typing import TypeVar

from tokenpod.core.constraints import Choice, Constraint, Grammar, JsonSchema, Regex
from tokenpod.service.calls.call import AskedConstraint, ConstraintKind
from tokenpod.service.calls.errors import InvalidArgument
from tokenpod.service.constraints.json_schema import SchemaError, check_schema, read_schema
from tokenpod.service.constraints.regex import problem_of
from tokenpod.service.constraints.structural_tag import read_tags, tagged_of

_Made = TypeVar("_Made")

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
                    raise InvalidArgument(asked.field, problem)
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
        raise InvalidArgument(asked.field, str(error)) from None


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
