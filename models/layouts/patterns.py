"""Names of modules that a config leaves out, as each project matches them.

Patterns come from files that are not trusted: their number and length are bounded, and one that is
no regular expression is refused.
"""

from __future__ import annotations

import re
from fnmatch import fnmatchcase
from functools import cache

from tokenpod.models.checkpoints.errors import ModelError
from tokenpod.models.checkpoints.fields import Fields

#: Layers times products of the largest models.
MOST_PATTERNS = 1 << 16
MOST_CHARACTERS = 500


def patterns_of(fields: Fields, *names: str) -> tuple[str, ...]:
    """What all of these fields list; absent and null are empty."""
    found = tuple(x for name in names if name in fields for x in fields.texts(name))
    if len(found) > MOST_PATTERNS or any(len(x) > MOST_CHARACTERS for x in found):
        raise ModelError(
            f"{fields.source}: {', '.join(names)} lists more than {MOST_PATTERNS} names, or one "
            f"longer than {MOST_CHARACTERS} characters"
        )
    return found


def named(pattern: str, module: str, source: str) -> bool:
    """By compressed-tensors' rules: the name, or behind `re:` what matches its beginning."""
    if pattern.startswith("re:"):
        return compiled(pattern.removeprefix("re:"), source).match(module) is not None
    return pattern == module


def kept(pattern: str, module: str, source: str) -> bool:
    """By transformers' rules (`should_convert_module`), for `modules_to_not_convert`.

    Up to a dot, as a regular expression that matches up to a dot, or as an ending.
    """
    if module.endswith(pattern) or module.startswith(f"{pattern}."):
        return True
    return compiled(rf"(?:{pattern})(?:(?<=\.)|(?=\.|$))", source).match(module) is not None


def excluded(pattern: str, module: str) -> bool:
    """By ModelOpt's rules: with `*` for anything; a pattern leaves out what is inside it too."""
    return fnmatchcase(module, pattern) or fnmatchcase(module, f"{pattern}.*")


@cache
def compiled(pattern: str, source: str) -> re.Pattern[str]:
    """A regular expression; ModelError if it is none."""
    try:
        return re.compile(pattern)
    except re.error as error:
        raise ModelError(f"{source}: {pattern!r} is no regular expression ({error})") from None
