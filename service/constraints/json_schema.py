"""JSON schemas of clients: keywords that are not served are refused by name and place.

Drafts 4, 6, 7, 2019-09 and 2020-12. What a schema says is for the engine to compile; here is
checked what would be ignored otherwise, or fetched.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Generator, Iterator
from typing import Any, NoReturn

from tokenpod.service.constraints.endless import endless_part
from tokenpod.service.constraints.regex import problem_of

#: Keywords whose value is a schema, a list of schemas, or schemas by name.
_SCHEMA = frozenset({"additionalProperties", "additionalItems", "items"})
_SCHEMAS = frozenset({"anyOf", "allOf", "oneOf", "prefixItems", "items"})
_NAMED = frozenset({"properties", "patternProperties", "$defs", "definitions"})
#: Keywords with other values.
_VALUES = frozenset(
    {
        *("type", "enum", "const", "format", "pattern", "$ref", "$anchor", "$schema", "$id", "id"),
        *("minLength", "maxLength", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"),
        *("multipleOf", "required", "minProperties", "maxProperties", "minItems", "maxItems"),
    }
)
#: Keywords that say nothing of what is valid.
_SAID = frozenset(
    {
        *("title", "description", "default", "example", "examples", "$comment", "deprecated"),
        *("readOnly", "writeOnly", "contentMediaType", "contentEncoding", "contentSchema"),
    }
)
SUPPORTED = _SCHEMA | _SCHEMAS | _NAMED | _VALUES
#: Neutral values of keywords that are not served.
_NEUTRAL = {"uniqueItems": False, "nullable": False}
_FORMATS = frozenset(
    {
        *("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid"),
        *("uri", "unknown"),
    }
)
_DRAFTS = ("draft-04/", "draft-06/", "draft-07/", "draft/2019-09/", "draft/2020-12/")
#: Levels of JSON, as the library reads them.
MOST_DEPTH = 100
#: Schemas within one, itself included.
MOST_SCHEMAS = 8192
#: How JSON writes half of a character; two of them in a row may be one.
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
#: Schemas that are looked at before others get their turn.
_SLICE = 256


class SchemaError(Exception):
    """What is wrong with a schema, and where."""

    def __init__(self, place: str, problem: str) -> None:
        super().__init__(f"{problem}, at {place}")


class TooManySchemas(SchemaError):
    """A schema holds more schemas than it may."""


def read_json(text: str) -> Any:
    """The value of a JSON text. Raises SchemaError, also for halves of characters (`\\ud800`)."""
    try:
        value = json.loads(text, parse_constant=_no_number, parse_float=_finite)
        if _SURROGATE.search(text):
            json.dumps(value, ensure_ascii=False).encode()
    except RecursionError:
        raise SchemaError("#", f"it has more than {MOST_DEPTH} levels") from None
    except UnicodeEncodeError:
        raise SchemaError("#", "it has half of a character, which no text can hold") from None
    except ValueError as error:
        raise SchemaError("#", f"it is no JSON text: {str(error)[:100]}") from None
    return value


def read_schema(text: str) -> dict[str, Any]:
    """The schema of a text. Raises SchemaError."""
    schema = read_json(text)
    if schema is True:
        return {}
    if not isinstance(schema, dict):
        raise SchemaError("#", f"a schema is an object, not {_kind(schema)}")
    return schema


def check_schema(schema: dict[str, Any], most: int = MOST_SCHEMAS) -> Generator[None, None, int]:
    """Raise SchemaError for what is not served, TooManySchemas for more than `most`.

    Keywords with neutral values are taken out, and some formats become patterns.

    Yields now and then; returns how many schemas there are.
    """
    draft = schema.get("$schema")
    if draft is not None and not (isinstance(draft, str) and any(d in draft for d in _DRAFTS)):
        raise SchemaError("#/$schema", f"{draft!r:.100} is no draft that is known")
    waiting: list[tuple[Any, str, int]] = [(schema, "#", 0)]
    looked, refers = 0, False
    while waiting:
        each, place, depth = waiting.pop()
        looked += 1
        if looked > most:
            raise TooManySchemas("#", f"it has more than {most} schemas")
        if looked % _SLICE == 0:
            yield
        if depth > MOST_DEPTH:
            raise SchemaError(place[:200], f"it has more than {MOST_DEPTH} levels")
        if isinstance(each, bool):
            continue
        if not isinstance(each, dict):
            raise SchemaError(place, f"a schema is an object, not {_kind(each)}")
        for keyword in [name for name, neutral in _NEUTRAL.items() if each.get(name) is neutral]:
            del each[keyword]
        refers = refers or "$ref" in each
        for keyword, value in each.items():
            waiting += _below(keyword, value, f"{place}/{_escaped(keyword)}", depth)
        # Behind the check: patterns of ours need none, and are long.
        spell_format(each)
    if refers and (place := (yield from endless_part(schema))):
        raise SchemaError(place, "no text has an end: each needs another one within")
    return looked


def _below(keyword: str, value: Any, place: str, depth: int) -> Iterator[tuple[Any, str, int]]:
    """Schemas that the value of a keyword holds."""
    if keyword in _SCHEMAS and isinstance(value, list):
        for at, each in enumerate(value):
            yield each, f"{place}/{at}", depth + 2
    elif keyword in _SCHEMA:
        yield value, place, depth + 1
    elif keyword in _NAMED and isinstance(value, dict):
        for name, each in value.items():
            if keyword == "patternProperties" and (problem := problem_of(name)):
                raise SchemaError(f"{place}/{_escaped(name)}", problem)
            yield each, f"{place}/{_escaped(name)}", depth + 2
    elif keyword in _VALUES:
        _check_value(keyword, value, place)
    elif keyword not in _SAID:
        raise SchemaError(place, f"the keyword {keyword!r:.100} is not supported")


def _check_value(keyword: str, value: Any, place: str) -> None:
    if keyword == "$ref":
        if not isinstance(value, str) or not value.startswith("#"):
            problem = (
                f"$ref is {value!r:.100}: only references within the schema (#...) are followed"
            )
            raise SchemaError(place, problem)
    elif keyword == "pattern":
        problem = problem_of(value) if isinstance(value, str) else "a pattern is a string"
        if problem:
            raise SchemaError(place, problem)
    elif keyword == "required":
        if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
            raise SchemaError(place, "it is a list of names")
    elif keyword == "format" and not (isinstance(value, str) and value in _FORMATS):
        raise SchemaError(place, f"the format {value!r:.100} is not supported")


def _escaped(name: str) -> str:
    """A part of a JSON pointer."""
    return name[:100].replace("~", "~0").replace("/", "~1")


def _kind(value: object) -> str:
    return {list: "a list", str: "a string", type(None): "null", bool: "false"}.get(
        type(value), "a number"
    )


def _no_number(word: str) -> NoReturn:
    raise ValueError(f"{word} is no number of JSON")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text[:20]} is too large")
    return number


# -- what `format` means -----------------------------------------------------------------------

_YEAR = "(?:[0-9]{3}[1-9]|[0-9]{2}[1-9]0|[0-9][1-9]00|[1-9]000)"
_BY_FOUR = "(?:0[48]|[2468][048]|[13579][26])"
_LEAP_YEAR = f"(?:[0-9]{{2}}{_BY_FOUR}|{_BY_FOUR}00)"
_DAY = (
    "(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])"
    "|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    "|02-(?:0[1-9]|1[0-9]|2[0-8]))"
)
_DATE = f"(?:{_YEAR}-{_DAY}|{_LEAP_YEAR}-02-29)"
_HOUR = "(?:[01][0-9]|2[0-3])"
_TIME = rf"{_HOUR}:[0-5][0-9]:[0-5][0-9](?:\.[0-9]+)?(?:[Zz]|[+-]{_HOUR}:[0-5][0-9])"
#: Up to 63 letters, digits and hyphens, none at either end, not both the third and the fourth.
_LABEL = (
    "[A-Za-z0-9](?:[A-Za-z0-9-]{0,2}[A-Za-z0-9]"
    "|[A-Za-z0-9-](?:[A-Za-z0-9][A-Za-z0-9-]|-[A-Za-z0-9])[A-Za-z0-9-]{0,58}[A-Za-z0-9])?"
)
_PATTERNS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}[Tt]{_TIME}",
    "hostname": rf"{_LABEL}(?:\.{_LABEL})*",
}
_MOST_OF_HOSTNAME = 253


def spell_format(schema: dict[str, Any]) -> None:
    """Put a pattern in the place of a schema's format, if there is one for it."""
    name = schema.get("format")
    pattern = _PATTERNS.get(name) if isinstance(name, str) else None
    others = schema.get("allOf", [])
    if pattern is None or not isinstance(others, list):
        return
    del schema["format"]
    limits: dict[str, Any] = {"pattern": f"^(?:{pattern})$"}
    if name == "hostname":
        limits["maxLength"] = _MOST_OF_HOSTNAME
    if limits.keys().isdisjoint(schema):
        schema |= limits
    else:
        schema["allOf"] = [*others, limits]
