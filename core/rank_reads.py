"""What a rank says of an adapter that it was asked to read."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RankRead:
    """One rank has read an adapter, or could not."""

    rank: int
    number: int
    #: SHA-256 of its files, in hexadecimal digits.
    digest: str = ""
    #: One line; empty: it has.
    problem: str = ""
