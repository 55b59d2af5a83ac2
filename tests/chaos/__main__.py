"""make chaos: attack real pods, then call one for minutes in every way, and print what held.

PYTHONPATH=tests python -m chaos [--seed N] [--short] [--minutes N] [--no-attacks]
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
import time

from chaos import mixed
from chaos.campaign import HEAD, Row, campaign, table


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seed", type=int, default=0, help="of order, moments and bytes")
    parser.add_argument("--short", action="store_true", help="less of it, and no restart")
    parser.add_argument(
        "--minutes",
        type=float,
        help="of mixed calls after the attacks (12, in the short form 0.5)",
    )
    parser.add_argument("--no-attacks", action="store_true", help="mixed calls alone")
    arguments = parser.parse_args()
    minutes = arguments.minutes
    if minutes is None:
        minutes = 0.5 if arguments.short else 12.0
    failed = 0 if arguments.no_attacks else _attack(arguments.seed, short=arguments.short)
    if minutes:
        failed += _mix(arguments.seed, minutes)
    return 1 if failed else 0


def _attack(seed: int, *, short: bool) -> int:
    """How many attacks were not withstood."""
    began = time.monotonic()

    def tell(row: Row) -> None:
        cells = [f"{head} {cell}" for head, cell in zip(HEAD[1:], row.cells()[1:], strict=True)]
        print(
            f"{row.attack}: {'; '.join(cells)} ({row.seconds:.0f} s)", file=sys.stderr, flush=True
        )

    rows = campaign(seed, short=short, tell=tell)
    failed = sum(bool(row.fault) for row in rows)
    print(table(rows))
    print(
        f"\nseed {seed}, {len(rows)} attacks, {failed} not withstood,"
        f" {time.monotonic() - began:.0f} s, {os.cpu_count()} cores, Python"
        f" {platform.python_version()}\n"
    )
    return failed


def _mix(seed: int, minutes: float) -> int:
    """In how many minutes something did not hold."""

    def tell(minute: mixed.Minute) -> None:
        cells = zip(mixed.HEAD[1:], minute.cells(), strict=True)
        print("; ".join(f"{head} {cell}" for head, cell in cells), file=sys.stderr, flush=True)
        if minute.fault:
            print(minute.fault, file=sys.stderr, flush=True)

    seen = mixed.mixed(seed, 60.0 * minutes, tell=tell)
    faults, stalls = sum(bool(each.fault) for each in seen), sum(each.stalled for each in seen)
    print(mixed.table(seen))
    print(
        f"\nseed {seed}, {minutes:g} minutes of mixed calls, {faults} with a fault, {stalls} with"
        f" a stall of more than {mixed.STALL_SECONDS * 1e3:.0f} ms"
    )
    return faults + stalls


if __name__ == "__main__":
    sys.exit(main())
