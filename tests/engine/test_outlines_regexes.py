"""Regular expressions that routers of TGI make of JSON schemas, by outlines-core.

outlines_regexes.json has those of 0.1.26, the nearest release to what router 3.3.7 is built with,
and of 0.2.14, as `outlines_core.json_schema.build_regex_from_schema` returns them.
"""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

import jsonschema
import numpy as np
import pytest

from support.engines import constrained
from tokenpod.core.constraints import Regex
from tokenpod.engine.constraints.guidance import Guidance
from tokenpod.service.constraints.regex import problem_of

MADE = json.loads((Path(__file__).parent / "outlines_regexes.json").read_text())
CASES = [(version, name) for version, each in MADE.items() for name in each]


@pytest.fixture(scope="module")
def library() -> Guidance:
    return Guidance(constrained.TOKENS.tokens, constrained.TOKENS.special)


@pytest.mark.parametrize(("version", "name"), CASES)
def test_what_a_routers_regex_lets_through_is_of_the_schema(
    library: Guidance, version: str, name: str
) -> None:
    made = MADE[version][name]
    assert not problem_of(made["regex"])
    ended = 0
    for seed in range(4):
        matcher, chance, text = library.compile(Regex(made["regex"])), random.Random(seed), b""
        words = np.zeros(-(-constrained.VOCABULARY // 32), np.int32)
        for _ in range(300):
            may_end = matcher.fill(words)
            allowed = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))
            # Short tokens, so that strings come to their end.
            short = [t for t in allowed.tolist() if len(constrained.TOKENS.tokens[t]) == 1]
            quotes = [t for t in short if constrained.TOKENS.tokens[t] == b'"']
            if may_end and (not short or chance.random() < 0.3):
                ended += 1
                told = text.decode()
                assert re.fullmatch(made["regex"], told)
                jsonschema.validate(json.loads(told), made["schema"])
                break
            token = chance.choice(quotes if quotes and chance.random() < 0.5 else short)
            matcher.take(token)
            text += constrained.TOKENS.tokens[token]
    assert ended
