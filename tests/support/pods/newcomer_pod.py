"""`tokenpod serve` that speaks a newcomer's protocol too: `python newcomer_pod.py serve ...`."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))  # `python -P` leaves a script's own folder out

from support.pods.newcomer.methods import METHODS
from tokenpod.service import server
from tokenpod.service.rpc.methods import MethodTable
from tokenpod_client.cli.app import main

if __name__ == "__main__":
    # What a line in protocols.py does for a protocol of ours.
    server.TABLE = MethodTable([*server.TABLE, *METHODS])  # type: ignore[misc]
    sys.exit(main())
