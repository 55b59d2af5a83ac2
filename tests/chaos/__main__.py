"""make chaos: attack real pods, and print what held.

PYTHONPATH=tests python -m chaos [--seed N] [--short]
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
import time

from chaos.campaign import HEAD, Row, campaign, table


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seed", type=int, default=0, help="of order, moments and bytes")
    parser.add_argument("--short", action="store_true", help="less of it, and no restart")
    arguments = parser.parse_args()
    began = time.monotonic()

    def tell(row: Row) -> None:
        cells = [f"{head} {cell}" for head, cell in zip(HEAD[1:], row.cells()[1:], strict=True)]
        print(
            f"{row.attack}: {'; '.join(cells)} ({row.seconds:.0f} s)", file=sys.stderr, flush=True
        )

    rows = campaign(arguments.seed, short=arguments.short, tell=tell)
    failed = sum(bool(row.fault) for row in rows)
    print(table(rows))
    print(
        f"\nseed {arguments.seed}, {len(rows)} attacks, {failed} not withstood,"
        f" {time.monotonic() - began:.0f} s, {os.cpu_count()} cores, Python"
        f" {platform.python_version()}"
    )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
