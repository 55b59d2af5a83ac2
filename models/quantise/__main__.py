"""A quantisation's process: `python -m tokenpod.models.quantise JOB`.

It prints one line of JSON: what was written, or `{"error": ...}` with exit status 1.
"""

from __future__ import annotations

import json
import sys

import msgspec
from tqdm import tqdm

from tokenpod.core.own_process import die_with_parent
from tokenpod.models.checkpoints.errors import ModelError
from tokenpod.models.quantise.job import Job, quantise


def main() -> int:
    """Quantise, and say what came of it."""
    die_with_parent()
    job = msgspec.json.decode(sys.argv[1], type=Job)
    off = not sys.stderr.isatty()
    bar = tqdm(desc="Quantising", unit="B", unit_scale=True, leave=False, disable=off)

    def progress(done: int, total: int) -> None:
        bar.total = total
        bar.update(done - bar.n)

    try:
        written = quantise(job, progress)
    except (ModelError, OSError) as error:
        bar.close()
        print(json.dumps({"error": str(error)}))
        return 1
    bar.close()
    print(msgspec.json.encode(written).decode())
    return 0


if __name__ == "__main__":
    sys.exit(main())
