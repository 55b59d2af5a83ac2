"""Constraints that are nearly right, by seeds: they are compiled or refused, and nothing else.

FUZZ_CONSTRAINTS says how many are checked; some of those that pass are compiled.
"""

from __future__ import annotations

import os
from collections import Counter
from itertools import islice

import msgspec
import pytest

from support.clients.odd_constraints import odd_constraints
from support.engines import constrained
from tokenpod.core.constraints import Constraint
from tokenpod.core.requests import Request
from tokenpod.engine.constraints.library import Refused
from tokenpod.engine.constraints.trial import TooLong
from tokenpod.engine.constraints.trials import Trials
from tokenpod.service.calls.errors import InvalidArgument
from tokenpod.service.constraints.asked import constraint_of

AMOUNT = int(os.environ.get("FUZZ_CONSTRAINTS", "3000"))
#: A constraint that takes longer is refused in a pod, too.
SECONDS = 2.0


async def passed(seed: int, amount: int) -> list[Constraint]:
    """Those that the service takes; the others are refused with a status that can be sent."""
    found = []
    for asked in odd_constraints(seed, amount):
        try:
            constraint = await constraint_of(asked)
        except InvalidArgument as refused:
            refused.status().SerializeToString()
            continue
        request = constrained.ask(1, constraint)
        sent = msgspec.msgpack.encode(request)
        assert msgspec.msgpack.decode(sent, type=Request).constraint == constraint
        found.append(constraint)
    return found


async def test_the_service_takes_a_constraint_or_refuses_it() -> None:
    found = await passed(2, AMOUNT)
    assert AMOUNT // 3 < len(found) < AMOUNT


@pytest.mark.pod
async def test_the_compiler_takes_a_constraint_or_refuses_it() -> None:
    """A fault of ours would raise `Fault`."""
    trials = Trials(constrained.TOKENS.tokens, constrained.TOKENS.special, 1)
    ends: Counter[str] = Counter()
    for constraint in islice(await passed(3, AMOUNT), AMOUNT // 6):
        try:
            trials.try_first(constraint, SECONDS)
            ends["compiled"] += 1
        except (Refused, TooLong) as error:
            ends["panicked" if "the library fails" in str(error) else type(error).__name__] += 1
    assert not ends["panicked"]
    assert min(ends["compiled"], ends["Refused"]) > AMOUNT // 50, ends
