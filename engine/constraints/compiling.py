"""A request that waits for its constraint."""

from __future__ import annotations

from dataclasses import dataclass, field

from tokenpod.core.requests import Request
from tokenpod.engine.constraints.text import ConstrainedText


@dataclass(slots=True)
class Compiling:
    """A request whose constraint is being compiled."""

    request: Request
    asked_at: int
    texts: list[ConstrainedText] | None = None
    problem: str = ""
    done: bool = False
    #: Sequences that are over already.
    gone: set[int] = field(default_factory=set)
