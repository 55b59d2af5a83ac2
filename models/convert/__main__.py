"""A conversion's process: `python -m tokenpod.models.convert JOB`, without network and limited.

It prints one line of JSON: `{"tensors": ...}`, or `{"error": ...}` with exit status 1. A network
is given up before libraries start threads, memory and time before a file is opened.
"""

from __future__ import annotations

import json
import sys

from tokenpod.core.own_process import die_with_parent
from tokenpod.models.convert.limits import leave_the_network, limit


def main() -> int:
    """Convert, and say what came of it."""
    die_with_parent()
    isolated = leave_the_network()
    import msgspec
    from tqdm import tqdm

    from tokenpod.models.checkpoints.errors import ModelError
    from tokenpod.models.convert.job import Job, convert, memory_of

    job = msgspec.json.decode(sys.argv[1], type=Job)
    limit(memory=memory_of(job), seconds=job.seconds)
    if not isolated:
        print("warning: this system does not let a process leave the network", file=sys.stderr)
    off = not sys.stderr.isatty()
    bar = tqdm(desc="Converting", unit="B", unit_scale=True, leave=False, disable=off)

    def progress(done: int, total: int) -> None:
        bar.total = total
        bar.update(done - bar.n)

    try:
        converted = convert(job, progress)
    except ModelError as error:
        bar.close()
        print(json.dumps({"error": str(error)}))
        return 1
    bar.close()
    print(msgspec.json.encode(converted).decode())
    return 0


if __name__ == "__main__":
    sys.exit(main())
